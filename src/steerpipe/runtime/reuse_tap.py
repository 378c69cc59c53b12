"""Tells the eviction policy how soon experts are used again, from the states of the pass that runs."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.predict.reuse import LiveReuse, ReuseForecast
from steerpipe.store.policies import Reuse


class ReuseTap:
    """A ForwardTap. Each sequence has a past of its own; of a batch the soonest use counts."""

    def __init__(
        self, forecast: ReuseForecast, moe_layers: Sequence[int], policy: Reuse, tokens: Callable[[], float]
    ) -> None:
        """`tokens`: the policy's clock."""
        self._forecast = forecast
        self._number = {layer: number for number, layer in enumerate(moe_layers)}
        self._policy = policy
        self._tokens = tokens
        self._live: dict[SequenceId, LiveReuse] = {}
        self._sequences: tuple[SequenceId, ...] = ()

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor, *, decode: bool) -> bool:
        """A prompt says nothing: its experts pass through."""
        if not decode:
            return False
        self._sequences = sequences
        known = self._live
        self._live = {each: known.get(each) or LiveReuse(self._forecast) for each in sequences}
        return True

    def entering(self, layer: int, x: Tensor) -> None:
        pass

    def routed(self, probe: RouterProbe) -> None:
        number = self._number[probe.layer]
        if number not in self._forecast.config.taps:
            return
        told = [
            scores.numpy()
            for row, sequence in enumerate(self._sequences)
            if (scores := self._live[sequence].at(number, probe.residual[row : row + 1])) is not None
        ]
        self._policy.expect(told[0] if len(told) == 1 else np.max(told, axis=0), self._tokens())

    def end(self) -> None:
        pass
