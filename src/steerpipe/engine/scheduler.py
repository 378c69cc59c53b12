"""Who runs next. Requests join and leave at token boundaries; nothing here computes.

A sequence is admitted when the KV pool can hold all that it may become, so a running answer never runs out of room.
Prefill chunks and decode steps take turns, so a long prompt does not starve the answers that are being written.
"""

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

from steerpipe.core.ids import SequenceId
from steerpipe.engine.request import Sequence
from steerpipe.model.cells import CELL
from steerpipe.model.kv_cache import BLOCK

_Turn = SequenceId | Literal["batched"]


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """The next tokens of one prompt; `last` when the prompt is complete with them."""

    sequence: Sequence
    tokens: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token of each sequence; one sequence of the one-row class, or several of the batched class."""

    sequences: tuple[Sequence, ...]
    batched: bool


class Scheduler:
    """First come, first admitted. One thread."""

    def __init__(self, *, capacity_blocks: int, max_batch: int, prefill_chunk: int) -> None:
        assert prefill_chunk % CELL == 0, "prefill chunks are whole cells"
        self._capacity = capacity_blocks
        self._max_batch = max_batch
        self._chunk = prefill_chunk
        self._waiting: deque[Sequence] = deque()
        self._running: dict[SequenceId, Sequence] = {}
        self._reserved = 0  # blocks
        self._decoded_last = True
        self._turns: list[_Turn] = []  # of the groups that have decoded, longest ago first

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it is, and frees its KV."""
        if self._running.pop(sequence.id, None) is not None:
            self._reserved -= reserved_blocks(sequence)
            self._turns = [turn for turn in self._turns if turn != sequence.id]
        else:
            self._waiting.remove(sequence)
        sequence.kv.free()

    def find(self, sequence_id: SequenceId) -> Sequence | None:
        waiting = (sequence for sequence in self._waiting if sequence.id == sequence_id)
        return self._running.get(sequence_id) or next(waiting, None)

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def next_step(self) -> PrefillStep | DecodeStep | None:
        self._admit()
        prefilling = next((s for s in self._running.values() if s.waiting_prompt), None)
        decoding = [s for s in self._running.values() if not s.waiting_prompt]
        if prefilling is not None and (self._decoded_last or not decoding):
            self._decoded_last = False
            return self._prefill(prefilling)
        self._decoded_last = True
        return self._decode(decoding) if decoding else None

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch:
            blocks = reserved_blocks(self._waiting[0])
            if self._reserved + blocks > self._capacity:
                return
            sequence = self._waiting.popleft()
            self._running[sequence.id] = sequence
            self._reserved += blocks

    def _prefill(self, sequence: Sequence) -> PrefillStep:
        waiting = sequence.waiting_prompt
        room = self._chunk - sequence.kv.length % CELL  # ends on a cell's edge, so that no cell is computed twice
        tokens = waiting[:room]
        return PrefillStep(sequence, tokens, last=len(tokens) == len(waiting))

    def _decode(self, decoding: Items[Sequence]) -> DecodeStep:
        """Round robin over the groups: all batched sequences are one group, every one-row sequence is its own."""
        batched = tuple(s for s in decoding if s.request.batched)
        groups = [(s,) for s in decoding if not s.request.batched] + ([batched] if batched else [])
        recent = {turn: age for age, turn in enumerate(self._turns)}
        group = min(groups, key=lambda g: recent.get(_turn_of(g), -1))
        self._turns = [*(turn for turn in self._turns if turn != _turn_of(group)), _turn_of(group)]
        return DecodeStep(group, batched=group[0].request.batched)


def _turn_of(group: Items[Sequence]) -> _Turn:
    """The batched group keeps its turn whoever is in it: short answers that come and go must not starve the others."""
    return "batched" if group[0].request.batched else group[0].id


def reserved_blocks(sequence: Sequence) -> int:
    """All that the sequence may become; the last token is sampled but never stored."""
    return -(-(len(sequence.request.prompt_ids) + sequence.limit - 1) // BLOCK)
