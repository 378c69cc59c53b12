"""What a person is told beside an answer, on stderr: what lies where, and where the time went."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steerpipe.core.units import format_bytes

if TYPE_CHECKING:
    from steerpipe.core.events import Completion
    from steerpipe.core.quality import Substituted
    from steerpipe.runtime.pipeline import Pipeline
    from steerpipe.transfer.counters import LadderCounters


def show_memory(pipe: "Pipeline") -> None:
    """The table of what lies where; nothing for a model that is held whole."""
    if pipe.budget.resident:
        return
    table = Table("", "where", "bytes", "", box=None, pad_edge=False, style="dim", header_style="dim")
    for row in pipe.memory:
        table.add_row(row.what, row.where, format_bytes(row.size_bytes), row.why)
    Console(stderr=True, highlight=False).print(table)


def show_timings(completion: "Completion", counters: "LadderCounters | None") -> None:
    """One line, and with a ladder a second one that splits the time."""
    timings = completion.timings
    rate = (timings.predicted_n - 1) / timings.predicted_ms * 1e3 if timings.predicted_ms else 0.0  # first: prompt's
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(
        f"[dim]{timings.prompt_n} prompt tokens in {timings.prompt_ms:.0f} ms · {timings.predicted_n} tokens "
        f"in {timings.predicted_ms:.0f} ms ({rate:.1f} per second) · ended by {completion.finish_reason.value}[/dim]"
    )
    if counters is not None:
        console.print(f"[dim]{split_line(completion, counters)}[/dim]")


def show_prediction(pipe: "Pipeline") -> None:
    """A line where predictors are tried, or were: who is on, or that none pays; and on a GPU one about eviction."""
    for line in () if pipe.prediction is None else pipe.prediction.lines():
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[dim]{line}[/dim]")


def show_quality(completion: "Completion", pipe: "Pipeline", asked: str) -> None:
    """One line where something else than an exact answer was asked for."""
    line = quality_line(completion.substituted, pipe, asked)
    if line is not None:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[dim]{escape(line)}[/dim]")


def quality_line(substituted: "Substituted | None", pipe: "Pipeline", asked: str) -> str | None:
    """What is said of one answer; None: it was to be exact."""
    if asked in ("exact", "wait"):
        return None
    if pipe.quality is None or substituted is None:
        return f"quality {asked}: every expert is resident, nothing was substituted"
    line = pipe.quality.line(substituted)
    if pipe.config.device == "cuda" and pipe.budget.pinned_bytes:
        line += "; from page-locked memory exact answers are usually quicker on a GPU (docs/quality.md)"
    return line


def show_cover(completion: "Completion", asked: str | None) -> None:
    """One line where cover tokens were asked for."""
    if asked is not None:
        covered = completion.covered
        line = "cover: every expert is resident, nothing was covered" if covered is None else covered.line()
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[dim]{line}[/dim]")


def quality_json(completion: "Completion", pipe: "Pipeline") -> dict[str, Any] | None:
    if pipe.quality is None or completion.substituted is None:
        return None
    return pipe.quality.of(completion.substituted).as_json()


def split_line(completion: "Completion", counters: "LadderCounters") -> str:
    """Compute and the two waits are the answer's time; the disk reads beside them. `counters` of the answer."""
    total = completion.timings.prompt_ms + completion.timings.predicted_ms
    stall, late = counters.stall_seconds * 1e3, counters.late_seconds * 1e3
    hit_rate = counters.hits / counters.leased if counters.leased else 1.0
    return (
        f"compute {max(0.0, total - stall - late):.0f} ms + waiting for misses {stall:.0f} ms "
        f"+ for late guesses {late:.0f} ms · "
        f"disk {counters.disk_seconds * 1e3:.0f} ms meanwhile, {format_bytes(counters.disk_bytes)} · "
        f"{hit_rate:.0%} of {counters.leased} expert uses found in memory, {counters.evictions} evictions"
    )
