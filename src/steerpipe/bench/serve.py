"""What the server adds and what a batch gains: answers per second by number of clients, in one run."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from steerpipe.bench.serve_client import Target, ask_together
from steerpipe.bench.timing import Times

_TOPICS = (
    "the sun", "a dog", "rain", "bread", "the sea", "a small town", "music", "winter", "an old friend", "trains",
    "a garden", "the moon", "coffee", "a long walk", "school", "birds",
)  # fmt: skip
_COMPUTE = "steerpipe_engine_compute_seconds_total"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    clients: tuple[int, ...] = (1, 8)
    answers: int = 16  # for each number of clients
    tokens: int = 64  # of each answer


@dataclass(frozen=True, slots=True)
class ServeRun:
    """One number of clients."""

    clients: int
    tokens: int
    seconds: float
    compute_seconds: float  # of the engine, in forward passes and in choosing tokens
    first_token: Times
    between_tokens: Times

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def ceiling_tokens_per_second(self) -> float:
        """If the engine computed all the time, and nothing else took any."""
        return self.tokens / self.compute_seconds

    def as_json(self) -> dict[str, Any]:
        rates = {name: getattr(self, name) for name in ("tokens_per_second", "ceiling_tokens_per_second")}
        return asdict(self) | rates


def run_serve(target: Target, options: ServeOptions, say: Callable[[str], None]) -> list[ServeRun]:
    """Measures each number of clients; the first answers are not counted."""
    ask_together(target, _prompts("warm", max(options.clients)), max(options.clients), 8)
    runs = []
    for clients in options.clients:
        before = target.metrics()[_COMPUTE]
        timed, seconds = ask_together(target, _prompts(f"run {clients}", options.answers), clients, options.tokens)
        run = ServeRun(
            clients=clients,
            tokens=sum(each.tokens for each in timed),
            seconds=seconds,
            compute_seconds=target.metrics()[_COMPUTE] - before,
            first_token=Times.of([[each.first for each in timed]]),
            between_tokens=Times.of([[gap for each in timed for gap in each.gaps]]),
        )
        say(f"{clients} clients: {run.tokens_per_second:.1f} tokens/s of {run.ceiling_tokens_per_second:.1f} computed")
        runs.append(run)
    return runs


def ratio(runs: list[ServeRun]) -> float:
    """Throughput of the last number of clients over that of the first."""
    return runs[-1].tokens_per_second / runs[0].tokens_per_second


def render_serve(runs: list[ServeRun], name: str) -> Table:
    table = Table(
        title=f"{name}: tokens per second by number of clients",
        caption="ceiling: tokens per second that the engine spent computing; the rest is scheduling, pipes and HTTP",
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    headings = ("clients", "ceiling tok/s", "tok/s", "TTFT ms", "p95", "between tokens ms", "p95", "× first row")
    for heading in headings:
        table.add_column(heading, justify="right")
    for run in runs:
        times = (run.first_token.median_ms, run.first_token.p95_ms)
        gaps = (run.between_tokens.median_ms, run.between_tokens.p95_ms)
        table.add_row(
            str(run.clients), f"{run.ceiling_tokens_per_second:.1f}", f"{run.tokens_per_second:.1f}",
            *(f"{value:.1f}" for value in (*times, *gaps)), f"{run.tokens_per_second / runs[0].tokens_per_second:.2f}",
        )  # fmt: skip
    return table


def _prompts(label: str, count: int) -> list[str]:
    """All different, so that no prompt finds another's keys and values."""
    return [f"({label}, {place}) Tell me about {_TOPICS[place % len(_TOPICS)]}." for place in range(count)]
