"""The tables of an arena as plain text cells: the terminal and the page show the same ones. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from steerpipe.arena.amdahl import amdahl_speedup
from steerpipe.arena.entries import Role
from steerpipe.arena.results import ArenaResult, EntryResult, HorizonResult
from steerpipe.arena.timing import Timing
from steerpipe.arena.worth import LFRU, MachineWorth
from steerpipe.transfer.replay_report import ReplayReport

ABSENT = "–"


@dataclass(frozen=True, slots=True)
class TextTable:
    title: str
    caption: str
    headings: tuple[str, ...]  # the first column is text, the others are figures
    rows: tuple[tuple[str, ...], ...]


def metrics_table(result: ArenaResult) -> TextTable:
    setting, k = result.setting, result.setting.geometry.top_k
    headings = (
        "predictor", "ahead", "top-1", f"@{k}", f"@{k + 2}", f"@{2 * k}", "misses", "Jaccard", "perfect", "gates",
        "ECE", "layers 0-2",
    )  # fmt: skip
    rows = [
        _metric_row(entry, each)
        for entry in result.entries
        for each in (entry.horizons if entry.role is not Role.BOUND else entry.horizons[:1])
    ]
    rows += [(f"{entry.name}: refused", *(ABSENT,) * (len(headings) - 1)) for entry in result.refused]
    return TextTable(
        f"{setting.source}: {setting.test_tokens:,} held-out tokens of {setting.test_prompts} prompts; "
        f"training: {setting.train_tokens:,} tokens of {setting.train_prompts} prompts; "
        f"{setting.opening_tokens:,} tokens left out that a training text begins with too",
        f"percent. ahead 0: before the layer's own attention; @n: of {k} routed experts, among the n named first; "
        f"misses: @{k} of uses that an LFRU cache of {setting.miss_residency:.1%} missed (it hit "
        f"{setting.miss_hit_rate:.0%}); gates: router weight covered; ECE over all experts; means over layers decided "
        f"within the token; layers 0-2: @{k} there. Chance: {100 * setting.chance:.1f}"
        + (". The control is missing: it answers at none of these horizons" if result.control_excess is None else ""),
        headings,
        tuple(rows),
    )


def _metric_row(entry: EntryResult, at: HorizonResult) -> tuple[str, ...]:
    overall = at.overall
    shares = (
        overall.top_1, overall.recall, overall.recall_wider, overall.recall_double, overall.recall_on_misses,
        overall.jaccard, overall.perfect, overall.gate_mass, overall.calibration_error,
        None if at.first_layers is None else at.first_layers.recall,
    )  # fmt: skip
    return (_named(entry), str(at.horizon), *(_percent(each) for each in shares))


def cost_table(result: ArenaResult) -> TextTable:
    rows = []
    for entry in result.entries:
        training = entry.training
        rows.append((
            _named(entry),
            _count(entry.parameters),
            _count(entry.multiply_adds),
            _microseconds(entry.cpu),
            _gpu_microseconds(entry.gpu),
            ABSENT if training is None else f"{training.tokens:,}",
            ABSENT if training is None else f"{training.seconds:.1f}",
            entry.origin,
        ))  # fmt: skip
    return TextTable(
        f"cost, measured on {result.setting.machine}",
        "us per token: median, a decision for every layer of one token, one after the other, at the shortest horizon; "
        "CPU: its own time; GPU: as one CUDA graph where it can be captured (else *, launched one by one)",
        ("predictor", "parameters", "mul-adds/decision", "us CPU", "us GPU", "train tokens", "train s", "origin"),
        tuple(rows),
    )


def worth_table(worth: MachineWorth, measured_tokens: int) -> TextTable:
    lfru = worth.baseline(LFRU).tpot_mean_seconds
    return TextTable(
        f"{worth.machine.name}: {measured_tokens:,} tokens replayed",
        f"simulated. Forecasts ride on LFRU; perfect and Belady are the oracles; against LFRU: change of TPOT; "
        f"used: share of guessed blocks (sending pays above {worth.machine.paying_precision:.0%})",
        ("run", "TPOT ms", "p95", "against LFRU", "stall ms", "hit", "late", "MB/token", "used"),
        tuple(_worth_row(run, lfru) for run in _runs(worth)),
    )


def _worth_row(run: ReplayReport, lfru_seconds: float) -> tuple[str, ...]:
    uses = run.hits + run.late + run.misses
    return (
        run.name,
        f"{run.tpot_mean_seconds * 1e3:.2f}",
        f"{run.tpot_p95_seconds * 1e3:.2f}",
        f"{run.tpot_mean_seconds / lfru_seconds - 1:+.1%}",
        f"{run.stall_seconds_per_token * 1e3:.2f}",
        f"{run.hits / uses:.0%}",
        f"{run.late / uses:.0%}",
        f"{(run.demand_bytes_per_token + run.guess_bytes_per_token) / 1e6:,.0f}",
        f"{run.guess_precision:.0%}" if run.guesses_sent else ABSENT,
    )


def summary_table(worth: Sequence[MachineWorth]) -> TextTable:
    """TPOT of every run on every machine, in milliseconds."""
    names = [run.name for run in _runs(worth[0])]
    rows = [
        (name, *(f"{run.tpot_mean_seconds * 1e3:.2f}" for each in worth for run in _runs(each) if run.name == name))
        for name in names
    ]
    return TextTable(
        "TPOT in ms on every machine",
        "simulated; a forecast rides on LFRU",
        ("run", *(each.machine.name for each in worth)),
        tuple(rows),
    )


def amdahl_table(result: ArenaResult) -> TextTable:
    """The best forecast of each machine: what its recall would be worth by Amdahl's law, and what replay finds."""
    rows = []
    for worth in result.worth:
        lfru = worth.baseline(LFRU)
        best = min(worth.entries, key=lambda run: run.tpot_mean_seconds)
        recall = _recall(result, best.name)
        stalled = lfru.stall_seconds_per_token / lfru.tpot_mean_seconds
        rows.append((
            worth.machine.name,
            best.name,
            f"{stalled:.0%}",
            _percent(recall),
            f"{amdahl_speedup(stalled, recall):.2f}x",
            f"{lfru.tpot_mean_seconds / best.tpot_mean_seconds:.2f}x",
        ))  # fmt: skip
    return TextTable(
        "Amdahl's law beside replay",
        "stalled: of LFRU's time; recall: of the best forecast at its shortest horizon, which the law takes for the "
        "share of stall that goes away; speed over LFRU. The law knows no late guess, no wrong one and no busy link",
        ("machine", "best forecast", "stalled", "recall", "by Amdahl", "by replay"),
        tuple(rows),
    )


def _recall(result: ArenaResult, name: str) -> float:
    entry = next(each for each in result.entries if each.name == name)
    ahead = [each for each in entry.horizons if each.horizon >= 1] or list(entry.horizons)
    return ahead[0].overall.recall


def _runs(worth: MachineWorth) -> tuple[ReplayReport, ...]:
    return (*worth.baselines, *worth.entries, *worth.with_reuse)


def _named(entry: EntryResult) -> str:
    return entry.name if entry.role is Role.CONTESTANT else f"{entry.name} ({entry.role.value})"


def _count(number: int | None) -> str:
    return ABSENT if number is None else f"{number:,}"


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.1f}"


def _microseconds(timing: Timing | None) -> str:
    return ABSENT if timing is None else f"{timing.eager_microseconds:.0f}"


def _gpu_microseconds(timing: Timing | None) -> str:
    if timing is None or timing.graph_microseconds is not None:
        return ABSENT if timing is None else f"{timing.graph_microseconds:.0f}"
    return f"{timing.eager_microseconds:.0f}*"
