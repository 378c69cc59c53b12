"""What a benchmark found, in figures. `report` shows them."""

from dataclasses import asdict, dataclass, field
from typing import Any

from steerpipe.bench.floors import ActiveBytes
from steerpipe.bench.options import DecodeOptions
from steerpipe.bench.routing import SHARES, Curve
from steerpipe.bench.timing import Times

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Pinning:
    """What it took to have all blocks of a shape in page-locked memory."""

    size_bytes: int
    fill_seconds: float  # first touch of every page, by threads
    register_seconds: float  # telling the driver

    @property
    def seconds(self) -> float:
        return self.fill_seconds + self.register_seconds


@dataclass(frozen=True, slots=True)
class Run:
    """One line of the table: a step of decode, or one prompt."""

    test: str  # "tg128 @ d4096" or "pp512", as llama-bench writes them
    format: str
    residency: float  # percent, as asked for
    slots: int
    context: int
    batch: int
    routing: str
    driver: str  # how experts came: "resident", "direct", "served", "leased", or "cpu" where the CPU computes
    times: Times
    floor: str  # which one
    floor_ms: float
    active: ActiveBytes
    experts_per_layer: float  # distinct ones in a step
    tokens_per_second: float
    predictor: str = "none"  # whose forecasts moved experts ahead
    guessed_bytes: float = 0.0  # per step: what was moved before it was asked for
    expert_kernels_ms: float | None = None
    expert_rate_share: float | None = None  # of the memory's rate, that the expert kernels reach
    hit_rate: float | None = None  # None where everything is resident
    missed_bytes: float = 0.0  # per step
    link_bytes_per_second: float | None = None
    resident_ms: float | None = None  # the same with all experts resident

    @property
    def ratio(self) -> float:
        return self.times.median_ms / self.floor_ms

    @property
    def expert_bytes_per_token(self) -> float:
        """Of expert weights that a token costs, where a step's experts are shared by its rows."""
        return self.active.experts / self.batch

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "expert_bytes_per_token": self.expert_bytes_per_token}


@dataclass(slots=True)
class Findings:
    """Grows while the benchmark runs, so that one that is cut short leaves what it had."""

    options: DecodeOptions
    device: str
    memory_rates: dict[str, float] = field(default_factory=dict)  # bytes per second, by the way it was measured
    pinnings: dict[str, Pinning] = field(default_factory=dict)  # by format
    curves: tuple[Curve, ...] = ()
    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def memory_rate(self) -> float:
        """The best that was measured."""
        return max(self.memory_rates.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "benchmark": "decode",
            "complete": self.complete,
            "options": asdict(self.options),
            "memory_bytes_per_second": self.memory_rates,
            "pinning": {name: asdict(each) | {"seconds": each.seconds} for name, each in self.pinnings.items()},
            "routing_curves": {"shares": list(SHARES), "policies": [asdict(curve) for curve in self.curves]},
            "runs": [run.as_json() for run in self.runs],
            "notes": self.notes,
        }
