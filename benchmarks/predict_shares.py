"""What `replay` promises for measured rows, and the share of its gain over LFRU that was measured.

PYTHONPATH=src:. python benchmarks/predict_shares.py --forecasts FILE --json FILE     # adds "replayed" to the file
"""

import argparse
import json
import math
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predict_rows import (
    AGAIN,
    HISTORY,
    HISTORY_ROWS,
    LFRU,
    ROWS,
    Rates,
    beside,
    one_row,
    other_forecasts,
    read_found,
    replayable,
    terms,
)
from steerpipe.bench.forecasts import ForecastFile, read_forecasts
from steerpipe.core.whole_file import write_whole
from steerpipe.kernels.foretell import LEAST_PROBABILITY
from steerpipe.transfer.recorded import Recording

LEAST = 0.02  # a gain below that is not compared
ENOUGH, DRAWN = 5, 1000  # rounds for an interval; sets of them that are drawn


def fill_in(forecasts: Path, measured: Path) -> None:
    """On the machine of the file's rates, with the same routing and forecasts. The file is written whole or stays."""
    found = read_found(measured)
    found["replayed"] = replayed(found, read_forecasts(forecasts, 60))
    found["tokens_ms"] = [
        {"row": name, "share": share, "ms": round(by_tokens(found, share, (name,)), 4)}
        for name, share in cells(found)
    ]  # fmt: skip
    found["shares"], found["useless"] = shares(found), useless(found)
    print("\n".join([*map(said_of_share, found["shares"]), *map(said_of_useless, found["useless"])]), flush=True)
    write_whole(measured, (json.dumps(found, indent=1) + "\n").encode())


def cells(found: dict[str, Any]) -> dict[tuple[str, float], None]:
    """Names and shares of what was measured, in its order."""
    return dict.fromkeys((line["row"], line["share"]) for line in found["lines"])


def replayed(found: dict[str, Any], file: ForecastFile) -> list[dict[str, Any]]:
    """Of each row that can be, milliseconds by term and the whole report of the last one."""
    rates, whole, count = Rates(**found["rates"]), file.recording, found["warmup"] + found["tokens"]
    recording = Recording(whole.name, whole.routing[:count], whole.sequence[:count], whole.experts)
    by_name, lines = {row.name: row for row in ROWS}, []
    for name, share in cells(found):
        row = by_name[name]
        if not replayable(row, found):
            continue
        line: dict[str, Any] = {"row": name, "share": share}
        own = beside(rates, found) if row.arithmetic in HISTORY else rates
        for number, (term, machine) in enumerate(terms(share, recording, own, found, predicts=bool(row.said))):
            report = one_row(row, machine, recording, file, found, said_least=LEAST_PROBABILITY if number else 0.0)
            line.setdefault("ms", {})[term] = round(report.tpot_mean_seconds * 1e3, 4)
        lines.append(line | report.as_json() | {"chunk_bytes": machine.chunk_bytes})
        print(f"{share:5.1%} {name:40} " + ", ".join(f"{term} {ms:.3f}" for term, ms in line["ms"].items()), flush=True)
    return lines


def said_of_share(line: dict[str, Any]) -> str:
    """The last term decides whether there is a share: those before it leave out what a live run pays."""
    live, promised = line["live_ms"], line["promised_ms"]
    head = (
        f"{line['share']:5.1%} {line['row']:40} live {abs(live):6.3f} ms {'gained' if live >= 0 else 'lost'}, replay "
    )
    if not line["of_replay"]:
        little = f"promises {promised:.3f} ms: too little to compare"
        return head + (little if promised >= 0 else f"says {-promised:.3f} ms lost: no share")
    *fewer, (_, whole) = line["of_replay"].items()
    between = " to ".join(f"{end:.0%}" for end in line["rounds_of_replay"]) or "too few rounds to say"
    apart = f"host of all runs {line['steady_of_replay']:.0%}, device's clock {line['device_of_replay']:.0%}"
    head += f"promises {promised:.3f} ms, of which {whole:.0%}; rounds drawn anew: {between}; {apart}"
    return f"{head}; with fewer terms {', '.join(f'{term} {part:.0%}' for term, part in fewer)}"


def useless(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What predictors that are always wrong or at chance take, over the mean of all LFRU of the same round."""
    names, lines = {row.name for row in ROWS if row.said in ("wrong", "chance")}, []
    for name, share in cells(found):
        numbers = dict.fromkeys(line["round"] for line in found["lines"])
        rounds = [(_ms(found, share, (name,), each), _ms(found, share, (LFRU, AGAIN), each)) for each in numbers]
        over = [round(statistics.fmean(own) / statistics.fmean(plain), 4) for own, plain in rounds if own and plain]
        if name in names and over:
            lines.append({"row": name, "share": share, "over_lfru": statistics.median(over), "rounds": over})
    return lines


def said_of_useless(line: dict[str, Any]) -> str:
    over, rounds = line["over_lfru"], line["rounds"]
    count = f"the median of {len(rounds)} rounds, {min(rounds):.3f} to {max(rounds):.3f}"
    return f"{line['share']:5.1%} {line['row']:40} {over:.3f} x LFRU's time, {count}"


def speakers(found: dict[str, Any]) -> frozenset[str]:
    """Rows in which somebody predicts with the driver of the run: the others' hosts do other work."""
    served = found.get("driver") == "served"
    return frozenset(row.name for row in ROWS if row.said and (served or not row.served))


def shares(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of replay's gain over LFRU, what was measured. Where its last term gains nothing there is no share.

    A row's time is the mean over tokens of the median over rounds: every row decodes the same tokens, and a host that
    was held up once does not count. `rounds_ms` are gains by rounds, against the mean of the LFRU of the same round
    (of all, where it has none); `rounds_of_replay` bounds the share of the last term by rounds that are drawn anew. A
    host's speed changes from run to run by more than a predictor adds to it: by the device's clock alone that share is
    `device_of_replay`, and `steady_of_replay` charges every predictor for what the host needed more in all of their
    runs.
    """
    speaking = speakers(found)
    of_taps = host_more(found, speaking - HISTORY_ROWS)
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
        more_ms = host_more(found, {name}) if history else of_taps
        line = {"row": name, "share": share, "live_ms": live, "device_ms": device, "rounds_ms": gains}
        compared = next(reversed(ms)) in parts
        drawn = drawn_anew(found, share, name) if compared else []
        lines.append(line | {
            "promised_ms": promised, "of_replay": parts if compared else {},
            "rounds_of_replay": [each / promised for each in drawn],
            "device_of_replay": _part(device, promised + 1e3 * charged * speaks),
            "steady_of_replay": _part(device - more_ms * speaks, promised),
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


def host_more(found: dict[str, Any], speaking: Collection[str]) -> float:
    """Milliseconds that predictors add to a step's host, over all runs of the rows `speaking` that did not rest."""
    spent: dict[bool, list[float]] = {False: [], True: []}
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
