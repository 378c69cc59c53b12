"""The rows that predict_on_gpu.py measures, and what `replay` gives for them on the machine of the measured rates.

PYTHONPATH=src:. python benchmarks/predict_rows.py --forecasts FILE --json FILE     # adds "replayed" to the file
"""

import argparse
import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from steerpipe.arena.foresight import Foresight
from steerpipe.bench.forecasts import ForecastFile, read_forecasts
from steerpipe.bench.prediction import held
from steerpipe.core.blocks import GUESSES
from steerpipe.kernels.foretell import LEAST_PROBABILITY
from steerpipe.model.gpu.fetching import guesses_within
from steerpipe.store.policies import HALF_LIFE_TOKENS
from steerpipe.transfer.cuda.landing import supply_of
from steerpipe.transfer.cuda.sending import guesses_of
from steerpipe.transfer.machine import Looking, Machine, slots_of_share
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.replay_report import ReplayReport

LFRU, AGAIN = "LFRU", "LFRU again"
LEAST = 0.02  # a gain below that is not compared
ENOUGH, DRAWN = 5, 1000  # rounds for an interval; sets of them that are drawn
CHUNK_BYTES = 64 << 10  # of the simulated link: the 64 programs of a fetch keep no common beat


@dataclass(frozen=True)
class Row:
    """One line of the table. `said`: whose forecasts; "" for none."""

    name: str
    policy: str = "lfru"
    said: str = ""
    horizon: int = 0
    arithmetic: str = "heads"
    served: bool = False  # by the host, whatever the driver of the run; a predictor as the engine has it, by turns


@dataclass(frozen=True)
class Rates:
    """Seconds: a layer that hits, what of it goes on beside a miss, what a layer adds that misses any, a block.

    `tap`: what heads at every router add to a layer on the device that hits, `tap_more`: beyond that to one that misses
    one, two ...; `host`: to a step's host. Of a step, `end`: from
    its last layer to the end of its graph; `between`: of the host, until the next. `delay`: from a router until what
    its tap says is sent for. `experts`: from a router to the end of its layer where that hits. `tail`: from the end of
    a missing block's copy to the end of its layer. None: as `Machine` has it.
    """

    layer: float
    beside: float
    ask: float
    block: float
    tap: float = 0.0
    end: float = 0.0
    between: float = 0.0
    delay: float = 0.0
    experts: float | None = None
    guess_bytes_per_second: float | None = None
    host: float = 0.0
    tap_more: tuple[float, ...] = ()
    tail: float | None = None


ROWS = (
    Row("LRU", policy="lru"),
    Row("LFRU"),
    Row("LFRU, served", served=True),
    Row("LFRU + heads, 1 ahead", said="heads", horizon=1),
    Row("LFRU + heads, 1 and 2 ahead, served", said="heads", horizon=2, served=True),
    Row("LFRU + lookahead, 1 ahead", said="lookahead", horizon=1, arithmetic="lookahead"),
    Row("LFRU + previous token", said="previous", horizon=1, arithmetic="lookahead"),
    Row("LFRU + ExpertTransformer apart, 2 ahead, served", "lfru", "transformers", 2, "transformers", served=True),
    Row("LFRU + perfect, 1 ahead", said="perfect", horizon=1),
    Row("LFRU + recall 0.61, 1 ahead", said="recall 0.61", horizon=1),
    Row("LFRU + always wrong", said="wrong", horizon=1),
    Row("LFRU + chance", said="chance", horizon=1),
    Row("reuse eviction", policy="reuse"),
    Row("reuse eviction + heads, 1 ahead", policy="reuse", said="heads", horizon=1),
    Row("Belady", policy="belady"),
    Row("LFRU again"),
    Row("LFRU + lookahead, 1 and 2 ahead, served", said="lookahead", horizon=2, arithmetic="lookahead", served=True),
    Row("LFRU + perfect, 1 and 2 ahead, served", said="perfect", horizon=2, served=True),
    Row("reuse eviction, served", policy="reuse", served=True),
    Row("reuse eviction + heads, 1 and 2 ahead, served", policy="reuse", said="heads", horizon=2, served=True),
    Row("LFRU + ExpertTransformer, 2 ahead", said="transformers", horizon=2, arithmetic="history"),
)
HISTORY = ("transformers", "history")  # arithmetic of networks of routing history: beside the step, inside its graph
HISTORY_ROWS = frozenset(row.name for row in ROWS if row.arithmetic in HISTORY)


