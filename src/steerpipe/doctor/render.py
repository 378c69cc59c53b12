"""The report for a terminal."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from steerpipe.core.units import format_bytes
from steerpipe.doctor.report import DoctorReport, Fact, Finding, Level, Section

STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def render(report: DoctorReport) -> RenderableType:
    """Something that a rich Console prints."""
    counts = dict.fromkeys(Level, 0)
    for section in report.sections:
        for finding in section.findings:
            counts[finding.level] += 1
    closing = Text(", ".join(f"{count} {level}" for level, count in counts.items() if count), STYLES[report.worst])
    closing.append(f"  (took {report.took_seconds:.1f} s)", "dim")
    return Group(*(part for section in report.sections for part in _section(section)), closing)


def _section(section: Section) -> list[RenderableType]:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for style in ("dim", "", "dim"):
        table.add_column(style=style, overflow="fold")
    for fact in section.facts:
        table.add_row(Text(f"  {fact.name}"), Text(_value(fact)), Text(fact.how))
    return [Text(section.name, "bold"), table, _findings(section.findings), Text("")]


def _value(fact: Fact) -> str:
    if fact.value is None:
        return "none"
    if fact.unit == "bytes" and isinstance(fact.value, int):
        return format_bytes(fact.value)
    return f"{fact.value} {fact.unit}".rstrip()


def _findings(findings: Iterable[Finding]) -> Table:
    """Level and words in two columns, so that what is wrapped stays under the words."""
    table = Table.grid()
    table.add_column(no_wrap=True, min_width=10)
    table.add_column(overflow="fold")
    for finding in findings:
        words = f"{finding.what}\nfix: {finding.fix}" if finding.fix else finding.what
        table.add_row(Text(f"  {finding.level:<8}", STYLES[finding.level]), Text(words))
    return table
