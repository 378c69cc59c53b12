"""What happened when: spans of compute, copies and waits, written as a trace that Perfetto and Chrome show.

Lanes are rows of the picture: stream 0 computes, stream 1 copies. Times are on `time.perf_counter`.
"""

import json
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steerpipe.core.whole_file import write_named

MOST_SPANS: Final = 200_000  # about 60 MB of JSON; the newest are kept


@dataclass(frozen=True, slots=True)
class Span:
    lane: str
    name: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Timeline:
    """Collects spans from any thread. Costs under a microsecond each."""

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=most)
        self._lock = threading.Lock()
        self._dropped = 0

    def span(self, lane: str, name: str, begin: float, end: float) -> None:
        with self._lock:
            self._dropped += len(self._spans) == self._spans.maxlen
            self._spans.append(Span(lane, name, begin, end))

    def spans(self, lane: str | None = None) -> list[Span]:
        """In the order of their beginning."""
        with self._lock:
            held = list(self._spans)
        return sorted((each for each in held if lane in (None, each.lane)), key=lambda span: span.begin)

    @property
    def dropped(self) -> int:
        """Spans that were too many: the oldest."""
        return self._dropped

    def as_trace(self) -> dict[str, Any]:
        """Chrome's trace format: complete events in microseconds from the first span, a row per lane."""
        spans = self.spans()
        lanes = sorted({span.lane for span in spans})
        start = spans[0].begin if spans else 0.0
        names = [
            {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": lane}}
            for row, lane in enumerate(lanes)
        ]
        events = [
            {
                "ph": "X", "pid": 0, "tid": lanes.index(span.lane), "name": span.name,
                "ts": round((span.begin - start) * 1e6, 3), "dur": round(span.seconds * 1e6, 3),
            }
            for span in spans
        ]  # fmt: skip
        told = {"dropped_spans": self.dropped}
        return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": told}

    def write(self, file: Path) -> None:
        """Whole or not at all; CapacityError where it cannot be."""
        write_named(file, json.dumps(self.as_trace()).encode(), "the timeline")


def overlap_seconds(lane: list[Span], other: list[Span]) -> float:
    """For how long both lanes were busy at once. Spans of a lane do not overlap each other; both are in order."""
    total, left, right = 0.0, 0, 0
    while left < len(lane) and right < len(other):
        a, b = lane[left], other[right]
        total += max(0.0, min(a.end, b.end) - max(a.begin, b.begin))
        if a.end <= b.end:
            left += 1
        else:
            right += 1
    return total
