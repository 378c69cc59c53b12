"""What the server counts, and what `/metrics` says. Names follow vLLM's, with `steerpipe_` before them."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from steerpipe.core.pages import PageCounts
from steerpipe.runtime.view import count_places
from steerpipe.server.exposition import Family, Histogram, counter, gauge, histogram
from steerpipe.server.messages import OVERHEAD_SECONDS, Ended, Observed, Ready
from steerpipe.server.prediction_metrics import prediction_families
from steerpipe.transfer.counters import LadderCounters

_PAGE_BYTES = 4096
_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_REASONS = ("demand", "prefetch", "draft")


def _latency() -> Histogram:
    return Histogram(_LATENCY)


@dataclass(slots=True)
class Metrics:
    """Counted on the event loop, as clients would count. A dead engine takes its own counters with it, not these."""

    http: Counter[str] = field(default_factory=Counter)  # answers by status
    finished: Counter[str] = field(default_factory=Counter)  # sequences by reason: stop, length, error, cancelled
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token: Histogram = field(default_factory=_latency)
    between_tokens: Histogram = field(default_factory=_latency)
    whole_request: Histogram = field(default_factory=_latency)
    queued: Histogram = field(default_factory=_latency)

    def ended(self, word: Ended, *, first: bool) -> None:
        """A sequence came to its end. A prompt counts with its `first` choice, as in `usage`."""
        self.finished[word.reason.value] += 1
        if first:
            self.prompt_tokens += word.timings.prompt_n + word.timings.cache_n
            self.cached_tokens += word.timings.cache_n
        self.queued.observe(word.timings.queued_ms / 1e3)

    def families(self) -> Iterator[Family]:
        name = "steerpipe_"
        reasons = {reason: float(self.finished[reason]) for reason in ("stop", "length", "error", "cancelled")}
        yield counter(f"{name}request_success_total", "Sequences that ended, by reason.", reasons, "finished_reason")
        yield counter(f"{name}http_responses_total", "Answers, by status.", dict(self.http), "status")
        yield counter(f"{name}prompt_tokens_total", "Prompt tokens of sequences that ended.", self.prompt_tokens)
        yield counter(f"{name}generation_tokens_total", "Tokens that were generated.", self.generated_tokens)
        yield counter(
            f"{name}prefix_cache_queries_total", "Prompt tokens that were looked for among kept prompts.",
            self.prompt_tokens,
        )  # fmt: skip
        yield counter(f"{name}prefix_cache_hits_total", "Of them, those that were there.", self.cached_tokens)
        yield histogram(f"{name}time_to_first_token_seconds", "From the request to its first token.", self.first_token)
        yield histogram(f"{name}inter_token_latency_seconds", "Between two tokens.", self.between_tokens)
        yield histogram(f"{name}e2e_request_latency_seconds", "From the request to its end.", self.whole_request)
        yield histogram(f"{name}request_queue_time_seconds", "Before the first step.", self.queued)


class TokenClock:
    """Times the tokens of one HTTP request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.perf_counter()
        self._last: dict[int, float] = {}  # choice → when its last token came
        self._ended = False

    def token(self, place: int) -> None:
        now = time.perf_counter()
        before = self._last.get(place)
        if before is None:
            self._metrics.first_token.observe(now - self._began)
        else:
            self._metrics.between_tokens.observe(now - before)
        self._last[place] = now
        self._metrics.generated_tokens += 1

    def end(self) -> None:
        """Twice is once."""
        if self._ended:
            return
        self._ended = True
        self._metrics.whole_request.observe(time.perf_counter() - self._began)


