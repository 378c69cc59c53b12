"""A copier that notes when blocks moved, and when the computing stream had to wait for one: for a timeline."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from steerpipe.transfer.cuda.copier import Mark
from steerpipe.transfer.cuda.stream import CudaCopier

WAITS, COPIES = "stream 0: waits", "stream 1: copies"


@dataclass(frozen=True, slots=True)
class Noted:
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
        self.noted: list[Noted] | None = None  # None: nobody wants to know

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
        self.noted.append(Noted(lane, name(), begin, end))


class CopyRecord:
    """What a TimedCopier moves in one pass after the other."""

    def __init__(self, copier: TimedCopier) -> None:
        self._copier = copier
        self._start = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        """A pass begins, behind what is queued on the current stream."""
        self._start.record()
        self._copier.noted = []

    def take(self) -> list[tuple[str, str, float, float]]:
        """(lane, name, begin, end) in seconds after `begin`, when the device has finished."""
        noted, self._copier.noted = self._copier.noted or [], None
        return [
            (each.lane, each.name, *(self._start.elapsed_time(event) / 1e3 for event in (each.begin, each.end)))
            for each in noted
        ]
