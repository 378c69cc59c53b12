"""Trains every predictor on nano's routing and tests it on held-out prompts: one command, everything on the device.

    python benchmarks/train_predictors.py --documents heldout.jsonl.gz --chats chats.json --out FOLDER [--stages a,b]
    python benchmarks/train_predictors.py --merge FOLDER FOLDER ... --out results.json

Traces the text once with hidden states (28 KB per token: 1.6 M tokens are 44 GB; --no-states suffices for the stages
about history), trains, and leaves in FOLDER results.json (all metrics, by layer) and the predictors. Stages are written
as they finish; with --seconds no new stage begins after that time. Processes that share a GPU take stages each, and
their results are merged. --scale shortens every schedule, for trials. chats.json is made by generate_chats.py.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.predictor_bench import Bench, brief, merged
from benchmarks.predictor_history import curves, horizons_ahead, importance, layers_all, live, rates, table_one, windows
from benchmarks.predictor_states import blends, counted, estimators, heads, large_heads, lookaheads, preattention
from benchmarks.predictor_timings import timings

STATES: dict[str, Callable[[Bench], None]] = {
    "counted": counted, "lookaheads": lookaheads, "heads": heads, "large_heads": large_heads,
    "preattention": preattention, "estimators": estimators, "blends": blends,
}  # fmt: skip
HISTORY: dict[str, Callable[[Bench], None]] = {
    "rates": rates, "table_one": table_one, "curves": curves, "windows": windows, "importance": importance,
    "horizons_ahead": horizons_ahead, "layers_all": layers_all, "live": live, "timings": timings,
}  # fmt: skip


def run(options: argparse.Namespace) -> None:
    start = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench.prepare(options)
    torch.backends.cuda.matmul.allow_tf32 = True  # after tracing: routing is recorded in full precision
    for name in options.stages.split(",") if options.stages else [*(STATES if options.states else ()), *HISTORY]:
        if time.monotonic() - start > options.seconds:
            bench.log(f"{name}: no time left")
            continue
        before = time.monotonic()
        try:
            (STATES | HISTORY)[name](bench)
        except Exception:  # noqa: BLE001  the device time of the other stages is not lost for one that fails
            bench.log(f"{name} FAILED\n{traceback.format_exc()}")
        bench.log(f"{name}: {time.monotonic() - before:.1f} s, {time.monotonic() - start:.0f} s in all")
        bench.write()
    print(json.dumps(bench.summary()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path)
    parser.add_argument("--chats", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--merge", type=Path, nargs="+", help="folders of runs on the same text")
    parser.add_argument("--tokens", type=int, default=1_600_000)
    parser.add_argument("--test-tokens", type=int, default=120_000, help="of the held-out prompts, for the metrics")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--stages", default="")
    parser.add_argument("--states", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.merge:
        together = merged([json.loads((folder / "results.json").read_text()) for folder in options.merge])
        options.out.write_text(json.dumps(brief(together), separators=(",", ":")) + "\n", encoding="utf-8")
    else:
        run(options)


if __name__ == "__main__":
    main()
