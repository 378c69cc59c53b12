"""How answers begin and where their tokens are routed, counted while a model answers. No torch.

L layers with experts, E experts, T tokens of the vocabulary, K experts that are kept of each layer, V rows.
"""

import zipfile
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.whole_file import write_whole
from steerpipe.predict.openings import OpeningTable

MOST_BYTES = 16 << 20  # of counts: 5,825 tokens of nano, 1,365 of Qwen3-30B
MOST_AT_ONCE = 256  # tokens of a step: twice as many always find a row
LEAST_MET = 8  # occurrences of a token that is told of, or kept
KEPT = 8  # experts per token and layer in the file
TOLD = 4  # in the table
_NO_FILE = (
    OSError, ValueError, KeyError, TypeError, IndexError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip  # what a damaged one can be: a flipped bit may ask for any method and any amount
_FULL = np.iinfo(np.uint16).max  # of a count: before it is reached all of them are halved


class RunningOpenings:
    """Counts of tokens that a model wrote: nothing that anybody typed is in them. One thread."""

    def __init__(self, layers: int, experts: int) -> None:
        self.answer = np.zeros((layers, experts), np.float64)  # uses among the first tokens of answers
        self.answer_tokens = 0
        self._room = max(4 * MOST_AT_ONCE, MOST_BYTES // (layers * experts * 2))
        self._rows: dict[int, int] = {}  # of each token
        self._met: NDArray[np.uint32] = np.zeros(self._room, np.uint32)
        self._uses: NDArray[np.uint16] = np.zeros((self._room, layers, experts), np.uint16)

    def add(self, tokens: Sequence[int], routed: NDArray[np.integer], begin: NDArray[np.bool_]) -> None:
        """A step has computed these, MOST_AT_ONCE at most: `routed` [L, V, k]; `begin` [V]: an answer's beginning."""
        layers, count = self.answer.shape
        rows = self._meet(tokens)
        uses, layer = self._uses.reshape(-1), np.arange(layers)[:, None, None]
        places = ((rows[:, None] * layers + layer) * count + routed).reshape(-1)
        if uses[places].max(initial=0) >= _FULL - MOST_AT_ONCE:
            self._uses //= 2
            self._met //= 2
        np.add.at(uses, places, 1)
        if begin.any():
            np.add.at(self.answer.reshape(-1), (layer * count + routed[:, begin]).reshape(-1), 1.0)
            self.answer_tokens += int(begin.sum())

    def _meet(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """The row of each. Who was met least makes room."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._rows]
        if len(self._rows) + len(new) > self._room:
            self._forget()
            new = [token for token in dict.fromkeys(tokens) if token not in self._rows]
        self._rows |= {token: len(self._rows) + number for number, token in enumerate(new)}
        rows = np.array([self._rows[token] for token in tokens], dtype=np.int64)
        np.add.at(self._met, rows, 1)
        return rows

    def table(self) -> OpeningTable | None:
        """What a draft's forecast asks; None: no answer has begun yet."""
        if not self.answer_tokens:
            return None
        tokens, met, experts, uses = self._top(TOLD)
        rates = np.rint(uses * np.float32(255) / met[:, None, None]).clip(0, 255).astype(np.uint8)
        answer = (self.answer / self.answer_tokens).astype(np.float32)
        return OpeningTable(answer, tokens, experts, rates)

    def save(self, file: Path, source: str) -> None:
        """Whole or not at all; OSError: it cannot be written. `source`: whose routing it is."""
        tokens, met, experts, uses = self._top(KEPT)
        content = BytesIO()
        np.savez_compressed(
            content, source=np.frombuffer(source.encode(), np.uint8), answer=self.answer, tokens=tokens, met=met,
            answer_tokens=np.array(self.answer_tokens), experts=experts, uses=uses.astype(np.uint16),
        )  # fmt: skip
        write_whole(file, content.getvalue())

    @classmethod
    def load(cls, file: Path, source: str, layers: int, experts: int) -> Self:
        """Goes on where another run ended; from the start, where there is no file that fits."""
        made = cls(layers, experts)
        try:
            with np.load(BytesIO(file.read_bytes()), allow_pickle=False) as found:
                if found["source"].tobytes() == source.encode():
                    made._take(**{name: found[name] for name in found if name != "source"})
        except _NO_FILE:
            return cls(layers, experts)
        return made

    def _take(
        self, answer: NDArray[np.float64], answer_tokens: NDArray[np.int64], tokens: NDArray[np.int32],
        met: NDArray[np.uint32], experts: NDArray[np.uint16], uses: NDArray[np.uint16],
    ) -> None:  # fmt: skip
        """ValueError or IndexError: it is of another shape."""
        count, layers = len(tokens), len(self.answer)
        fits = answer.shape == self.answer.shape and met.shape == (count,) and uses.shape == experts.shape
        if not fits or uses.shape[:2] != (count, layers) or count > self._room or len(set(tokens.tolist())) < count:
            raise ValueError("its arrays do not fit together")
        if not np.isfinite(answer).all() or answer.min() < 0 or answer_tokens < 0:
            raise ValueError("its counts are none")
        self._uses[np.arange(count)[:, None, None], np.arange(layers)[:, None], experts] = uses
        self._met[:count] = met
        self._rows = {token: row for row, token in enumerate(tokens.tolist())}
        self.answer, self.answer_tokens = answer.astype(np.float64), int(answer_tokens)

    def _top(self, most: int) -> tuple[NDArray[np.int32], NDArray[np.uint32], NDArray[np.uint16], NDArray[np.uint16]]:
        """Tokens [T] that were met often, how often, and their experts and uses [T, L, K], the most used first."""
        known = [(token, row) for token, row in self._rows.items() if self._met[row] >= LEAST_MET]
        rows = np.array([row for _, row in known], dtype=np.int64)
        uses = self._uses[rows]
        experts = np.argsort(-uses.astype(np.int32), axis=2, kind="stable")[..., :most]
        tokens = np.array([token for token, _ in known], dtype=np.int32)
        return tokens, self._met[rows], experts.astype(np.uint16), np.take_along_axis(uses, experts, axis=2)

    def _forget(self) -> None:
        """The half that was met least: they come again if they matter."""
        kept = sorted(self._rows.items(), key=lambda each: -int(self._met[each[1]]))[: self._room // 2]
        rows = np.array([row for _, row in kept], dtype=np.int64)
        uses, met = self._uses[rows], self._met[rows]
        self._uses[:], self._met[:] = 0, 0
        self._uses[: len(kept)], self._met[: len(kept)] = uses, met
        self._rows = {token: number for number, (token, _) in enumerate(kept)}
