"""Predictors of known quality for the simulator: right, wrong, or right as often as asked. Pure."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.errors import ConfigError


class Predictor(Protocol):
    """Knows, or pretends to know, what a layer will route to."""

    @property
    def horizon(self) -> int:
        """How many layers ahead it looks."""
        ...

    def predict(self, token: int, layer: int, ahead: int) -> Sequence[int]:
        """Experts of (`token`, `layer`) as they are expected `ahead` layers before; ahead is 1 to `horizon`."""
        ...


class ReuseScores(Protocol):
    """Knows how soon experts are used again."""

    def at(self, token: int, layer: int) -> NDArray[np.floating] | None:
        """[experts of all layers] as `store.policies.Reuse.expect` takes them, after the router of `layer` decided;
        None: nothing new."""
        ...


class PerfectPredictor:
    """Reads the recording."""

    def __init__(self, routing: NDArray[np.int64], horizon: int) -> None:
        self._routing = routing
        self.horizon = horizon

    def predict(self, token: int, layer: int, ahead: int) -> Sequence[int]:
        experts: list[int] = self._routing[token, layer].tolist()
        return experts


class RecallPredictor:
    """Names top_k experts, of which a share of `recalls[ahead - 1]` is right on average; the others are not routed to.

    Hits and misses fall by chance, apart for each (token, layer, ahead), from the seed.
    """

    def __init__(self, routing: NDArray[np.int64], experts: int, recalls: Sequence[float], seed: int = 0) -> None:
        if not all(0 <= recall <= 1 for recall in recalls):
            raise ConfigError(f"recalls of {', '.join(map(str, recalls))}", fix="give shares from 0 to 1, such as 0.8")
        random = np.random.default_rng(seed)
        self.horizon = len(recalls)
        self._said = [_spoil(routing, experts, recall, random) for recall in recalls]

    def predict(self, token: int, layer: int, ahead: int) -> Sequence[int]:
        experts: list[int] = self._said[ahead - 1][token, layer].tolist()
        return experts


def _spoil(routing: NDArray[np.int64], experts: int, recall: float, random: np.random.Generator) -> NDArray[np.int64]:
    """[tokens, layers, top_k]: an expert stays with probability `recall`, else one that is not routed to comes."""
    tokens, layers, top_k = routing.shape
    stays = random.random(routing.shape) < recall
    said = routing.copy()
    for token in range(tokens):  # one token at a time: [layers, experts] keys instead of [tokens, layers, experts]
        keys = random.random((layers, experts))
        np.put_along_axis(keys, routing[token], 2.0, axis=1)  # the true ones come last
        wrong = np.argpartition(keys, min(top_k, experts - 1), axis=1)[:, :top_k]
        said[token] = np.where(stays[token], routing[token], wrong)
    return said
