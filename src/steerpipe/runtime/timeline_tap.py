"""The compute half of a timeline: what stream 0 did, layer by layer."""

import time

from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.core.timeline import Timeline

LANE = "stream 0: compute"


class TimelineTap:
    """A ForwardTap. A layer has two spans: up to its router's decision, and its experts with what they waited for."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._since = 0.0
        self._running = ""  # what began at `_since`

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor, *, decode: bool) -> bool:
        self._since, self._running = time.perf_counter(), "embedding"
        return True

    def entering(self, layer: int, x: Tensor) -> None:
        self._turn(f"layer {layer}: attention and router")

    def routed(self, probe: RouterProbe) -> None:
        self._turn(f"layer {probe.layer}: experts")

    def end(self) -> None:
        self._turn("")

    def _turn(self, to: str) -> None:
        now = time.perf_counter()
        self._timeline.span(LANE, self._running, self._since, now)
        self._since, self._running = now, to
