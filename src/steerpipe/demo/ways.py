"""One answer of the embedded model, five ways to have its experts: the same text, different stalls.

Every way runs as quick as this machine reads, three times, and over a link that is slowed until a block takes as many
layers' compute as it does for Qwen1.5-MoE in bf16 over PCIe 4. nano has that model's layers, experts and top-k.
"""

import itertools
import time
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from steerpipe.core.events import Completion
from steerpipe.demo.config import demo_config
from steerpipe.runtime.models import EMBEDDED
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.store.reader import open_pack

QUESTION: Final = "Do you like dogs?"
# Without the model's system message: behind a slowed link every token of a prompt takes its time.
PROMPT: Final = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
SEED: Final = 6
TOKENS: Final = (6, 24)  # fewest and most of an answer: a slow machine gives the fewest
PACED_SECONDS: Final = 35.0  # that the slowed answers may take together, as expected
# One expert of Qwen1.5-MoE in bf16 is 17.3 MB; PCIe 4 x16 moves 25 GB/s; a layer at batch 1 computes 0.1 ms.
LAYERS_PER_BLOCK: Final = 17_301_504 / 25e9 / 1e-4
ROUNDS: Final = 3  # of every way without the slowed link, which takes no time beside it
MISSES: Final = 2.6  # of all four ways together, per expert use: what the choice of TOKENS expects


@dataclass(frozen=True, slots=True)
class Way:
    """How the experts are had. `settings` are the engine's."""

    name: str
    settings: dict[str, Any]


WAYS: Final = (
    Way("on demand", {"fast_memory": "0.3%", "policy": "lru", "predict": "off"}),
    Way("LRU", {"fast_memory": "25%", "policy": "lru", "predict": "off"}),
    Way("LFRU", {"fast_memory": "25%", "policy": "lfru", "predict": "off"}),
    Way("predicted", {"fast_memory": "25%", "policy": "auto", "predict": "on"}),
)


@dataclass(frozen=True, slots=True)
class Speed:
    """Per token of the answer after the first."""

    token_ms: float
    stall_ms: float


@dataclass(frozen=True, slots=True)
class _Run:
    speed: Speed
    hit_rate: float
    same: bool  # tokens and log probabilities as with everything in memory


@dataclass(frozen=True, slots=True)
class WayCheck:
    """One way's answer against that of the resident model."""

    name: str
    hit_rate: float  # share of the routed experts that were in memory
    unpaced: Speed
    paced: Speed | None  # None: resident, there is no link
    changes_bits: bool


@dataclass(frozen=True, slots=True)
class Contest:
    """All ways, the resident one last."""

    answer: str
    answer_tokens: int
    tokens: int  # of them, that every way wrote: behind a slowed link a slow machine is given fewer
    pace_bytes_per_second: float
    ways: tuple[WayCheck, ...]


def run_ways(console: Console) -> Contest:
    """Shows the answer as it comes, then runs it every way. About a minute."""
    console.print(f"[bold]> {QUESTION}[/bold]")
    with _open(fast_memory="auto") as pipe:
        answer, told = pipe.stream(PROMPT, **_options(TOKENS[1])), [time.perf_counter()]
        for event in answer:
            told.append(time.perf_counter())
            console.print(event.text, end="", style="cyan", soft_wrap=True, highlight=False, markup=False)
        whole, layers = answer.completion, len(pipe.spec.moe_layers)
        uses = layers * pipe.spec.moe(pipe.spec.moe_layers[0]).top_k
    console.print()
    token_seconds = min(after - before for before, after in itertools.pairwise(told[1:]))  # the least disturbed
    block_seconds = LAYERS_PER_BLOCK * token_seconds / layers
    affordable = int(PACED_SECONDS / (MISSES * uses * block_seconds)) - len(whole.prompt_token_ids)
    tokens = max(TOKENS[0], min(len(whole.token_ids), affordable))
    pace = _block_bytes() / block_seconds
    with console.status("the same answer, other ways"):
        rounds = [[_run(way, whole, tokens) for way in WAYS] for _ in range(ROUNDS)]
        slowed = [_run(way, whole, tokens, pace=f"{pace:.0f}") for way in WAYS]
    found = [_check(way.name, *runs) for way, *runs in zip(WAYS, slowed, *rounds, strict=True)]
    ways = (*found, WayCheck("resident", 1.0, _speed(whole, 0.0), None, changes_bits=False))
    return Contest(whole.text, len(whole.token_ids), tokens, pace, ways)


