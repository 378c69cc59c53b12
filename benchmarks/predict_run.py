"""All measurements of prediction on a GPU in one go, the most wanted first; then, on any machine, replay.

    PYTHONPATH=src:. python benchmarks/predict_run.py OUT --forecasts FILE [--limit 570] [--only int4]     # on a GPU
    PYTHONPATH=src:. python benchmarks/predict_run.py OUT --forecasts FILE --replay

Every row of predict_rows.py with the driver that has it, at Qwen1.5-MoE's shape: int4, where the device reads and sends
by itself; bf16, served by the host; int4 with an ExpertTransformer in the step's graph, and beside it. The forecasts
are written by record_forecasts.py, with `--history` for the ExpertTransformer's. OUT gets what in_processes.py says;
`--replay` adds to each JSON what the simulated machine of its rates gives, and what share of that was measured.
"""

import json
from pathlib import Path

from benchmarks.in_processes import Measurement, chosen, parser_of, run_all
from benchmarks.predict_rows import AGAIN, LFRU, ROWS, fill_in

SCRIPT = str(Path(__file__).with_name("predict_on_gpu.py"))
SHARES = "0.5,0.25,0.125"
DIRECT = (
    LFRU, "LFRU + heads, 1 ahead", "LFRU + lookahead, 1 ahead", "LFRU + perfect, 1 ahead", AGAIN, "reuse eviction",
    "reuse eviction + heads, 1 ahead", "Belady", "LFRU + previous token", "LFRU + always wrong", "LFRU + chance",
)  # fmt: skip
SERVED = (
    LFRU, "LFRU + heads, 1 and 2 ahead, served", "LFRU + lookahead, 1 and 2 ahead, served",
    "LFRU + perfect, 1 and 2 ahead, served", AGAIN, "reuse eviction, served",
    "reuse eviction + heads, 1 and 2 ahead, served", "Belady", "LFRU + ExpertTransformer apart, 2 ahead, served",
    "LFRU + previous token", "LFRU + always wrong", "LFRU + chance",
)  # fmt: skip
HISTORY = (LFRU, "LFRU + ExpertTransformer, 2 ahead", AGAIN, "LFRU + heads, 1 ahead")
APART = (LFRU, "LFRU + ExpertTransformer apart, 2 ahead, served", AGAIN, "LFRU + heads, 1 and 2 ahead, served")
LRU = ("LRU",)


def plan(forecasts: Path) -> list[Measurement]:
    """In the order of what is wanted most."""

    def measurement(
        name: str, limit_seconds: int, words: str, rows: tuple[str, ...], once: tuple[str, ...] = ()
    ) -> Measurement:
        grid = (
            "--rows", numbers(once), "--shares", SHARES if once else "", "--round-rows", numbers(rows),
            "--round-shares", SHARES,
        )  # fmt: skip
        return Measurement(name, (SCRIPT, "--forecasts", str(forecasts), *words.split(), *grid), limit_seconds)

    return [
        measurement("int4", 210, "--format int4 --rounds 5 --tokens 48 --warmup 40", DIRECT, LRU),
        measurement(
            "bf16-served", 300, "--format bf16 --driver served --rounds 3 --tokens 24 --warmup 32", SERVED, LRU
        ),
        measurement(
            "int4-history", 100, "--format int4 --rounds 5 --tokens 48 --warmup 40 --skip-no-cache", HISTORY
        ),
        measurement(
            "int4-served", 100, "--format int4 --driver served --rounds 5 --tokens 48 --warmup 40 --skip-no-cache",
            APART,
        ),
    ]  # fmt: skip


def numbers(names: tuple[str, ...]) -> str:
    """Of rows, as predict_on_gpu.py takes them."""
    every = [row.name for row in ROWS]
    return ",".join(str(every.index(name)) for name in names)


def lines(file: Path) -> list[str]:
    """What there is of a measurement: the seeds' comparison and how many rows ran."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    said = [f"  resident {found['resident_ms']:.3f} ms"] if "resident_ms" in found else []
    if "no_cache" in found:
        live, floor = found["no_cache"]["lookahead, committed"], found["no_cache"]["copy floor"]
        said.append(f"  nothing kept, lookahead committed: {live:.3f} ms, {live / floor:.3f} x the copy floor")
    return [*said, f"  {len(found.get('lines', []))} runs of rows"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--forecasts", type=Path, required=True)
    parser.add_argument("--replay", action="store_true", help="of what is in OUT already; needs no GPU")
    given = parser.parse_args()
    if not given.forecasts.is_file():
        parser.error(f"{given.forecasts} is not there: record it with benchmarks/record_forecasts.py")
    measurements = chosen(parser, plan(given.forecasts), given.only)
    if not given.replay:
        run_all(measurements, given.out, given.limit, lines)
        return
    files = [file for each in measurements if (file := given.out / f"{each.name}.json").is_file()]
    if not files:
        parser.error(f"nothing was measured in {given.out} yet: leave --replay out on a machine with a GPU")
    for file in files:
        print(f"{file.stem}:")
        fill_in(given.forecasts, file)


if __name__ == "__main__":
    main()
