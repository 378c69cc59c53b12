"""Is a bad predictor ever slower than none? Replays recorded routing on every stated machine, with forecasts that are
always wrong and with forecasts at chance, over LFRU alone: as the throttle lets them, and as they are. "paid": looking
ahead costs what it was measured to cost on an H200, and a host stands between two tokens, with and without forecasts.

PYTHONPATH=src:. python benchmarks/never_slower.py benchmarks/traces/nano-chat.safetensors --json FILE
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from steerpipe.arena.machines import stated_machines
from steerpipe.transfer.forecasts import RecallPredictor
from steerpipe.transfer.machine import Looking
from steerpipe.transfer.replay import replay
from steerpipe.transfer.trace_file import read_recording

LOOKING = Looking(tap_seconds=6.4e-6, delay_seconds=40e-6, most=2, stops=True)  # notes/2026-11-15-prediction-gpu.md
BETWEEN_SECONDS = 0.29e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--horizons", default="1,2")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    recording = read_recording(given.trace, tokens=given.tokens)
    chance = recording.top_k / recording.experts
    said = {
        f"{name}, {horizon} ahead": RecallPredictor(recording.routing, recording.experts, [recall] * int(horizon), 5)
        for name, recall in (("always wrong", 0.0), ("chance", chance))
        for horizon in given.horizons.split(",")
    }
    found = []
    for stated in stated_machines():
        machine = stated.machine(recording.all_experts)
        paying = replace(machine, looking=LOOKING, between_seconds=BETWEEN_SECONDS)
        none, paid = (
            replay(recording, each, warmup_tokens=given.warmup).tpot_mean_seconds for each in (machine, paying)
        )
        ratios = {}
        for name, predictor in said.items():
            for how, each, over, throttled in (
                ("", machine, none, True), (", not throttled", machine, none, False), (", paid", paying, paid, True),
            ):  # fmt: skip
                run = replay(recording, each, predictor=predictor, throttled=throttled, warmup_tokens=given.warmup)
                ratios[name + how] = round(run.tpot_mean_seconds / over, 4)
        found.append({"machine": stated.name, "none_ms": round(none * 1e3, 3), "over_none": ratios})
        print(f"{stated.name:24} {none * 1e3:8.2f} ms  {ratios}", flush=True)
    every = [each for line in found for each in line["over_none"].items()]
    worst = max(ratio for name, ratio in every if "not" not in name)
    print(f"worst: {worst:.4f}, not throttled {max(ratio for _, ratio in every):.4f}")
    if given.json is not None:
        lines = [[line["machine"], line["none_ms"], *line["over_none"].values()] for line in found]
        columns = ["machine", "none_ms", *found[0]["over_none"]]
        table = {"tokens": given.tokens, "worst": worst, "columns": columns, "lines": lines}
        given.json.write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