def speakers(found: dict[str, Any]) -> frozenset[str]:
    """Rows in which somebody predicts with the driver of the run: the others' hosts do other work."""
    served = found.get("driver") == "served"
    return frozenset(row.name for row in ROWS if row.said and (served or not row.served))


def read_found(file: Path) -> dict[str, Any]:
    """Of predict_on_gpu.py, or of a note, which names columns once and has the means of all rounds in one line."""
    found: dict[str, Any] = json.loads(file.read_text())
    if isinstance(lines := found["lines"], dict):
        rows = [dict(zip(lines["columns"], each, strict=True)) for each in lines["lines"]]
        found["lines"] = [
            row | {"round": number, "live_ms": ms} for row in rows for number, ms in enumerate(row["live_ms"], 1)
        ]
    return found


def digest(forecasts: Path) -> str:
    """By which a run knows its routing and forecasts again: recorded anew on another machine they may be others."""
    with forecasts.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def other_forecasts(found: dict[str, Any], forecasts: Path) -> str | None:
    """Why these are not what was measured; None: they are, or nobody has noted it."""
    if found.get("forecasts") in (None, digest(forecasts)):
        return None
    return f"it was measured with other forecasts than {forecasts}: take those of its run"


def fill_in(forecasts: Path, measured: Path) -> None:
    """On the machine of the file's rates, with the same routing and forecasts."""
    found = read_found(measured)
    rates, file = Rates(**found["rates"]), read_forecasts(forecasts, 60)
    count = found["warmup"] + found["tokens"]
    whole = file.recording
    recording = Recording(whole.name, whole.routing[:count], whole.sequence[:count], whole.experts)
    by_name = {row.name: row for row in ROWS}
    found["replayed"] = []
    for name, share in dict.fromkeys((line["row"], line["share"]) for line in found["lines"]):
        row = by_name[name]
        if not replayable(row, found):
            continue
        line: dict[str, Any] = {"row": name, "share": share}
        own = beside(rates, found) if row.arithmetic in HISTORY else rates
        for number, (term, machine) in enumerate(terms(share, recording, own, found, predicts=bool(row.said))):
            report = one_row(row, machine, recording, file, found, said_least=LEAST_PROBABILITY if number else 0.0)
            line.setdefault("ms", {})[term] = round(report.tpot_mean_seconds * 1e3, 4)
        found["replayed"].append(line | report.as_json())
        print(f"{share:5.1%} {name:40} " + ", ".join(f"{term} {ms:.3f}" for term, ms in line["ms"].items()), flush=True)
    found["tokens_ms"] = [
        {"row": name, "share": share, "ms": round(by_tokens(found, share, (name,)), 4)}
        for name, share in dict.fromkeys((line["row"], line["share"]) for line in found["lines"])
    ]
    found["shares"] = shares(found)
    for line in found["shares"]:
        if not line["of_replay"]:
            print(f"{line['share']:5.1%} {line['row']:40} live {line['live_ms']:6.3f} ms gained, and replay nothing")
            continue
        terms_of = ", ".join(f"{term} {part:.0%}" for term, part in line["of_replay"].items())
        whole = f"{line['share']:5.1%} {line['row']:40} live {line['live_ms']:6.3f} ms gained, of replay's {terms_of}"
        steady, device = line["steady_of_replay"], line["device_of_replay"]
        between = " to ".join(f"{end:.0%}" for end in line["rounds_of_replay"]) or "too few rounds to say"
        print(f"{whole}; rounds drawn anew: {between}; host of all runs {steady:.0%}, device's clock {device:.0%}")
    measured.write_text(json.dumps(found, indent=1) + "\n")


def beside(rates: Rates, found: dict[str, Any]) -> Rates:
    """Of a network of routing history: what its questions cost the step and the host is measured as a tap's cost is,
    and so is when what it says can be sent for: beside the step an answer is a question later than its router, inside
    the graph the next tap says it."""
    own = Rates(**found["beside"])
    return replace(rates, tap=own.tap, tap_more=own.tap_more, host=own.host, delay=found["beside_delay"])


def replayable(row: Row, found: dict[str, Any]) -> bool:
    """Whether the rates are of the row's driver, and tell what it costs."""
    if row.arithmetic in HISTORY and not {"beside", "beside_delay"} <= found.keys():
        print(f"{row.name}: what questions cost is not in the file")
        return False
    another = "direct" if row.served else "served" if row.arithmetic == "history" else ""
    return found.get("driver") != another


