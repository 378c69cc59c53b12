"""One decode step as it really ran: what the device computed and what the link moved, on one clock.

Compute is marked by kernels inside the graph (model/gpu/clock.py), copies by events around each of them. Both are laid
over each other at one point before the step; the two clocks are then off by about the time of an empty kernel.
"""

from collections.abc import Callable

import torch

from steerpipe.core.timeline import Timeline
from steerpipe.model.gpu.clock import Clock
from steerpipe.transfer.cuda.timed import CopyRecord, TimedCopier

_BUSY_CYCLES = 4_000_000  # about 2 ms
COMPUTE = "stream 0: compute"


def record_step(step: Callable[[], object], clock: Clock, copier: TimedCopier) -> Timeline:
    """The timeline of one step with `clock`, captured or launch by launch, whose blocks `copier` moves."""
    clock.now()  # compiled before it counts
    copies, timeline = CopyRecord(copier), Timeline()
    torch.cuda._sleep(_BUSY_CYCLES)  # noqa: SLF001  event and kernel are both queued when the device comes to them
    copies.begin()
    began = clock.now()
    step()
    torch.cuda.synchronize()
    for name, begin, end in clock.parts():
        timeline.span(COMPUTE, name, begin - began, end - began)
    for lane, name, begin, end in copies.take():
        timeline.span(lane, name, begin, end)
    return timeline
