"""Measurements in processes of their own, each with a time limit: one that hangs or dies costs its own figures.

Each leaves NAME.json (which it writes itself, and which grows while it measures) and NAME.log in the folder; what ran,
how it ended and how long it took is in summary.json.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEAST_SECONDS = 15  # less is not worth starting anything


@dataclass(frozen=True)
class Measurement:
    """`words`: what the interpreter is told; `--json FILE` comes behind them."""

    name: str
    words: tuple[str, ...]
    limit_seconds: int


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=float, default=570, help="seconds for everything")
    parser.add_argument("--only", default="", help="names, divided by commas")
    return parser


def chosen(parser: argparse.ArgumentParser, every: Sequence[Measurement], only: str) -> list[Measurement]:
    """Those that are named, all where none is; ends the program where one is not there."""
    names = [name for name in only.split(",") if name]
    if unknown := set(names) - {each.name for each in every}:
        there = ", ".join(each.name for each in every)
        parser.error(f"no measurement is called {', '.join(sorted(unknown))}; there are {there}")
    return [each for each in every if not names or each.name in names]


def run_all(
    measurements: Sequence[Measurement], out: Path, limit_seconds: float, lines: Callable[[Path], Iterable[str]]
) -> None:
    """One after the other, until the time is up. `lines`: what is worth saying of a measurement's JSON."""
    out.mkdir(parents=True, exist_ok=True)
    ends = time.perf_counter() + limit_seconds
    done: list[dict[str, Any]] = []
    for each in measurements:
        if (left := ends - time.perf_counter()) < LEAST_SECONDS:
            print(f"{each.name}: no time left", flush=True)
            done.append({"name": each.name, "words": list(each.words), "status": "no time left", "seconds": 0.0})
        else:
            done.append(run(each, out, min(left, each.limit_seconds)))
            print(f"{each.name}: {done[-1]['status']}, {done[-1]['seconds']} s", flush=True)
            print(*lines(out / f"{each.name}.json"), sep="\n", flush=True)
        (out / "summary.json").write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")


def run(measurement: Measurement, out: Path, limit_seconds: float) -> dict[str, Any]:
    """Ends the whole process group when the time is up."""
    words = [sys.executable, *measurement.words, "--json", str(out / f"{measurement.name}.json")]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
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