def terms(
    share: float, recording: Recording, rates: Rates, found: dict[str, Any], *, predicts: bool = False
) -> Iterator[tuple[str, Machine]]:
    """The machine, with one more of what a live run pays each time. The first: slots and rates alone.

    `predicts`: somebody does in this run, so slots are lent for his guesses, of which replay has some in use, and
    the host takes longer between two steps.
    """
    slots, size = slots_of_share(share, recording.all_experts), found["block_bytes"]
    machine = Machine(
        slots, size, size / rates.block, rates.layer - rates.beside, ask_seconds=rates.ask,
        beside_seconds=rates.beside,
    )  # fmt: skip
    yield "rates", machine
    apart = (rates.end + rates.between) / recording.layers  # of what a layer took: it lies after the last one
    direct = found.get("driver") == "direct"
    looking = machine.looking
    if direct:
        # A second guess begins when the first has ended, in replay as on the device: it may always be sent for.
        looking = Looking(most=GUESSES, stops=True, bytes_per_second=rates.guess_bytes_per_second)
        lent = supply_of(slots, recording.top_k) + (max(0, guesses_of(slots) - guesses_within(size)) if predicts else 0)
        machine = replace(machine, slots=slots - lent, chunk_bytes=CHUNK_BYTES, looking=looking)
        yield "driver", machine
    if apart:
        machine = replace(
            machine, layer_seconds=machine.layer_seconds - apart, end_seconds=rates.end, between_seconds=rates.between
        )
        yield "ends", machine
    if rates.experts is not None:
        # What a layer that misses takes beyond its blocks is the computing of the last expert: the link is idle then.
        experts, top_k = rates.experts, recording.top_k
        if rates.tail is not None:  # what follows the last expert, wherever it came from, is the next layer's
            experts -= max(0.0, min(experts, (rates.tail - experts / top_k) * top_k / (top_k - 1)))
        late = max(0.0, experts + rates.ask - rates.beside)
        each = min(late, experts / top_k)
        machine = replace(
            machine, layer_seconds=machine.layer_seconds + rates.beside - experts,
            beside_seconds=experts - top_k * each, expert_seconds=each, ask_seconds=late - each,
        )  # fmt: skip
        yield "experts", machine
    looking = replace(looking, tap_seconds=max(0.0, rates.tap), tap_more=tuple(rates.tap_more))
    if predicts:
        machine = replace(machine, between_seconds=max(0.0, machine.between_seconds + rates.host))
    yield "tap", replace(machine, looking=looking)
    if rates.delay:
        yield "delay", replace(machine, looking=replace(looking, delay_seconds=rates.delay))


def said_of(row: Row, file: ForecastFile) -> Foresight | None:
    """Who looks at routing history speaks as far ahead as he can, and it holds until the layer comes; inside the graph
    the tap before that layer says it."""
    if not row.said:
        return None
    said = file.foresight(row.said, row.horizon)
    return held(said, 1 if row.arithmetic == "history" else row.horizon) if row.arithmetic in HISTORY else said


def one_row(
    row: Row, machine: Machine, recording: Recording, file: ForecastFile, found: dict[str, Any], said_least: float
) -> ReplayReport:
    """`said_least`: the probability below which a forecast names nobody, as live."""
    reuse = file.reuse if row.policy == "reuse" else None
    said = said_of(row, file)
    if said is not None:
        said = Foresight(said.ranked, np.where(said.probability >= said_least, said.probability, 0.0))
    return replay(
        recording, machine, row.policy, predictor=said, reuse=reuse, warmup_tokens=found["warmup"], name=row.name,
        throttled=said_least > 0, half_life_tokens=reuse.half_life_tokens if reuse else HALF_LIFE_TOKENS,
    )  # fmt: skip


