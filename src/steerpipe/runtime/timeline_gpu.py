"""A timeline of a pipeline on a GPU: what its kernels did by the device's own clock, laid over the host's."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from steerpipe.core.timeline import Timeline
from steerpipe.model.decoder import StepDecoder
from steerpipe.runtime.timeline_tap import LANE as COMPUTE

if TYPE_CHECKING:
    from torch import Tensor

    from steerpipe.core.blocks import BlockSource
    from steerpipe.core.protocols import RoutingSink
    from steerpipe.model.gpu.decoder import GpuDecoder
    from steerpipe.model.spec import ModelSpec
    from steerpipe.model.step import StepRows
    from steerpipe.transfer.cuda.timed import TimedCopier

GUESSES = "stream 1: guesses"


class DeviceClock(Protocol):
    """See `model.gpu.clock.Clock`."""

    def parts(self) -> list[tuple[str, float, float]]: ...

    def now(self) -> float: ...


class Copies(Protocol):
    """See `transfer.cuda.timed.CopyRecord`."""

    def begin(self) -> None: ...

    def take(self) -> list[tuple[str, str, float, float]]: ...


class RecordingDecoder:
    """A StepDecoder: another one whose passes are written down. Each is waited for, so they are slower than others.

    Of a step of one row there are all layers, and what was sent for ahead where the device does that by itself; any
    other pass is one span. What the host copies is in all of them.
    """

    def __init__(
        self, decoder: "StepDecoder[BlockSource]", timeline: Timeline, compute: DeviceClock, guesses: DeviceClock,
        copies: Copies, replays: Callable[[], int], wait: Callable[[], None] = torch.cuda.synchronize,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`compute` and `guesses` write in captured steps; `replays` counts those of one row."""
        self._decoder, self._timeline = decoder, timeline
        self._compute, self._guesses, self._replays = compute, guesses, replays
        self._copies, self._wait, self._clock = copies, wait, clock

    @property
    def spec(self) -> "ModelSpec":
        return self._decoder.spec

    @property
    def rows_device(self) -> torch.device:
        return self._decoder.rows_device

    def forward(
        self, rows: "StepRows", experts: "BlockSource", wanted: Sequence[int], sink: "RoutingSink | None" = None
    ) -> "Tensor":
        self._wait()
        before, began = self._replays(), self._clock()
        self._copies.begin()
        logits = self._decoder.forward(rows, experts, wanted, sink)
        self._wait()
        ended = self._clock()
        if self._replays() > before:
            self._note_step()
        else:
            name = "decode" if rows.decode else "prompt"
            self._timeline.span(COMPUTE, f"{name}: {len(rows.real)} rows", began, ended)
        for lane, name, begin, end in self._copies.take():
            self._timeline.span(lane, name, began + begin, began + end)
        return logits

    def _note_step(self) -> None:
        asked, now = self._clock(), self._compute.now()
        ahead = (asked + self._clock()) / 2 - now  # the host's clock before the device's
        parts = self._compute.parts()
        for name, begin, end in parts:
            self._timeline.span(COMPUTE, name, begin + ahead, end + ahead)
        for name, begin, end in self._guesses.parts():
            if begin >= parts[0][1]:  # else nobody predicted in this step, and it is of an earlier one
                self._timeline.span(GUESSES, name, begin + ahead, end + ahead)


def record_on_gpu(
    whole: "StepDecoder[BlockSource]", decoder: "GpuDecoder", copier: "TimedCopier", timeline: Timeline
) -> "StepDecoder[BlockSource]":
    """`whole` with its passes written down; `decoder` is the innermost one, and `copier` moves its experts."""
    from steerpipe.model.gpu.clock import Clock  # Triton: only where there is a GPU
    from steerpipe.transfer.cuda.timed import CopyRecord

    decoder.clock, decoder.guess_clock = Clock(decoder.device), Clock(decoder.device)
    return RecordingDecoder(
        whole, timeline, decoder.clock, decoder.guess_clock, CopyRecord(copier), lambda: decoder.replays
    )


def timed_copier(device: torch.device) -> "TimedCopier":
    from steerpipe.transfer.cuda.timed import TimedCopier

    return TimedCopier(device, lambda source, size_bytes: f"{size_bytes:,} bytes")
