"""All measurements of the CUDA engine in one go, the most wanted first, within a time limit.

    PYTHONPATH=src:. python benchmarks/cuda_run.py OUT [--limit 570] [--only resident,on-demand-int4] [--routing TRACE]

OUT gets what in_processes.py says. Needs torch with CUDA, Triton, transformers, numpy, safetensors and rich.
"""

import sys
from pathlib import Path

from benchmarks.in_processes import Measurement, chosen, parser_of, read, run_all


def decode(name: str, limit_seconds: int, words: str) -> Measurement:
    return Measurement(name, ("-m", "steerpipe.bench", "decode", *words.split()), limit_seconds)


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
        Measurement("link", ("-m", "steerpipe.bench", "link"), 60),
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


def lines(file: Path) -> list[str]:
    """What there is of a measurement, one line per run."""
    return [
        f"  {run['format']:9} {run['residency']:5g} %  {run['test']:14} batch {run['batch']}: "
        f"floor {run['floor_ms']:8.3f}  median {run['times']['median_ms']:8.3f}  "
        f"p95 {run['times']['p95_ms']:8.3f}  ratio {run['ratio']:.2f}"
        for run in (read(file) or {}).get("runs", [])
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--routing", help="safetensors with 'routing' [tokens, 24, 4]")
    given = parser.parse_args()
    sys.exit(run_all(chosen(parser, plan(given.routing), given.only), given.out, given.limit, lines))


if __name__ == "__main__":
    main()
