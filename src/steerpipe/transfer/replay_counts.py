"""What a replay counts, and the report that is made of it. Pure."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from steerpipe.transfer.replay_report import ReplayReport
from steerpipe.transfer.simulated import SimulatedLadder


@dataclass(slots=True)
class Counts:
    """Of the measured tokens."""

    hits: int = 0
    late: int = 0
    misses: int = 0
    guesses_used: int = 0
    computed: int = 0
    stall_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Mark:
    """Where everything that only grows stands; the first is taken when the first measured token begins."""

    seconds: float
    link_busy: float
    demand_bytes: int
    guess_bytes: int
    disk_bytes: int
    evictions: int
    guesses_sent: int

    @classmethod
    def of(cls, ladder: SimulatedLadder) -> Self:
        traffic = ladder.link.traffic
        below = ladder.disk.traffic if ladder.disk is not None else None
        disk_bytes = 0 if below is None else below.demand_bytes + below.guess_bytes
        return cls(
            ladder.time, traffic.busy_seconds, traffic.demand_bytes, traffic.guess_bytes, disk_bytes,
            ladder.evictions, ladder.guesses_sent,
        )  # fmt: skip


def make_report(
    name: str, ladder: SimulatedLadder, begin: Mark, counts: Counts, seconds: NDArray[np.float64]
) -> ReplayReport:
    """`seconds` [tokens]: of each measured one."""
    end, tokens = Mark.of(ladder), len(seconds)
    passed = end.seconds - begin.seconds
    return ReplayReport(
        name=name,
        tokens=tokens,
        slots=ladder.machine.slots,
        tpot_mean_seconds=float(seconds.mean()),
        tpot_median_seconds=float(np.median(seconds)),
        tpot_p95_seconds=float(np.percentile(seconds, 95)),
        stall_seconds_per_token=counts.stall_seconds / tokens,
        hits=counts.hits,
        late=counts.late,
        misses=counts.misses,
        demand_bytes_per_token=(end.demand_bytes - begin.demand_bytes) / tokens,
        guess_bytes_per_token=(end.guess_bytes - begin.guess_bytes) / tokens,
        disk_bytes_per_token=(end.disk_bytes - begin.disk_bytes) / tokens,
        link_utilisation=(end.link_busy - begin.link_busy) / passed if passed else 0.0,
        evictions=end.evictions - begin.evictions,
        guesses_sent=end.guesses_sent - begin.guesses_sent,
        guesses_used=counts.guesses_used,
        computed=counts.computed,
    )
