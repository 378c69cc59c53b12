"""What a replay found, for programs and for people."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from steerpipe.core.units import format_bytes
from steerpipe.transfer.machine import Machine

_HEADINGS = ("TPOT ms", "p95", "stall", "hit", "late", "MB/tok", "used", "link")  # the rest is in the JSON


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """One run. A routed expert is a hit (it was there), late (a guess was on its way) or a miss."""

    name: str
    tokens: int  # measured ones
    slots: int
    tpot_mean_seconds: float
    tpot_median_seconds: float
    tpot_p95_seconds: float
    stall_seconds_per_token: float  # compute waited for the link
    hits: int
    late: int
    misses: int
    demand_bytes_per_token: float
    guess_bytes_per_token: float
    disk_bytes_per_token: float  # read from the disk below the RAM; 0 where there is none
    link_utilisation: float
    evictions: int
    guesses_sent: int  # that were given a slot
    guesses_used: int  # of those: routed to before they were cut or evicted
    computed: int = 0  # of the misses: by a CPU, where they lie

    @property
    def uses(self) -> int:
        return self.hits + self.late + self.misses

    @property
    def hit_rate(self) -> float:
        return self.hits / self.uses

    @property
    def guess_precision(self) -> float:
        """Used / sent: prefetch pays while it exceeds 1 - Tc/Tx. 0 where nothing was sent."""
        return self.guesses_used / self.guesses_sent if self.guesses_sent else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"hit_rate": self.hit_rate, "guess_precision": self.guess_precision}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same recording on the same machine, from nothing kept to everything resident."""

    recording: str
    machine: Machine
    all_experts: int
    warmup_tokens: int  # came first and are not measured
    runs: tuple[ReplayReport, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "recording": self.recording,
            "machine": asdict(self.machine),
            "all_experts": self.all_experts,
            "warmup_tokens": self.warmup_tokens,
            "runs": [run.as_json() for run in self.runs],
        }


def render(comparison: Comparison) -> Table:
    """Something that a rich Console prints."""
    machine = comparison.machine
    share = machine.slots / comparison.all_experts
    table = Table(
        title=f"{comparison.recording}: {machine.slots} of {comparison.all_experts} experts in fast memory "
        f"({share:.1%}), blocks of {format_bytes(machine.block_bytes)} at "
        f"{machine.link_bytes_per_second / 1e9:.3g} GB/s, simulated",
        caption=f"measured: {comparison.runs[0].tokens} tokens after {comparison.warmup_tokens} of warm-up; "
        + _caption(machine),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("run")
    beside = machine.cpu_seconds is not None
    for heading in (*_HEADINGS, *(["CPU"] if beside else [])):
        table.add_column(heading, justify="right")
    for run in comparison.runs:
        table.add_row(*_row(run), *([f"{run.computed / run.uses:.0%}"] if beside else []))
    return table


def _caption(machine: Machine) -> str:
    block = f"one block takes {machine.block_seconds * 1e3:.3g} ms"
    if machine.decoding is not None:
        block += f" and {machine.decoding.seconds * 1e3:.3g} ms to decode"
    layer = f"a layer computes {machine.layer_seconds * 1e3:.3g} ms before its router has decided"
    if machine.ask_seconds:
        layer += f", and asks {machine.ask_seconds * 1e3:.3g} ms for what it misses"
    looking = machine.looking
    if looking.tap_seconds or looking.delay_seconds:
        layer += f"; looking ahead adds {looking.tap_seconds * 1e3:.3g} ms and speaks after "
        layer += f"{looking.delay_seconds * 1e3:.3g} ms"
    if machine.cpu_seconds is not None:
        layer += f"; a CPU computes a missing block in {machine.cpu_seconds * 1e3:.3g} ms"
    if apart := machine.end_seconds + machine.between_seconds:
        layer += f"; {apart * 1e3:.3g} ms lie between two tokens"
    return f"{block}, {layer}; used: share of guessed blocks"


def _row(run: ReplayReport) -> list[str]:
    times = (run.tpot_mean_seconds, run.tpot_p95_seconds, run.stall_seconds_per_token)
    return [
        run.name,
        *(f"{seconds * 1e3:.2f}" for seconds in times),
        *(f"{count / run.uses:.0%}" for count in (run.hits, run.late)),
        f"{(run.demand_bytes_per_token + run.guess_bytes_per_token) / 1e6:.4g}",
        f"{run.guess_precision:.0%}" if run.guesses_sent else "–",
        f"{run.link_utilisation:.0%}",
    ]
