"""The dimensions of the law, and a small set of cases in which every two values meet."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from steerpipe.store.formats import ExpertFormat
from steerpipe.transfer.faulty import Faults
from tests.support.tiny import FAMILIES

FORMATS = {form: ExpertFormat(form) for form in ("float32", "bfloat16", "float16", "int8", "int4")}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BUDGETS = {"100 %": 1.0, "50 %": 0.5, "25 %": 0.25, "12.5 %": 0.125, "two slots": 0.0}
TIERS = {"disk": 0, "some RAM": 5, "all in RAM": 1 << 20}  # blocks
LINKS = {
    "plain": Faults(),
    "slow": Faults(delay_seconds=0.0005),
    "reordering": Faults(delay_seconds=0.001),  # with two readers
    "stalling": Faults(stall_share=0.05, stall_seconds=0.005),
    "failing once": Faults(fail_share=1.0),
}
GUESSES = ("none", "random")
DIMENSIONS: dict[str, Sequence[str]] = {
    "family": FAMILIES, "form": tuple(FORMATS), "dtype": tuple(DTYPES), "budget": tuple(BUDGETS),
    "tier": tuple(TIERS), "link": tuple(LINKS), "guesses": GUESSES,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    family: str
    form: str
    dtype: str
    budget: str
    tier: str
    link: str
    guesses: str

    def __str__(self) -> str:
        return f"{self.family}-{self.form}-{self.dtype}-{self.budget}-{self.tier}-{self.link}-{self.guesses}"

    @property
    def readers(self) -> int:
        return 2 if self.link == "reordering" else 1


def every_case() -> Iterator[Case]:
    for values in itertools.product(*DIMENSIONS.values()):
        yield Case(*values)


def pairwise_cases() -> list[Case]:
    """Every value of every dimension with every value of every other: greedy, the same list at every run."""
    left = set(_all_pairs(DIMENSIONS))
    cases: list[Case] = []
    while left:
        values: dict[str, str] = {}
        first = min(left)
        values.update(dict(first))
        for name, choices in DIMENSIONS.items():
            if name not in values:
                values[name] = max(choices, key=lambda choice, n=name: _gain(left, values | {n: choice}))
        case = Case(**values)
        left -= set(_pairs(values))
        cases.append(case)
    return cases


Pair = tuple[tuple[str, str], tuple[str, str]]  # ((dimension, value), (dimension, value))


def _all_pairs(dimensions: Mapping[str, Sequence[str]]) -> Iterator[Pair]:
    for one, other in itertools.combinations(dimensions, 2):
        for values in itertools.product(dimensions[one], dimensions[other]):
            yield (one, values[0]), (other, values[1])


def _pairs(values: Mapping[str, str]) -> Iterator[Pair]:
    ordered = [(name, values[name]) for name in DIMENSIONS if name in values]
    yield from itertools.combinations(ordered, 2)


def _gain(left: set[Pair], values: Mapping[str, str]) -> int:
    return sum(pair in left for pair in _pairs(values))
