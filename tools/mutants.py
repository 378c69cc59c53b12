"""Plants faults in a copy of the package; each must be caught by the tests that it names. `make mutants` runs it.

    python tools/mutants.py [--workers 2] [--only TEXT]

A mutant is an entry of a file in tests/mutants/:

    [[mutant]]
    name = "the environment beats the flags"
    file = "src/steerpipe/core/config.py"
    find = "from_file | from_environment | given"  # stands there exactly once
    replace = "from_file | given | from_environment"
    tests = "tests/core/test_config.py"            # what pytest is given; the narrower, the quicker

First every named test must pass on an unchanged copy. Exit status 1: a mutant survived. 2: an entry is wrong, or a test
fails without any fault. The working tree is never touched.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "recipes", "tools", "examples", "pyproject.toml", "README.md", "docs")  # what tests may read
LIMIT_SECONDS = 300.0
TESTS_FAILED = 1  # of pytest's exit statuses


class EntryError(Exception):
    """An entry that cannot be planted as it stands."""


class Verdict(Enum):
    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    HUNG = "caught (by the time limit)"
    BROKE = "BROKE THE RUN"  # pytest did not get as far as a failing test, so nothing was shown


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    find: str
    replace: str
    tests: str

    def plant(self, tree: Path) -> None:
        """Changes the file below `tree`, which is a copy."""
        path = tree / self.file
        if not path.is_file():
            raise EntryError(f"{self.name}: there is no {self.file}")
        source = path.read_text()
        if (count := source.count(self.find)) != 1:
            raise EntryError(
                f"{self.name}: the find text stands {count} times in {self.file}; it must stand there once"
            )
        changed = source.replace(self.find, self.replace)
        if changed == source:
            raise EntryError(f"{self.name}: find and replace are the same")
        compile(changed, self.file, "exec")  # a syntax error would be caught by anything and show nothing
        path.write_text(changed)


@dataclass(frozen=True, slots=True)
class Outcome:
    mutant: Mutant
    verdict: Verdict
    seconds: float
    output: str


def read_mutants(folder: Path) -> list[Mutant]:
    """All entries, in the order of the files. Strict: exactly the five keys, and no name twice."""
    mutants: list[Mutant] = []
    for file in sorted(folder.glob("*.toml")):
        tables = tomllib.loads(file.read_text())
        if tables.keys() != {"mutant"}:
            raise EntryError(f"{file.name}: only [[mutant]] entries belong here, not {sorted(tables)}")
        for entry in tables["mutant"]:
            if entry.keys() != set(Mutant.__slots__) or not all(isinstance(text, str) for text in entry.values()):
                raise EntryError(f"{file.name}: an entry has {sorted(entry)}; it needs {', '.join(Mutant.__slots__)}")
            mutants.append(Mutant(**entry))
    names = [mutant.name for mutant in mutants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise EntryError(f"two mutants are called {', '.join(sorted(twice))}")
    return mutants


def copy_tree(source: Path, target: Path) -> None:
    """What the tests need, without caches: a stale .pyc could hide a fault."""
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        elif (source / name).is_file():
            shutil.copy2(source / name, target / name)


def run_pytest(tree: Path, tests: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    """The named tests against the package in `tree`, with the same examples at every run."""
    variables = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
    return subprocess.run(
        command, cwd=tree, env=variables, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )


def try_mutant(mutant: Mutant, source: Path) -> Outcome:
    begin = perf_counter()
    with tempfile.TemporaryDirectory(prefix="steerpipe-mutant-") as folder:
        tree = Path(folder)
        copy_tree(source, tree)
        mutant.plant(tree)
        try:
            done = run_pytest(tree, shlex.split(mutant.tests), "-x")
        except subprocess.TimeoutExpired:
            return Outcome(mutant, Verdict.HUNG, perf_counter() - begin, "")
    verdict = {0: Verdict.SURVIVED, TESTS_FAILED: Verdict.CAUGHT}.get(done.returncode, Verdict.BROKE)
    return Outcome(mutant, verdict, perf_counter() - begin, done.stdout + done.stderr)


def check_unchanged(mutants: Sequence[Mutant], source: Path, workers: int) -> str | None:
    """What pytest says when a named test fails, or is missing, on an unchanged copy; None when all pass."""
    given = [shlex.split(tests) for tests in sorted({mutant.tests for mutant in mutants})]
    plain = sorted({test for tests in given if not _selects(tests) for test in tests})
    runs = [tests for tests in (plain, *filter(_selects, given)) if tests]
    with tempfile.TemporaryDirectory(prefix="steerpipe-unchanged-") as folder:
        tree = Path(folder)
        copy_tree(source, tree)
        for mutant in mutants:  # every entry must fit the source as it is, before any time is spent
            with tempfile.TemporaryDirectory() as scratch:
                copy = Path(scratch) / mutant.file
                copy.parent.mkdir(parents=True)
                if (original := tree / mutant.file).is_file():
                    shutil.copy2(original, copy)
                mutant.plant(Path(scratch))
        for tests in runs:
            done = run_pytest(tree, tests, *(("-n", str(workers)) if workers > 1 else ()))
            if done.returncode:
                return done.stdout + done.stderr
    return None


def _selects(tests: Sequence[str]) -> bool:
    """With options (-k): it is a run of its own, for they would be said of all tests."""
    return any(each.startswith("-") for each in tests)


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    table = Table("mutant", "file", "verdict", "s")
    for outcome in outcomes:
        good = outcome.verdict in (Verdict.CAUGHT, Verdict.HUNG)
        verdict = f"[{'green' if good else 'bold red'}]{outcome.verdict.value}[/]"
        table.add_row(outcome.mutant.name, outcome.mutant.file, verdict, f"{outcome.seconds:.1f}")
    console.print(table)
    for outcome in outcomes:
        if outcome.verdict is Verdict.BROKE:
            console.print(f"{outcome.mutant.name}:\n{outcome.output}", markup=False)


def main(arguments: Sequence[str] | None = None, source: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Plants faults in a copy of the package; each must be caught.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", metavar="TEXT", help="only mutants whose name or file contains TEXT")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        known = read_mutants(source / "tests" / "mutants")
        mutants = [mutant for mutant in known if options.only in mutant.name or options.only in mutant.file]
        if not mutants:
            raise EntryError(f"none of {len(known)} mutants has {options.only!r} in its name or file")
        if failed := check_unchanged(mutants, source, options.workers):
            raise EntryError(f"the named tests do not pass on the unchanged source:\n{failed}")
        with ThreadPoolExecutor(options.workers) as pool:
            coming = pool.map(lambda mutant: try_mutant(mutant, source), mutants)
            outcomes = list(track(coming, "planting", len(mutants), console=Console(stderr=True), transient=True))
    except (EntryError, SyntaxError, tomllib.TOMLDecodeError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    show(outcomes, console)
    survived = [outcome for outcome in outcomes if outcome.verdict in (Verdict.SURVIVED, Verdict.BROKE)]
    console.print(f"{len(outcomes) - len(survived)} of {len(outcomes)} mutants caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
