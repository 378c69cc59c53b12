"""What live predictions were worth, by predictor and layer. Pure.

Of every layer's routed experts: *missing* are those that were not in fast memory when the guess had to be made, and of
these *foreseen* are those that the predictor named. Of every guess sent: *used*, or wasted.
"""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Score:
    """Counts of one predictor; JSON-able by `dataclasses.asdict`."""

    decisions: int = 0  # layers that were predicted
    routed: int = 0
    named: int = 0  # of the routed ones, among the predictor's k most likely
    missing: int = 0
    foreseen: int = 0
    sent: int = 0
    used: int = 0  # of those sent: there, or on its way, when its layer came
    ready: int = 0  # of those used: all there

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, before: Self) -> Self:
        return type(self)(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    @property
    def late(self) -> int:
        """Still on their way when their layer came."""
        return self.used - self.ready

    @property
    def wasted(self) -> int:
        """Sent for nobody; of some only a part had moved."""
        return self.sent - self.used

    @property
    def recall(self) -> float:
        return self.named / self.routed if self.routed else 0.0

    @property
    def recall_on_misses(self) -> float:
        """The figure that matters: what is resident anyway needs no prophet."""
        return self.foreseen / self.missing if self.missing else 0.0

    @property
    def precision(self) -> float:
        """Share of the sent blocks that were used: prefetch pays above 1 - Tc / Tx where blocks are sent whole."""
        return self.used / self.sent if self.sent else 0.0


class Scorecard:
    """Counts, per predictor and layer."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._counts: dict[str, NDArray[np.int64]] = {}  # name → [layers, fields]

    def settle(
        self, name: str, layer: int, *, routed: NDArray[np.int64], named: NDArray[np.int64],
        absent: NDArray[np.bool_], sent: NDArray[np.bool_], ready: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        """Layer `layer` has routed. Masks are over its experts: `absent` when the guess was made, `sent` by it, `ready`
        now. `named`: the predictor's most likely ones, as many as were routed.
        """
        counts = self._counts.setdefault(name, np.zeros((self._layers, len(fields(Score))), dtype=np.int64))
        foretold = np.zeros_like(absent)
        foretold[named] = True
        right, missing = foretold[routed], absent[routed]
        used = sent[routed]
        counts[layer] += (
            1, len(routed), right.sum(), missing.sum(), (missing & right).sum(),
            sent.sum(), used.sum(), (used & ready[routed]).sum(),
        )  # fmt: skip

    def add(self, name: str, counts: NDArray[np.int64]) -> None:
        """[layers, fields of Score], counted elsewhere."""
        before = self._counts.get(name)
        self._counts[name] = counts if before is None else before + counts

    def layers(self, name: str) -> list[Score]:
        """In the order of the model."""
        return [self.layer(name, layer) for layer in range(self._layers)]

    def layer(self, name: str, layer: int) -> Score:
        counts = self._counts.get(name)
        return Score() if counts is None else Score(*counts[layer].tolist())

    def total(self, name: str) -> Score:
        counts = self._counts.get(name)
        return Score() if counts is None else Score(*counts.sum(axis=0).tolist())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._counts)
