"""The rows that predict_on_gpu.py measures, and what `replay` gives for them on the machine of the measured rates.

PYTHONPATH=src:. python benchmarks/predict_rows.py --forecasts FILE --json FILE     # adds "replayed" to the file
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from steerpipe.bench.forecasts import read_forecasts
from steerpipe.store.policies import HALF_LIFE_TOKENS
from steerpipe.transfer.machine import Machine, slots_of_share
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.replay import replay


@dataclass(frozen=True)
class Row:
    """One line of the table. `said`: whose forecasts; "" for none."""

    name: str
    policy: str = "lfru"
    said: str = ""
    horizon: int = 0
    arithmetic: str = "heads"
    direct: bool = False


@dataclass(frozen=True)
class Rates:
    """Seconds: a layer that hits, what of it goes on beside a miss, what a layer adds that misses any, a block."""

    layer: float
    beside: float
    ask: float
    block: float


ROWS = (
    Row("LRU", policy="lru"),
    Row("LFRU"),
    Row("LFRU, direct", direct=True),
    Row("LFRU + heads, 1 ahead", said="heads", horizon=1),
    Row("LFRU + heads, 1 and 2 ahead", said="heads", horizon=2),
    Row("LFRU + lookahead, 1 and 2 ahead", said="lookahead", horizon=2, arithmetic="lookahead"),
    Row("LFRU + previous token", said="previous", horizon=2, arithmetic="lookahead"),
    Row("LFRU + ExpertTransformer apart, 2 ahead", said="recall 0.61", horizon=2, arithmetic="transformers"),
    Row("LFRU + perfect, 1 ahead", said="perfect", horizon=1),
    Row("LFRU + perfect, 1 and 2 ahead", said="perfect", horizon=2),
    Row("LFRU + always wrong", said="wrong", horizon=2),
    Row("LFRU + chance", said="chance", horizon=2),
    Row("reuse eviction", policy="reuse"),
    Row("reuse eviction + heads, 1 and 2 ahead", policy="reuse", said="heads", horizon=2),
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
        machine = Machine(
            slots_of_share(share, recording.all_experts), found["block_bytes"], found["block_bytes"] / rates.block,
            rates.layer - rates.beside, ask_seconds=rates.ask, beside_seconds=rates.beside,
        )  # fmt: skip
        reuse = file.reuse if row.policy == "reuse" else None
        report = replay(
            recording, machine, row.policy, predictor=file.foresight(row.said, row.horizon) if row.said else None,
            reuse=reuse, warmup_tokens=found["warmup"], name=name,
            half_life_tokens=reuse.half_life_tokens if reuse else HALF_LIFE_TOKENS,
        )  # fmt: skip
        found["replayed"].append({"row": name, "share": share} | report.as_json())
        print(f"{share:5.1%} {name:40} {report.tpot_mean_seconds * 1e3:7.3f} ms", flush=True)
    given.json.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forecasts", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    fill_in(parser.parse_args())


if __name__ == "__main__":
    main()
