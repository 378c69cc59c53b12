"""Prediction on a GPU at full shape in one go, the most wanted first; then, on any machine, what replay gives for it.

    PYTHONPATH=src:. python benchmarks/predict_run.py OUT --forecasts FILE [--limit 570] [--only int4]     # on a GPU
    PYTHONPATH=src:. python benchmarks/predict_run.py OUT --forecasts FILE --replay

Rows of predict_rows.py with the driver that the engine would choose, at Qwen1.5-MoE's shape: int4, where the device
reads and sends by itself; bf16, served by the host; int4 with an ExpertTransformer in the step's graph, and beside it.
The forecasts are written by record_forecasts.py, with `--history` for the ExpertTransformer's. OUT gets what
in_processes.py says; `--replay` adds to each JSON what the simulated machine of its rates gives, and what share of that
was measured.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.in_processes import Measurement, chosen, parser_of, read, run_all
from benchmarks.predict_rows import AGAIN, LFRU, ROWS, Row, fill_in, read_found
from steerpipe.bench.forecasts import read_forecasts
from steerpipe.core.errors import SteerpipeError

SCRIPT = str(Path(__file__).with_name("predict_on_gpu.py"))
EXPERTS = 60  # of a layer, at the shape of the runs
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
    found = read(file) or {}
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
    measurements = chosen(parser, plan(given.forecasts), given.only)
    if lacking := missing_forecasts(given.forecasts, measurements):
        parser.error(lacking)
    if not given.replay:
        if not torch.cuda.is_available():
            parser.error("there is no CUDA device here; --replay needs none")
        sys.exit(run_all(measurements, given.out, given.limit, lines))
    files = [file for each in measurements if (file := given.out / f"{each.name}.json").is_file()]
    if not files:
        parser.error(f"nothing was measured in {given.out} yet: leave --replay out on a machine with a GPU")
    for file in files:
        lacking = too_little(file)
        print(f"{file.stem}: {lacking or ''}", flush=True)
        if not lacking:
            fill_in(given.forecasts, file)


def missing_forecasts(file: Path, measurements: Sequence[Measurement]) -> str | None:
    """Why these cannot run on that file: a row that asks for what is not there would end them. None: they can."""
    try:
        found = read_forecasts(file, EXPERTS)
        rows = [each for measurement in measurements for each in rows_of(measurement)]
        for said in {row.said for row in rows} - {"", "perfect", "wrong", "chance"}:
            found.foresight(said, 1)
    except SteerpipeError as error:
        return str(error)
    if found.reuse is None and any(row.policy == "reuse" for row in rows):
        return f"{file} has no scores of reuse; record it with benchmarks/record_forecasts.py"
    return None


def rows_of(measurement: Measurement) -> list[Row]:
    words = measurement.words
    given = ",".join(words[words.index(flag) + 1] for flag in ("--rows", "--round-rows"))
    return [ROWS[int(number)] for number in given.split(",") if number]


def too_little(file: Path) -> str | None:
    """Why a run that ended early cannot be compared with replay; None: it can."""
    try:
        found = read_found(file)
    except (OSError, ValueError, KeyError):
        return "no row was measured"
    if "rates" not in found:
        return "its rates were not measured"
    if found["rates"].get("experts") is None:
        return "its rates were not profiled, which comes last: the run was cut off"
    if not any(line["row"] == LFRU for line in found["lines"]):
        return "no LFRU was measured, over which others gain"
    return None


if __name__ == "__main__":
    main()
