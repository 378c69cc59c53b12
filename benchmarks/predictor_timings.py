"""Microseconds per token of saved predictors, on one core and on the GPU, with nothing else running:

    python benchmarks/predictor_timings.py --predictors FOLDER [FOLDER ...] --out timings.json

A token is a decision for every layer that the predictor answers for, at its shortest horizon, one row; on the GPU as a
CUDA graph where it can be captured. Also a stage of train_predictors, whose figures mean little when processes share
the GPU.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.predictor_bench import Bench
from benchmarks.predictor_material import load_nano
from steerpipe.arena.timing import time_token
from steerpipe.predict.files import load
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.stored import StoredPredictor
from steerpipe.trace.live import TokenSequence
from steerpipe.train.material import collect
from steerpipe.train.models import routers_of_model


def timings(bench: Bench) -> None:
    """As a stage: everything that was kept."""
    bench.results["timings"] = measure(bench.kept, bench.test)


def measure(predictors: Mapping[str, StoredPredictor], trace: PackedTrace) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for key, predictor in predictors.items():
        horizon = min(predictor.horizons)
        cell = found[key] = {"horizon": horizon}
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            cell[device] = asdict(time_token(predictor.to(device), trace, horizon, device))
    torch.set_num_threads(threads)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predictors", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model, _ = load_nano("cpu")
    trace = collect(model, [TokenSequence("text", list(range(100, 164)), 64)])
    routers = routers_of_model(model)
    files = [file for folder in options.predictors for file in sorted(folder.rglob("*.safetensors"))]
    found = {file.stem: load(file, routers) for file in files if file.stem != "reuse"}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result = {"run": {"device": device, "torch": torch.__version__}, "timings": measure(found, trace)}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
