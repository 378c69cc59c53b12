"""All measurements of the CUDA engine in one go, the most wanted first, within a time limit.

    PYTHONPATH=src python benchmarks/cuda_run.py OUT [--limit 570] [--only resident,on-demand-int4] [--routing TRACE]

Every measurement is a process of its own (`python -m steerpipe.bench ...`) with its own time limit: one that hangs or
dies costs its own figures. OUT gets NAME.json (which grows while it is measured), NAME.log and summary.json.
Needs torch with CUDA, Triton, transformers, numpy, safetensors and rich.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src"
LEAST_SECONDS = 15  # less is not worth starting anything


@dataclass(frozen=True)
class Measurement:
    name: str
    words: tuple[str, ...]
    limit_seconds: int


def decode(name: str, limit_seconds: int, words: str) -> Measurement:
    return Measurement(name, ("decode", *words.split()), limit_seconds)


def plan(routing: str | None) -> list[Measurement]:
    """In the order of what is wanted most. `routing`: a trace of 24 layers with top-4, for Qwen1.5-MoE's shape."""
    traced = f"--routing {routing}" if routing else ""
    return [
        decode("resident", 150, "--shape qwen3-30b --format bf16,int4 --tokens 128 --repeat 3"),
        decode(
            "on-demand-int4", 120,
            "--shape qwen3-30b --format int4 --residency 100,50,25,0 --tokens 96 --repeat 2 --warmup 64 --prefill 512",
        ),
        decode(
            "on-demand-bf16", 150,
            "--shape qwen3-30b --format bf16 --residency 100,50,25,0 --tokens 48 --repeat 2 --warmup 48 --prefill 512",
        ),
        Measurement("link", ("link",), 60),
        decode("contexts", 90, "--shape qwen3-30b --format bf16,int4 --context 4k,32k --tokens 64 --repeat 3"),
        decode("batches", 90, "--shape qwen3-30b --format bf16,int4 --batch 1,2,4,8 --tokens 64 --repeat 3"),
        decode(
            "qwen1.5", 120,
            "--shape qwen1.5-moe --format bf16,int4 --residency 100,50,25,0 --tokens 64 --repeat 2 --warmup 64 "
            f"--prefill 512 {traced}",
        ),
        decode("int8", 60, "--shape qwen3-30b --format int8 --tokens 64 --repeat 3"),
        decode("qwen1.5-contexts", 60, "--shape qwen1.5-moe --format bf16,int4 --context 4k,32k --tokens 64"),
        decode(
            "batches-int4-25", 90,
            "--shape qwen3-30b --format int4 --residency 25 --batch 1,2,4,8 --tokens 48 --repeat 2 --warmup 48",
        ),
        decode("olmoe", 60, "--shape olmoe --format bf16,int4 --residency 100,25,0 --tokens 64 --repeat 2 --warmup 48"),
    ]  # fmt: skip


def run(measurement: Measurement, out: Path, limit_seconds: float) -> dict[str, Any]:
    """Ends the whole process group when the time is up."""
    words = [
        sys.executable,
        "-m",
        "steerpipe.bench",
        *measurement.words,
        "--json",
        str(out / f"{measurement.name}.json"),
    ]
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    begin = time.perf_counter()
    with (out / f"{measurement.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )  # fmt: skip
        try:
            status: int | str = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"stopped after {limit_seconds:.0f} s"
    return {
        "name": measurement.name, "words": list(measurement.words), "status": status,
        "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def lines(file: Path) -> list[str]:
    """What there is of a measurement, one line per run."""
    try:
        runs = json.loads(file.read_text(encoding="utf-8")).get("runs", [])
    except (OSError, ValueError):
        return []
    return [
        f"  {run['format']:9} {run['residency']:5g} %  {run['test']:14} batch {run['batch']}: "
        f"floor {run['floor_ms']:8.3f}  median {run['times']['median_ms']:8.3f}  "
        f"p95 {run['times']['p95_ms']:8.3f}  ratio {run['ratio']:.2f}"
        for run in runs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=float, default=570, help="seconds for everything")
    parser.add_argument("--only", default="", help="names, divided by commas")
    parser.add_argument("--routing", help="safetensors with 'routing' [tokens, 24, 4]")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in given.only.split(",") if name]
    measurements = plan(given.routing)
    unknown = set(chosen) - {each.name for each in measurements}
    if unknown:
        parser.error(f"no measurement is called {', '.join(sorted(unknown))}; there are "
                     f"{', '.join(each.name for each in measurements)}")  # fmt: skip
    ends = time.perf_counter() + given.limit
    done: list[dict[str, Any]] = []
    for measurement in measurements:
        left = ends - time.perf_counter()
        if (chosen and measurement.name not in chosen) or left < LEAST_SECONDS:
            continue
        result = run(measurement, given.out, min(left, measurement.limit_seconds))
        done.append(result)
        print(f"{result['name']}: {result['status']}, {result['seconds']} s", flush=True)
        print(*lines(given.out / f"{result['name']}.json"), sep="\n", flush=True)
        (given.out / "summary.json").write_text(json.dumps(done, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
