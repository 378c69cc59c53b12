"""Times of a run: what is kept of them, in milliseconds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of steps, over all repeats."""

    count: int
    median_ms: float
    p95_ms: float
    mean_ms: float
    least_ms: float
    repeat_medians_ms: tuple[float, ...]  # how far two repeats of one thing are apart

    @classmethod
    def of(cls, repeats: Sequence[Sequence[float]]) -> "Times":
        """`repeats`: seconds of each step of each repeat."""
        every = sorted(seconds * 1e3 for repeat in repeats for seconds in repeat)
        assert every, "times of nothing"
        return cls(
            count=len(every),
            median_ms=statistics.median(every),
            p95_ms=every[min(len(every) - 1, int(0.95 * len(every)))],
            mean_ms=statistics.fmean(every),
            least_ms=every[0],
            repeat_medians_ms=tuple(statistics.median(repeat) * 1e3 for repeat in repeats),
        )
