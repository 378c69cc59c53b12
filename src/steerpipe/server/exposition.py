"""Prometheus' text format: counters, gauges and histograms, and nothing of its client library."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with its values: a sample is (suffix of the name, labels, value)."""

    name: str
    kind: str  # counter, gauge or histogram
    help: str
    samples: Sequence[tuple[str, Labels, float]]

    def lines(self) -> Iterator[str]:
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        for suffix, labels, value in self.samples:
            inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
            yield (
                f"{self.name}{suffix}{{{inside}}} {_number(value)}"
                if inside
                else (f"{self.name}{suffix} {_number(value)}")
            )


@dataclass(slots=True)
class Histogram:
    """Counts of observations up to each bound, and above the last."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def samples(self) -> list[tuple[str, Labels, float]]:
        seen, found = 0, []
        for bound, count in zip([*map(_number, self.bounds), "+Inf"], self.counts, strict=True):
            seen += count
            found.append(("_bucket", (("le", bound),), float(seen)))
        return [*found, ("_sum", (), self.total), ("_count", (), float(seen))]


def counter(name: str, help_text: str, values: Mapping[str, float] | float, label: str = "") -> Family:
    return Family(name, "counter", help_text, _samples(values, label))


def gauge(name: str, help_text: str, values: Mapping[str, float] | float, label: str = "") -> Family:
    return Family(name, "gauge", help_text, _samples(values, label))


def histogram(name: str, help_text: str, values: Histogram) -> Family:
    return Family(name, "histogram", help_text, values.samples())


def expose(families: Sequence[Family]) -> str:
    return "".join(f"{line}\n" for family in families for line in family.lines())


def _samples(values: Mapping[str, float] | float, label: str) -> list[tuple[str, Labels, float]]:
    if isinstance(values, Mapping):
        return [("", ((label, key),), value) for key, value in values.items()]
    return [("", (), values)]


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
