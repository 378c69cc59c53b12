"""`steerpipe demo`: one answer five ways, then every family against transformers."""

import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from steerpipe.demo.config import THREADS
from steerpipe.demo.families import FamilyCheck, check_family, family_table
from steerpipe.demo.ways import Contest, gain_line, run_ways, ways_table
from steerpipe.doctor.cpu import model_name
from steerpipe.tiny import FAMILIES


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All families, the embedded model every way, and the machine that the speeds are of."""

    machine: str
    threads: int
    families: tuple[FamilyCheck, ...]
    contest: Contest

    @property
    def differing(self) -> list[str]:
        ways = [f"the embedded model, {check.name}" for check in self.contest.ways if check.changes_bits]
        return ways + [check.family for check in self.families if check.differs]

    @property
    def verdict(self) -> str:
        """One line."""
        if self.differing:
            return f"DIFFERENT: {', '.join(self.differing)}. Trust no answer here; `steerpipe doctor` may say why."
        return (
            f"All {len(self.families)} families compute what transformers computes; no chunk or budget changes a bit."
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "differing": self.differing}


def run_demo(console: Console) -> DemoReport:
    """The embedded model every way, then all families, a table each, and a verdict. About a minute."""
    contest = run_ways(console)
    console.print(ways_table(contest))
    console.print(gain_line(contest), soft_wrap=True, highlight=False)
    checks = []
    with tempfile.TemporaryDirectory() as scratch, console.status("writing and comparing tiny checkpoints"):
        for family in FAMILIES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                checks.append(check_family(family, Path(scratch) / family))
    report = DemoReport(model_name(), THREADS, tuple(checks), contest)
    console.print(family_table(report.families, report.machine))
    console.print(report.verdict, style="bold red" if report.differing else "green", soft_wrap=True, highlight=False)
    return report
