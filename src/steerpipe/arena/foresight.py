"""Forecasts over whole texts, in the form that the simulator asks for. Pure: no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Foresight:
    """What was said of every (token, layer), 1 to `horizon` layers ahead; a transfer.forecasts.Predictor.

    `ranked` [horizon, N, L, m]: the m likeliest experts, the likeliest first; `probability`: of each, as said (0 where
    nothing was said, and nothing is named).

    Naming only what is likely enough was tried and saved less (docs/arena.md): guesses move in idle time alone.
    """

    ranked: NDArray[np.int16]
    probability: NDArray[np.float32]

    @property
    def horizon(self) -> int:
        return len(self.ranked)

    def predict(self, token: int, layer: int, ahead: int) -> Sequence[int]:
        said = self.probability[ahead - 1, token, layer]
        sure = int((said > 0).sum())  # descending: the first so many
        experts: list[int] = self.ranked[ahead - 1, token, layer, :sure].tolist()
        return experts

    def joined(self, farther: Sequence[Self]) -> Self:
        """This one for the nearest layers, `farther` for those after them."""
        parts = (self, *farther)
        return type(self)(
            np.concatenate([each.ranked for each in parts]), np.concatenate([each.probability for each in parts])
        )


@dataclass(frozen=True, slots=True)
class ReuseForesight:
    """How soon experts are used again, as it was said at some (token, layer); a transfer.forecasts.ReuseScores."""

    scores: Mapping[tuple[int, int], NDArray[np.float32]]  # [experts of all layers] each
    half_life_tokens: float  # of the counts that the scores are added to

    def at(self, token: int, layer: int) -> NDArray[np.float32] | None:
        return self.scores.get((token, layer))