def engine_families(observed: Observed, facts: Ready) -> Iterator[Family]:
    """What the engine process counts since it was started."""
    load, times = observed.load, observed.times
    name = "steerpipe_"
    yield gauge(f"{name}num_requests_running", "Sequences that are computed.", load.running)
    yield gauge(f"{name}num_requests_waiting", "Sequences that wait for room.", load.waiting)
    yield gauge(f"{name}kv_cache_usage_perc", "Share of KV blocks in use.", load.live_blocks / load.capacity_blocks)
    yield gauge(f"{name}kv_cache_kept_perc", "Share held by prompts kept for reuse.",
                load.kept_blocks / load.capacity_blocks)  # fmt: skip
    yield counter(f"{name}engine_steps_total", "Prefill chunks and decode steps.", times.steps)
    yield counter(f"{name}engine_compute_seconds_total", "In forward passes and in choosing tokens.",
                  times.compute_seconds)  # fmt: skip
    waited = times.waited_seconds
    yield counter(f"{name}engine_waited_seconds_total", "The rest of steps, while the thread did not run.", waited)
    overhead = Histogram(OVERHEAD_SECONDS, list(times.overhead_counts), times.overhead_seconds)
    yield histogram(f"{name}scheduler_overhead_seconds", "The rest of a step, while its thread ran.", overhead)
    wall = Histogram(OVERHEAD_SECONDS, list(times.wall_counts), times.overhead_seconds + times.waited_seconds)
    yield histogram(f"{name}scheduler_wall_seconds", "The rest of a step, by the clock.", wall)
    where = {f"{row.what} ({row.where})": float(row.size_bytes) for row in facts.memory}
    yield gauge(f"{name}memory_bytes", "What lies where, as planned.", where, "what")
    yield gauge(f"{name}experts", "Experts by the best place that holds them.", dict(count_places(observed.map)),
                "place")  # fmt: skip
    if observed.pages is not None:
        yield from _page_families(observed.pages)
    if observed.experts is not None:
        yield from _expert_families(observed.experts)
    if observed.substituted is not None:
        uses = {"exact": observed.substituted.uses - observed.substituted.substituted,
                "substituted": observed.substituted.substituted}  # fmt: skip
        yield counter(
            f"{name}expert_uses_total", "Expert uses that a lossy engine computed, or did without.", uses, "how"
        )
    if observed.prediction is not None:
        yield from prediction_families(observed.prediction, observed.experts)


def _page_families(pages: PageCounts) -> Iterator[Family]:
    name = "steerpipe_page"
    holders = {"experts": float(pages.experts), "kv": float(pages.kv)}
    yield gauge(f"{name}s", "Pages of fast memory, by what they hold.", holders, "holder")
    yield counter(f"{name}s_taken_total", "Pages that keys and values took from the experts.", pages.taken)
    yield counter(f"{name}s_returned_total", "Pages that they gave back.", pages.returned)
    yield counter(f"{name}_moves_total", "Experts that made way and stayed in fast memory.", pages.moved)


def _expert_families(counters: LadderCounters) -> Iterator[Family]:
    name = "steerpipe_expert_"
    outcomes = {"hit": counters.hits, "late": counters.late, "miss": counters.misses}
    yield counter(f"{name}leases_total", "Experts that were needed: there, late or missing.", outcomes, "outcome")
    for what, text in (
        ("read_bytes", "Bytes that were moved to the fast memory."),
        ("transfers", "Blocks that arrived in the fast memory."),
        ("hits", "Experts that were there, by why they had come."),
        ("cancelled_bytes", "Bytes moved for nothing."),
    ):
        reasons = {reason: float(getattr(getattr(counters, reason), what)) for reason in _REASONS}
        yield counter(f"{name}{what}_total", text, reasons, "reason")
    yield counter(f"{name}evictions_total", "Experts that left the fast memory.", counters.evictions)
    stalls = {"miss": counters.stall_seconds, "late": counters.late_seconds}
    yield counter(f"{name}stall_seconds_total", "Waited for experts.", stalls, "kind")
    yield counter(f"{name}disk_reads_total", "Reads of the disk.", counters.disk_reads)
    yield counter(f"{name}disk_bytes_total", "Bytes read from the disk.", counters.disk_bytes)
    faults = {"retried": counters.retries, "reread": counters.rereads, "failed": counters.failures}
    yield counter(f"{name}faults_total", "Reads that failed, blocks read again, blocks not to be had.", faults, "kind")


def process_families(processes: dict[str, int | None]) -> Iterator[Family]:
    """Resident memory of the server and of the engine, where the system says."""
    sizes = {name: size for name, pid in processes.items() if pid is not None and (size := _resident_bytes(pid))}
    if sizes:
        yield gauge("steerpipe_process_resident_memory_bytes", "Resident memory.", sizes, "process")


def _resident_bytes(pid: int) -> float | None:
    try:
        return float(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):  # not Linux, or gone
        return None
