"""What the doctor found: facts, and findings that say what to do. Frozen, and plain enough for JSON."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad: `NOTE` is worth knowing, `WARNING` costs speed or a promise, `PROBLEM` stops something from working."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.what, "a finding needs a what"
        assert self.fix or self.level is Level.OK, f"no fix for: {self.what}"


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that was read or measured. `how` says how a measured figure came about."""

    name: str
    value: str | int | float | bool | None
    unit: str = ""
    how: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    facts: tuple[Fact, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class DoctorReport:
    sections: tuple[Section, ...]
    took_seconds: float

    @property
    def worst(self) -> Level:
        """The gravest level of all findings."""
        order = list(Level)
        return max((finding.level for section in self.sections for finding in section.findings), key=order.index)

    def as_json(self) -> dict[str, Any]:
        return {"worst": self.worst, **asdict(self)}