def _run(way: Way, whole: Completion, tokens: int, **link: str) -> _Run:
    with _open(**way.settings, **link) as pipe:
        answer = pipe.stream(PROMPT, **_options(tokens))
        events = iter(answer)
        next(events)  # the prompt's
        before = pipe.counters()
        for _ in events:
            pass
        given, after = answer.completion, pipe.counters()
    assert before is not None and after is not None, "a way without a ladder is no way"
    spent = after - before
    same = given.token_ids == whole.token_ids[:tokens] and given.logprobs == whole.logprobs[:tokens]
    hit_rate = spent.hits / spent.leased if spent.leased else 1.0
    return _Run(_speed(given, spent.stall_seconds + spent.late_seconds), hit_rate, same)


def _check(name: str, slowed: _Run, *runs: _Run) -> WayCheck:
    """`runs` are as quick as the machine reads: the one in the middle is shown."""
    middle = sorted((each.speed for each in runs), key=lambda speed: speed.token_ms)[len(runs) // 2]
    return WayCheck(name, slowed.hit_rate, middle, slowed.speed, not all(each.same for each in (slowed, *runs)))


def _open(**settings: Any) -> Pipeline:
    return Pipeline(config=demo_config(profile=False, **settings))


def _options(tokens: int) -> dict[str, Any]:
    return {"raw": True, "seed": SEED, "max_tokens": tokens, "logprobs": 0}


def _speed(answer: Completion, stalled_seconds: float) -> Speed:
    count = answer.timings.predicted_n - 1
    return Speed(answer.timings.predicted_ms / count, stalled_seconds * 1e3 / count)


def _block_bytes() -> int:
    pack = open_pack(EMBEDDED)
    return max(pack.layout(layer).block_bytes for layer in pack.spec.moe_layers)


def ways_table(contest: Contest) -> Table:
    part = "" if contest.tokens == contest.answer_tokens else f"{contest.tokens} of "
    table = Table(
        title=f"One answer, {part}its {contest.answer_tokens} tokens, five ways to have its 1,440 experts",
        caption=f"ms per token after the first. In memory: on demand none, resident all, else 25 %. Slowed link: "
        f"{contest.pace_bytes_per_second / 1e6:.1f} MB/s, so that an expert takes as long to load as "
        f"{LAYERS_PER_BLOCK:.1f} layers take to compute, as for Qwen1.5-MoE in bf16 over PCIe 4 (17.3 MB at 25 GB/s "
        f"beside 0.1 ms a layer). This machine: the median of {ROUNDS} runs. Predicted: as with --predict on; left to "
        f"itself the engine tries it first and leaves it off where it does not pay",
    )
    for name in ("", "hits", "slowed link", "of it waiting", "this machine", "of it waiting", "the answer"):
        table.add_column(name, justify="left" if not name else "right")
    for check in contest.ways:
        paced = check.paced
        table.add_row(
            check.name,
            f"{check.hit_rate:.0%}",
            "" if paced is None else f"{paced.token_ms:.0f}",
            "" if paced is None else f"{paced.stall_ms:.0f}",
            f"{check.unpaced.token_ms:.0f}",
            f"{check.unpaced.stall_ms:.0f}",
            "other bits" if check.changes_bits else "same bits",
            style="bold red" if check.changes_bits else "",
        )
    return table


def gain_line(contest: Contest) -> str:
    """What prediction was worth where the link is the limit, in one line."""
    slowed = {check.name: check.paced.token_ms for check in contest.ways if check.paced is not None}
    demand, kept, predicted = slowed["on demand"], slowed["LFRU"], slowed["predicted"]
    change = f"{abs(1 - predicted / kept):.0%} {'less' if predicted <= kept else 'MORE'}"
    return (
        f"Behind the slowed link a token takes {demand:.0f} ms on demand, {kept:.0f} with a cache (LFRU), and "
        f"{predicted:.0f} with prediction and reuse eviction: {change} than with the cache alone."
    )
