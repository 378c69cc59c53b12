"""One decode step as it really ran: what the device computed and what the link moved, on one clock.

Compute is marked by kernels inside the graph (model/gpu/clock.py), copies by events around each of them. Both are laid
over each other at one point before the step; the two clocks are then off by about the time of an empty kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from steerpipe.core.timeline import Timeline
from steerpipe.model.gpu.clock import Clock
from steerpipe.transfer.cuda.stream import CudaCopier

_BUSY_CYCLES = 4_000_000  # about 2 ms
COMPUTE, COPIES = "stream 0: compute", "stream 1: copies"


@dataclass(frozen=True, slots=True)
class _Copy:
    name: str
    begin: torch.cuda.Event
    end: torch.cuda.Event


class TimedCopier(CudaCopier):
    """Notes when each block, or part of one, moved. `name_of`: (address in pinned memory, bytes) → its name."""

    def __init__(self, device: torch.device, name_of: Callable[[int, int], str]) -> None:
        super().__init__(device)
        self._name_of = name_of
        self.copies: list[_Copy] | None = None  # None: nobody wants to know

    def copy(self, source: int, into: int, size_bytes: int) -> None:
        if self.copies is None:
            super().copy(source, into, size_bytes)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(self.stream)
        super().copy(source, into, size_bytes)
        end.record(self.stream)
        self.copies.append(_Copy(self._name_of(source, size_bytes), begin, end))


def record_step(step: Callable[[], object], clock: Clock, copier: TimedCopier) -> Timeline:
    """The timeline of one step whose graph was captured with `clock` and whose blocks `copier` moves."""
    clock.now()  # compiled before it counts
    torch.cuda._sleep(_BUSY_CYCLES)  # noqa: SLF001  event and kernel are both queued when the device comes to them
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    began = clock.now()
    copier.copies = []
    try:
        step()
        torch.cuda.synchronize()
    finally:
        copies, copier.copies = copier.copies, None
    timeline = Timeline()
    for name, begin, end in clock.parts():
        timeline.span(COMPUTE, name, begin - began, end - began)
    for each in copies:
        begin, end = (start.elapsed_time(event) / 1e3 for event in (each.begin, each.end))
        timeline.span(COPIES, each.name, begin, end)
    return timeline
