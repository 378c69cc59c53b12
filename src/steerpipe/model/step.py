"""The rows of one forward pass: a stretch of one prompt, or one token of each sequence. R rows, V valid rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.model.attention import AttentionUnit
from steerpipe.model.cells import CELL, padded
from steerpipe.model.kv_cache import KvSequence

PROMPT_TAIL = 4  # tokens; 4 of top-4 touch about a quarter of 60 experts, what a tight budget holds


@dataclass(frozen=True)
class StepRows:
    """The rows of one forward pass and where they stand. KV room for them has been appended already.

    Tensors are made when they are asked for: a captured step has no use for them, and the device waits meanwhile.
    """

    device: torch.device  # of the tensors
    ids: Sequence[int]  # [R] tokens; 0 in padding
    at: Sequence[int]  # [R] positions; in decode 0 in padding
    real: range  # [V]: which rows are real
    sequences: tuple[SequenceId, ...]  # of each valid row
    units: tuple[AttentionUnit, ...]
    cell: int  # 16, or 1 for one-row decode
    highest: int  # largest position
    keep_rows: int  # so many of the last valid rows say which experts the tokens to come may need
    decode: bool  # one token of each sequence, or a stretch of one prompt

    @cached_property
    def tokens(self) -> Tensor:
        """[R] int64."""
        return torch.tensor(self.ids, device=self.device)

    @cached_property
    def positions(self) -> Tensor:
        """[R] int64."""
        return torch.tensor(self.at, device=self.device)

    @cached_property
    def valid(self) -> Tensor:
        """[V] int64: which rows are real."""
        return torch.arange(self.real.start, self.real.stop, device=self.device)


def prefill_rows(
    sequence: SequenceId, kv: KvSequence, tokens: Sequence[int], device: torch.device, *, last: bool = True
) -> StepRows:
    """The next `tokens` of one sequence, in padded cells at absolute positions; `last` if the prompt ends with them.

    Appends to `kv`.
    """
    start = kv.length
    kv.append(len(tokens))
    base = start - start % CELL
    rows = padded(start + len(tokens)) - base
    lead = start - base
    units = tuple(
        AttentionUnit(kv, row, CELL, base + row, (max(lead - row, 0), min(lead + len(tokens) - row, CELL)))
        for row in range(0, rows, CELL)
    )
    return StepRows(
        device=device,
        ids=[*([0] * lead), *tokens, *([0] * (rows - lead - len(tokens)))],
        at=range(base, base + rows),
        real=range(lead, lead + len(tokens)),
        sequences=(sequence,) * len(tokens),
        units=units,
        cell=CELL,
        highest=base + rows - 1,
        keep_rows=PROMPT_TAIL if last else 0,
        decode=False,
    )


def decode_rows(
    sequences: Sequence[SequenceId],
    kvs: Sequence[KvSequence],
    tokens: Sequence[int],
    device: torch.device,
    *,
    cell: int,
) -> StepRows:
    """One token of each sequence. `cell` 1 is the one-row class and takes one sequence. Appends to every kv."""
    assert cell == CELL or len(sequences) == 1, "the one-row class decodes one sequence"
    count = len(sequences)
    rows = -(-count // cell) * cell
    appended: list[KvSequence] = []
    try:
        for kv in kvs:
            kv.append(1)
            appended.append(kv)
    except Exception:
        for kv in appended:
            kv.truncate(kv.length - 1)
        raise
    at = [kv.length - 1 for kv in kvs]
    padding = [0] * (rows - count)
    return StepRows(
        device=device,
        ids=[*tokens, *padding],
        at=[*at, *padding],
        real=range(count),
        sequences=tuple(sequences),
        units=tuple(AttentionUnit(kv, row, 1, at[row], (0, 1)) for row, kv in enumerate(kvs)),
        cell=cell,
        highest=max(at),
        keep_rows=count,
        decode=True,
    )
