"""One decode step as it really ran: what the device computed and what the link moved, on one clock.

Compute is marked by kernels inside the graph (model/gpu/clock.py), copies by events around each of them. Both are laid
over each other at one point before the step; the two clocks are then off by about the time of an empty kernel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from steerpipe.core.timeline import Timeline
from steerpipe.model.gpu.clock import Clock
from steerpipe.transfer.cuda.copier import Mark
from steerpipe.transfer.cuda.stream import CudaCopier

_BUSY_CYCLES = 4_000_000  # about 2 ms
COMPUTE, WAITS, COPIES = "stream 0: compute", "stream 0: waits", "stream 1: copies"


@dataclass(frozen=True, slots=True)
class _Noted:
    lane: str
    name: str
    begin: torch.cuda.Event
    end: torch.cuda.Event


class TimedCopier(CudaCopier):
    """Notes when each block, or part of one, moved, and when the computing stream had to wait for one. `name_of`:
    (address in pinned memory, bytes) → its name.
    """

    def __init__(self, device: torch.device, name_of: Callable[[int, int], str]) -> None:
        super().__init__(device)
        self._name_of = name_of
        self.noted: list[_Noted] | None = None  # None: nobody wants to know

    def copy(self, source: int, into: int, size_bytes: int) -> None:
        with self._note(COPIES, self.stream, lambda: self._name_of(source, size_bytes)):
            super().copy(source, into, size_bytes)

    def join(self, mark: Mark) -> None:
        with self._note(WAITS, torch.cuda.current_stream(self.device), lambda: f"mark {mark.ordinal}"):
            super().join(mark)

    @contextmanager
    def _note(self, lane: str, stream: torch.cuda.Stream, name: Callable[[], str]) -> Iterator[None]:
        if self.noted is None:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        yield
        end.record(stream)
        self.noted.append(_Noted(lane, name(), begin, end))


def record_step(step: Callable[[], object], clock: Clock, copier: TimedCopier) -> Timeline:
    """The timeline of one step with `clock`, captured or launch by launch, whose blocks `copier` moves."""
    clock.now()  # compiled before it counts
    torch.cuda._sleep(_BUSY_CYCLES)  # noqa: SLF001  event and kernel are both queued when the device comes to them
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    began = clock.now()
    copier.noted = []
    try:
        step()
        torch.cuda.synchronize()
    finally:
        noted, copier.noted = copier.noted, None
    timeline = Timeline()
    for name, begin, end in clock.parts():
        timeline.span(COMPUTE, name, begin - began, end - began)
    for each in noted:
        begin, end = (start.elapsed_time(event) / 1e3 for event in (each.begin, each.end))
        timeline.span(each.lane, each.name, begin, end)
    return timeline
