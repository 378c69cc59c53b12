"""The rows that predict_on_gpu.py measures, and what `replay` gives for them on the machine of the measured rates.

PYTHONPATH=src:. python benchmarks/predict_rows.py --forecasts FILE --json FILE     # adds "replayed" to the file
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steerpipe.bench.forecasts import ForecastFile, read_forecasts
from steerpipe.store.policies import HALF_LIFE_TOKENS
from steerpipe.transfer.machine import Machine, slots_of_share
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.replay_report import ReplayReport


@dataclass(frozen=True)
class Row:
    """One line of the table. `said`: whose forecasts; "" for none."""

    name: str
    policy: str = "lfru"
    said: str = ""
    horizon: int = 0
    arithmetic: str = "heads"
    served: bool = False  # by the host, whatever the driver of the run


@dataclass(frozen=True)
class Rates:
    """Seconds: a layer that hits, what of it goes on beside a miss, what a layer adds that misses any, a block.

    `tap`: what heads at every router add to a layer that hits.
    """

    layer: float
    beside: float
    ask: float
    block: float
    tap: float = 0.0


ROWS = (
    Row("LRU", policy="lru"),
    Row("LFRU"),
    Row("LFRU, served", served=True),
    Row("LFRU + heads, 1 ahead", said="heads", horizon=1),
    Row("LFRU + heads, 1 and 2 ahead, served", said="heads", horizon=2, served=True),
    Row("LFRU + lookahead, 1 ahead", said="lookahead", horizon=1, arithmetic="lookahead"),
    Row("LFRU + previous token", said="previous", horizon=1, arithmetic="lookahead"),
    Row("LFRU + ExpertTransformer apart, 2 ahead, served", "lfru", "recall 0.61", 2, "transformers", served=True),
    Row("LFRU + perfect, 1 ahead", said="perfect", horizon=1),
    Row("LFRU + recall 0.61, 1 ahead", said="recall 0.61", horizon=1),
    Row("LFRU + always wrong", said="wrong", horizon=1),
    Row("LFRU + chance", said="chance", horizon=1),
    Row("reuse eviction", policy="reuse"),
    Row("reuse eviction + heads, 1 ahead", policy="reuse", said="heads", horizon=1),
    Row("Belady", policy="belady"),
    Row("LFRU again"),
)


def fill_in(given: argparse.Namespace) -> None:
    """On the machine of the file's rates, with the same routing and forecasts."""
    found = json.loads(given.json.read_text())
    rates, file = Rates(**found["rates"]), read_forecasts(given.forecasts, 60)
    count = found["warmup"] + found["tokens"]
    whole = file.recording
    recording = Recording(whole.name, whole.routing[:count], whole.sequence[:count], whole.experts)
    by_name = {row.name: row for row in ROWS}
    found["replayed"] = []
    for name, share in dict.fromkeys((line["row"], line["share"]) for line in found["lines"]):
        row = by_name[name]
        if row.served and found.get("driver") == "direct":
            continue  # the rates are another driver's
        slots = slots_of_share(share, recording.all_experts)
        costs = (0.0, rates.tap) if row.said else (0.0,)  # of a predictor, on the device
        report, *dearer = (one_row(row, slots, recording, file, rates, cost, found) for cost in costs)
        line = {"row": name, "share": share} | report.as_json()
        line["tpot_with_tap_seconds"] = (dearer or [report])[0].tpot_mean_seconds
        found["replayed"].append(line)
        print(
            f"{share:5.1%} {name:40} {report.tpot_mean_seconds * 1e3:7.3f} ms, "
            f"with its tap {line['tpot_with_tap_seconds'] * 1e3:7.3f}", flush=True,
        )  # fmt: skip
    given.json.write_text(json.dumps(found, indent=1) + "\n")


def one_row(
    row: Row, slots: int, recording: Recording, file: ForecastFile, rates: Rates, tap: float, found: dict[str, Any]
) -> ReplayReport:
    machine = Machine(
        slots, found["block_bytes"], found["block_bytes"] / rates.block, rates.layer - rates.beside + tap,
        ask_seconds=rates.ask, beside_seconds=rates.beside,
    )  # fmt: skip
    reuse = file.reuse if row.policy == "reuse" else None
    return replay(
        recording, machine, row.policy, predictor=file.foresight(row.said, row.horizon) if row.said else None,
        reuse=reuse, warmup_tokens=found["warmup"], name=row.name,
        half_life_tokens=reuse.half_life_tokens if reuse else HALF_LIFE_TOKENS,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forecasts", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    fill_in(parser.parse_args())


if __name__ == "__main__":
    main()
