"""Is a bad predictor ever slower than none? Replays recorded routing on every stated machine, with forecasts that are
always wrong and with forecasts at chance, over LFRU alone: as the throttle lets them, and as they are.

PYTHONPATH=src:. python benchmarks/never_slower.py benchmarks/traces/nano-chat.safetensors --json FILE
"""

import argparse
import json
from pathlib import Path

from steerpipe.arena.machines import stated_machines
from steerpipe.transfer.forecasts import RecallPredictor
from steerpipe.transfer.replay import replay
from steerpipe.transfer.trace_file import read_recording


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
        none = replay(recording, machine, warmup_tokens=given.warmup).tpot_mean_seconds
        ratios = {}
        for name, predictor in said.items():
            for throttled in (True, False):
                run = replay(recording, machine, predictor=predictor, throttled=throttled, warmup_tokens=given.warmup)
                ratios[name if throttled else f"{name}, not throttled"] = round(run.tpot_mean_seconds / none, 4)
        found.append({"machine": stated.name, "none_ms": round(none * 1e3, 3), "over_none": ratios})
        print(f"{stated.name:24} {none * 1e3:8.2f} ms  {ratios}", flush=True)
    every = [each for line in found for each in line["over_none"].items()]
    worst = max(ratio for name, ratio in every if "not" not in name)
    print(f"worst: {worst:.4f}, not throttled {max(ratio for _, ratio in every):.4f}")
    if given.json is not None:
        given.json.write_text(json.dumps({"tokens": given.tokens, "worst": worst, "lines": found}) + "\n")


if __name__ == "__main__":
    main()