def shares(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of replay's gain over LFRU, what was measured. Where replay gains nothing there is no share.

    A row's time is the mean over tokens of the median over rounds: every row decodes the same tokens, and a host that
    was held up once does not count. `rounds_ms` are gains by rounds, against the mean of the LFRU of the same round
    (of all, where it has none); `rounds_of_replay` bounds the share of the last term by rounds that are drawn anew. A
    host's speed changes from run to run by more than a predictor adds to it: by the device's clock alone that share is
    `device_of_replay`, and `steady_of_replay` charges every predictor for what the host needed more in all of their
    runs.
    """
    more_ms, speaking = [host_more(found, history=each) for each in (False, True)], speakers(found)
    replayed = {(line["row"], line["share"]): line["ms"] for line in found["replayed"]}
    lines = []
    for (name, share), ms in replayed.items():
        plain = replayed.get((LFRU, share))
        if name in (LFRU, AGAIN) or plain is None:
            continue
        rounds = sorted({line["round"] for line in found["lines"]})
        every = [ms for number in rounds for ms in _ms(found, share, (LFRU, AGAIN), number)]
        gains = [
            statistics.fmean(_ms(found, share, (LFRU, AGAIN), number) or every) - statistics.fmean(own)
            for number in rounds
            if (own := _ms(found, share, (name,), number))
        ]
        live = by_tokens(found, share, (LFRU, AGAIN)) - by_tokens(found, share, (name,))
        parts = {term: live / (plain[term] - ms[term]) for term in ms if plain[term] - ms[term] > LEAST * ms[term]}
        device = by_tokens(found, share, (LFRU, AGAIN), "graph") - by_tokens(found, share, (name,), "graph")
        promised, speaks = next(reversed(plain.values())) - next(reversed(ms.values())), name in speaking
        history = name in HISTORY_ROWS
        charged = found.get("beside" if history else "rates", {}).get("host", 0.0)
        line = {"row": name, "share": share, "live_ms": live, "device_ms": device, "rounds_ms": gains}
        drawn = drawn_anew(found, share, name) if next(reversed(ms)) in parts else []
        lines.append(line | {
            "of_replay": parts, "rounds_of_replay": [each / promised for each in drawn],
            "device_of_replay": _part(device, promised + 1e3 * charged * speaks),
            "steady_of_replay": _part(device - more_ms[history] * speaks, promised),
        })  # fmt: skip
    return lines


def drawn_anew(found: dict[str, Any], share: float, name: str) -> list[float]:
    """The gains in ms between which 90 % lie where as many rounds as were measured are drawn from them again; none
    where fewer than ENOUGH have both the row and LFRU."""
    its, plain = (
        {line["round"] for line in found["lines"] if (line["row"], line["share"]) == (row, share)}
        for row in (name, LFRU)
    )  # fmt: skip
    if len(rounds := sorted(its & plain)) < ENOUGH:
        return []
    random = np.random.default_rng(0)
    gains = [
        by_tokens(found, share, (LFRU, AGAIN), rounds=drawn) - by_tokens(found, share, (name,), rounds=drawn)
        for drawn in random.choice(rounds, (DRAWN, len(rounds))).tolist()
    ]
    return [float(each) for each in np.quantile(gains, (0.05, 0.95))]


def _part(gained: float, promised: float) -> float:
    return gained / promised if promised else math.nan


def host_more(found: dict[str, Any], *, history: bool = False) -> float:
    """Milliseconds that a predictor adds to a step's host, over all runs of all predictors that did not rest;
    `history`: of networks of routing history, whose questions are another work."""
    spent: dict[bool, list[float]] = {False: [], True: []}
    speaking = frozenset(each for each in speakers(found) if (each in HISTORY_ROWS) == history)
    for line in found["lines"]:
        if (
            "graph_ms" in line
            and not line.get("throttled")
            and (line["row"] in speaking or line["row"] in (LFRU, AGAIN))
        ):
            spent[line["row"] in speaking].append(line["live_ms"] - line["graph_ms"])
    return statistics.fmean(spent[True]) - statistics.fmean(spent[False]) if all(spent.values()) else 0.0


def by_tokens(
    found: dict[str, Any], share: float, names: tuple[str, ...], what: str = "step", rounds: Sequence[int] | None = None
) -> float:
    """Milliseconds of a token: the mean over tokens of the median over runs; of a note, the median of its means.

    `what`: a step, or by the device's clock its graph. `rounds`: these alone, as often as they are named.
    """
    own = [line for line in found["lines"] if line["row"] in names and line["share"] == share]
    if rounds is not None:
        own = [line for number in rounds for line in own if line["round"] == number]
    mean = {"step": "live_ms", "graph": "graph_ms"}[what]
    runs = [line.get(f"{what}s_us", [1e3 * line.get(mean, math.nan)]) for line in own]
    return statistics.fmean(statistics.median(each) for each in zip(*runs, strict=True)) / 1e3


def _ms(found: dict[str, Any], share: float, names: tuple[str, ...], number: int) -> list[float]:
    return [
        line["live_ms"]
        for line in found["lines"]
        if line["row"] in names and (line["share"], line["round"]) == (share, number)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forecasts", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    if lacking := other_forecasts(read_found(given.json), given.forecasts):
        parser.error(f"{given.json}: {lacking}")
    fill_in(given.forecasts, given.json)


if __name__ == "__main__":
    main()
