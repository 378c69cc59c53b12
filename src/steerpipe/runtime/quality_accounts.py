"""What was substituted: in all, and in each answer. V rows of a pass, k experts per row."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.ids import SequenceId
from steerpipe.core.quality import Allowance, Purse, Substituted

REMEMBERED = 1024  # answers; of those that nobody asks about the oldest are forgotten


class Accounts:
    """Keeps count, and says whether what is to be substituted is within the allowance. One thread."""

    def __init__(self, allowance: Allowance | None = None) -> None:
        self.total = Substituted()
        self._costs = None if allowance is None else np.array(allowance.costs)  # [layers, k]
        self._mended = None if allowance is None else np.array(allowance.mended)  # [layers, k]
        self._purse = Purse(None if allowance is None else allowance.per_token)
        self._of: dict[SequenceId, Substituted] = {}
        self._rows: tuple[SequenceId | None, ...] = ()

    def begin(self, sequences: tuple[SequenceId | None, ...]) -> None:
        """A pass over a row of each starts; None: a row that keeps no account."""
        self._rows = sequences
        counted = [sequence for sequence in sequences if sequence is not None]
        self._purse.earn(len(counted))
        for sequence in dict.fromkeys(counted):
            self._of[sequence] = self._of.pop(sequence, Substituted())  # the one computed longest ago goes first
        while len(self._of) > max(REMEMBERED, len(sequences)):
            del self._of[next(iter(self._of))]

    def note(self, number: int, replaced: NDArray[np.bool_], *, free: bool = False) -> bool:
        """`replaced` [V, k] are to be substituted in a layer; False: they may not, and are counted as exact. `free`:
        whatever they cost, which is not known.
        """
        costs = np.zeros(replaced.shape[1]) if free or self._costs is None else self._costs[number]
        nats = replaced @ costs  # [V]
        allowed = self._purse.spend(float(nats.sum()))
        counts = replaced.sum(1) if allowed else np.zeros(len(replaced), dtype=np.int64)
        for row, sequence in enumerate(self._rows):
            own = Substituted(replaced.shape[1], int(counts[row]), 0, float(nats[row]) if allowed else 0.0)
            self._add(sequence, own)
        return allowed

    def computed(self, by_cpu: NDArray[np.bool_]) -> None:
        """`by_cpu` [V, k] of a layer are computed where they lie."""
        for sequence, count in zip(self._rows, by_cpu.sum(1).tolist(), strict=True):
            if count:
                self._add(sequence, Substituted(computed=count))

    def mended(self, number: int, pairs: Sequence[tuple[int, int]]) -> None:
        """(row, rank) pairs of a layer have been made good: they cost less than was thought."""
        for row, rank in pairs:
            saved = 0.0
            if self._costs is not None and self._mended is not None:
                saved = max(0.0, float(self._costs[number, rank] - self._mended[number, rank]))
            self._purse.refund(saved)
            self._add(self._rows[row], Substituted(patched=1, nats=-saved))

    def take(self, sequence: SequenceId) -> Substituted:
        """Of one answer, once; nothing where it had no token of its own to substitute in."""
        return self._of.pop(sequence, Substituted())

    def _add(self, sequence: SequenceId | None, more: Substituted) -> None:
        if sequence is None:
            return
        self.total += more
        if sequence in self._of:
            self._of[sequence] += more
