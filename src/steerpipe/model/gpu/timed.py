"""Guesses that the device sends for by itself, with a clock around each: for a timeline."""

from collections.abc import Sequence

from torch import Tensor

from steerpipe.core.blocks import BlockForm, GuessLanding
from steerpipe.model.gpu.clock import Clock
from steerpipe.model.gpu.fetching import Fetching


class TimedFetching(Fetching):
    """Writes down when the copies behind each tap began and ended."""

    def __init__(
        self, slots: GuessLanding, tables: Sequence[Tensor], forms: Sequence[BlockForm], layers: Sequence[int],
        top_k: int, stamp: Tensor, clock: Clock,
    ) -> None:  # fmt: skip
        super().__init__(slots, tables, forms, layers, top_k, stamp)
        self._clock = clock

    def _fetch(self, order: int) -> None:
        if order == 0:
            self._clock.begin()
        self._clock.mark(f"layer {self._layers[self._after(order)[1]]}: guesses")
        super()._fetch(order)
        self._clock.mark("")
