"""Measurements in processes of their own, each with a time limit: one that hangs or dies costs its own figures.

Each leaves NAME.json (which it writes itself, and which grows while it measures; an older one goes first) in the
folder, and where it did not end well NAME.log, too; what ran, how it ended and how long it took is in summary.json, of
every measurement the last time. What ends this program, if not SIGKILL, ends the process under way first.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = "summary.json"
LEAST_SECONDS = 15  # less is not worth starting anything


@dataclass(frozen=True)
class Measurement:
    """`words`: what the interpreter is told; `--json FILE` comes behind them. `margin_seconds`: so long before
    its limit it is to begin nothing more, which `--seconds` tells it; None: it has no such option."""

    name: str
    words: tuple[str, ...]
    limit_seconds: int
    margin_seconds: int | None = None


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=float, default=570, help="seconds for everything")
    parser.add_argument("--only", default="", help="names, divided by commas")
    return parser


def chosen(parser: argparse.ArgumentParser, every: Sequence[Measurement], only: str) -> list[Measurement]:
    """Those that are named, all where none is; ends the program where one is not there."""
    names = [name for each in only.split(",") if (name := each.strip())]
    if unknown := set(names) - {each.name for each in every}:
        there = ", ".join(each.name for each in every)
        parser.error(f"no measurement is called {', '.join(sorted(unknown))}; there are {there}")
    return [each for each in every if not names or each.name in names]


def run_all(
    measurements: Sequence[Measurement], out: Path, limit_seconds: float, lines: Callable[[Path], Iterable[str]]
) -> int:
    """One after the other, until the time is up. `lines`: what is worth saying of a measurement's JSON.

    The program's exit status: 1 if any did not end by itself and well.
    """
    make_folder(out)
    ends, summary = time.perf_counter() + limit_seconds, out / SUMMARY
    done: dict[str, Any] = {each["name"]: each for each in read(summary) or ()}
    for each in measurements:
        if (left := ends - time.perf_counter()) < LEAST_SECONDS:
            done[each.name] = {"name": each.name, "words": list(each.words), "status": "no time left", "seconds": 0.0}
            print(f"{each.name}: no time left", flush=True)
        else:
            done[each.name] = run(each, out, min(left, each.limit_seconds))
            print(f"{each.name}: {ended(done[each.name], out)}", flush=True)
            for line in lines(out / f"{each.name}.json"):
                print(line, flush=True)
        summary.write_text(json.dumps([*done.values()], indent=1) + "\n", encoding="utf-8")
    return int(any(done[each.name]["status"] != 0 for each in measurements))


def make_folder(out: Path) -> None:
    """SystemExit: nothing can be written there."""
    if why := unwritable(out):
        raise SystemExit(f"{out} is no folder to write to ({why}): name another one")


def unwritable(out: Path) -> str | None:
    """Why the folder cannot be made or written to; None: it can."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as problem:
        return problem.strerror or str(problem)
    return None


def read(file: Path) -> Any:
    """What a JSON holds; None where there is none, or half of one."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def ended(found: dict[str, Any], out: Path) -> str:
    """How a process did; of one that did not do well the last that it said, and where the rest is."""
    status, seconds = found["status"], found["seconds"]
    if status == 0:
        return f"done, {seconds} s"
    log = out / f"{found['name']}.log"
    said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"status {status}, {seconds} s; {said[-1][:200] if said else 'it said nothing'} (see {log})"


def run(measurement: Measurement, out: Path, limit_seconds: float) -> dict[str, Any]:
    """One process; of one that ended well no log stays, its JSON has the lines."""
    file, log, begin = out / f"{measurement.name}.json", out / f"{measurement.name}.log", time.perf_counter()
    file.unlink(missing_ok=True)
    words = [sys.executable, *measurement.words, "--json", str(file)]
    if measurement.margin_seconds is not None:
        words += ["--seconds", f"{max(0.0, limit_seconds - measurement.margin_seconds):.0f}"]
    try:
        status = status_of(words, log, limit_seconds)
    finally:
        file.with_suffix(".part").unlink(missing_ok=True)  # what it was about to write when it was ended
    if status == 0:
        log.unlink()
    return {
        "name": measurement.name, "words": list(measurement.words), "status": status,
        "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def status_of(words: Sequence[str], log: Path, limit_seconds: float) -> int | str:
    """Ends the whole process group when the time is up, or when this program is ended itself. (A session of its own
    would be out of reach of who ends all of ours.)"""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("w", encoding="utf-8") as said, signals_raised():
        process = subprocess.Popen(
            words, stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, process_group=0,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            return process.wait(limit_seconds)
        except BaseException as problem:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(problem, subprocess.TimeoutExpired):
                raise
            return f"stopped after {limit_seconds:.0f} s"


@contextmanager
def signals_raised() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program as Ctrl-C does, unless somebody has asked for something else (nohup)."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    ours = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for each in ours:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in ours:
            signal.signal(each, signal.SIG_DFL)
