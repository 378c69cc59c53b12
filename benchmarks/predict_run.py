"""Prediction on a GPU at full shape in one go, the most wanted first; then, on any machine, what replay gives for it.

    PYTHONPATH=src:. python benchmarks/predict_run.py OUT --forecasts FILE [--limit 570] [--only int4]     # on a GPU
    PYTHONPATH=src:. python benchmarks/predict_run.py OUT --replay

Rows of predict_rows.py with the driver that the engine would choose, at Qwen1.5-MoE's shape: int4, where the device
reads and sends by itself, and bf16, served by the host. The forecasts are written by record_forecasts.py, with
`--history` for the ExpertTransformer's; without those its rows are left out. OUT gets what in_processes.py says, and
the forecasts: recorded again they may be others. `--replay` takes those, and adds to each JSON what the simulated
machine of its rates gives, and what share of that was measured; its exit status is 1 where nothing could be compared.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.in_processes import SUMMARY, Measurement, chosen, make_folder, parser_of, read, run_all, unwritable
from benchmarks.predict_rows import (
    AGAIN,
    FORECASTS,
    HISTORY_ROWS,
    HISTORY_SAID,
    LFRU,
    ROWS,
    Row,
    digest,
    other_forecasts,
    read_found,
)
from benchmarks.predict_shares import fill_in
from steerpipe.bench.forecasts import ForecastFile, read_forecasts
from steerpipe.core.errors import SteerpipeError
from steerpipe.core.whole_file import write_whole

SCRIPT = str(Path(__file__).with_name("predict_on_gpu.py"))
MARGIN_SECONDS = 40  # of a process: its imports, the last row and the profile
EXPERTS = 60  # of a layer, at the shape of the runs
SHARES = "0.5,0.25,0.125"
DIRECT = (
    LFRU, "LFRU + heads, 1 ahead", "LFRU + lookahead, 1 ahead", "LFRU + perfect, 1 ahead", AGAIN, "reuse eviction",
    "reuse eviction + heads, 1 ahead", "Belady", "LFRU + ExpertTransformer, 2 ahead", "LFRU + previous token",
    "LFRU + always wrong", "LFRU + chance",
)  # fmt: skip
SERVED = (
    LFRU, "LFRU + heads, 1 and 2 ahead, served", "LFRU + lookahead, 1 and 2 ahead, served",
    "LFRU + perfect, 1 and 2 ahead, served", AGAIN, "reuse eviction, served",
    "reuse eviction + heads, 1 and 2 ahead, served", "Belady", "LFRU + ExpertTransformer apart, 2 ahead, served",
    "LFRU + previous token", "LFRU + always wrong", "LFRU + chance",
)  # fmt: skip
LRU = ("LRU",)
RECORD = "record them with benchmarks/record_forecasts.py"


def plan(forecasts: Path, *, history: bool = True) -> list[Measurement]:
    """In the order of what is wanted most. `history`: whether there are forecasts of an ExpertTransformer."""

    def measurement(
        name: str, limit_seconds: int, words: str, rows: tuple[str, ...], once: tuple[str, ...] = ()
    ) -> Measurement:
        own = tuple(row for row in rows if history or row not in HISTORY_ROWS)
        grid = (
            "--rows", numbers(once), "--shares", SHARES if once else "", "--round-rows", numbers(own),
            "--round-shares", SHARES,
        )  # fmt: skip
        told = (SCRIPT, "--forecasts", str(forecasts), *words.split(), *grid)
        return Measurement(name, told, limit_seconds, MARGIN_SECONDS)

    return [
        measurement("int4", 290, "--format int4 --rounds 7 --tokens 48 --warmup 40", DIRECT, LRU),
        measurement(
            "bf16-served", 300, "--format bf16 --driver served --rounds 5 --tokens 24 --warmup 32", SERVED, LRU
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
    late = f", {found['not_begun']} more were not begun: the time was up" if "not_begun" in found else ""
    return [*said, f"  {len(found.get('lines', []))} runs of rows{late}"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--forecasts", type=Path, help="where none are named, those in OUT")
    parser.add_argument("--replay", action="store_true", help="of what is in OUT already; needs no GPU")
    given = parser.parse_args()
    given.forecasts = given.forecasts or given.out / FORECASTS
    sys.exit(compare(parser, given) if given.replay else measure(parser, given))


def measure(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    found = forecasts_of(parser, given.forecasts)
    if not (history := HISTORY_SAID in found.said):
        print(f"{given.forecasts} has no forecasts of an ExpertTransformer, so its rows are left out", flush=True)
    measurements = chosen(parser, plan(given.forecasts, history=history), given.only)
    if lacking := missing_forecasts(found, measurements):
        parser.error(f"{given.forecasts}: {lacking}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --replay needs none")
    keep(given.forecasts, given.out)
    return run_all(measurements, given.out, given.limit, lines)


def compare(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """What was measured with what replay gives. The exit status: 1 where nothing could be."""
    every = [given.out / f"{each.name}.json" for each in chosen(parser, plan(given.forecasts), given.only)]
    if not (files := [file for file in every if file.is_file()]):
        parser.error(f"nothing was measured in {given.out} yet: leave --replay out on a machine with a GPU")
    ours = {f"{each.name}.json" for each in plan(given.forecasts)} | {SUMMARY}
    if others := sorted({each.name for each in given.out.glob("*.json")} - ours):
        print(f"of other measurements than these, and left alone: {', '.join(others)}", flush=True)
    forecasts_of(parser, given.forecasts)
    if why := unwritable(given.out):
        parser.error(
            f"{given.out} cannot be written to ({why}), and replay adds to its figures: copy it first, "
            f"with cp -r --no-preserve=mode {given.out} COPY, and name the copy"
        )
    compared = 0
    for file in files:
        lacking = too_little(file, given.forecasts)
        print(f"{file.stem}: {lacking or ''}", flush=True)
        if not lacking:
            fill_in(given.forecasts, file)
            compared += 1
    return int(compared == 0)


def forecasts_of(parser: argparse.ArgumentParser, file: Path) -> ForecastFile:
    try:
        return read_forecasts(file, EXPERTS)
    except SteerpipeError as error:
        parser.error(str(error))


def keep(forecasts: Path, out: Path) -> None:
    """In the folder of what is measured with them. SystemExit: what lies there was measured with others."""
    make_folder(out)
    own = out / FORECASTS
    if not own.exists():
        write_whole(own, forecasts.read_bytes())
    elif digest(own) != digest(forecasts):
        raise SystemExit(f"{out} has figures of other forecasts than {forecasts}: name another folder, or {own}")


def missing_forecasts(found: ForecastFile, measurements: Sequence[Measurement]) -> str | None:
    """Why these cannot run on them: a row that asks for what is not there would end them. None: they can."""
    rows = [each for measurement in measurements for each in rows_of(measurement)]
    wanted = max(sum(int(option(each, flag)) for flag in ("--tokens", "--warmup")) for each in measurements)
    if found.recording.tokens < wanted:
        return f"it has {found.recording.tokens} tokens, and {wanted} are measured; {RECORD}"
    try:
        for said in {row.said for row in rows} - {"", "perfect", "wrong", "chance"}:
            found.foresight(said, 1)
    except SteerpipeError as error:
        return str(error)
    if found.reuse is None and any(row.policy == "reuse" for row in rows):
        return f"it has no scores of reuse; {RECORD}"
    return None


def rows_of(measurement: Measurement) -> list[Row]:
    given = ",".join(option(measurement, flag) for flag in ("--rows", "--round-rows"))
    return [ROWS[int(number)] for number in given.split(",") if number]


def option(measurement: Measurement, flag: str) -> str:
    return measurement.words[measurement.words.index(flag) + 1]


def too_little(file: Path, forecasts: Path) -> str | None:
    """Why a run that ended early, or of other forecasts, cannot be compared with replay; None: it can."""
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
    return other_forecasts(found, forecasts)


if __name__ == "__main__":
    main()
