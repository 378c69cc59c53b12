"""How good a prediction is. Batched: a tally takes [R, E] at a time on any device, and tallies merge.

R decisions, E experts per layer, k routed ones. Of equal probabilities the lowest expert number ranks first, on every
device, so that a predictor which knows nothing scores the same everywhere.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from steerpipe.core.errors import InputError

CALIBRATION_BINS = 20  # equal width on [0, 1]
_SUMS = (
    "decisions", "first", "recalled", "recalled_wider", "recalled_double", "jaccard", "perfect",
    "weighed", "gate_mass", "missed", "missed_recalled", "invalid",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metrics:
    """Shares from 0 to 1, means over decisions; None: nothing was there to measure it by."""

    decisions: int
    top_1: float  # the expert named first is among the k
    recall: float  # of the k routed experts, among the k named first (the seed's recall@4 where k is 4)
    recall_wider: float  # among the k + 2 named first
    recall_double: float  # among the 2k named first
    jaccard: float  # of the k named first and the k routed
    perfect: float  # the same set
    gate_mass: float | None  # share of the router's applied weight that the k named first carry; None: no weights
    recall_on_misses: float | None  # of routed experts that a cache did not hold; None: no cache, or no miss
    missed: int  # uses that the cache did not hold
    calibration_error: float  # over all E probabilities: mean distance of what is said from what happens
    calibration_error_chosen: float  # over the k named first alone: the others are near 0 and flatter the mean

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Probabilities from `least` up to the next bin's `least`: what was said, and how often it was so."""

    least: float
    count: int
    said: float
    happened: float


class Tally:
    """Sums over decisions, kept on `device` without a host sync until `metrics` is asked for."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._bins = torch.zeros(2, 3, CALIBRATION_BINS, dtype=torch.float64, device=device)
        # [all experts or the k named first; count, said, happened; bin]

    def add(
        self, probabilities: Tensor, experts: Tensor, weights: Tensor | None = None, missed: Tensor | None = None
    ) -> None:
        """`probabilities` [R, E]; the router's `experts` [R, k] and applied `weights` [R, k]; `missed` [R, k] bool."""
        experts = experts.long()
        top_k = experts.shape[1]
        truth = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, experts, True)  # [R, E]
        order = probabilities.argsort(dim=1, descending=True, stable=True)[:, : max(2 * top_k, top_k + 2)]
        found = order[:, :, None] == experts[:, None, :]  # [R, named, k]
        hit = found[:, :top_k].any(1)  # [R, k]
        common = hit.sum(1).double()  # [R]
        rows = torch.ones_like(common)
        share = _covered(weights, hit) if weights is not None else torch.zeros_like(common)
        lost = torch.zeros_like(hit) if missed is None else missed
        right = (probabilities >= 0) & (probabilities <= 1)  # not so for NaN
        terms = (
            rows, found[:, 0].any(1), common / top_k, found[:, : top_k + 2].sum((1, 2)) / top_k,
            found[:, : 2 * top_k].sum((1, 2)) / top_k, common / (2 * top_k - common), common == top_k,
            rows if weights is not None else torch.zeros_like(rows), share, lost.sum(1), (lost & hit).sum(1),
            ~right.all(1),
        )  # fmt: skip
        self._sums += torch.stack([each.double().sum() for each in terms])
        chosen = order[:, :top_k]
        self._bins[0] += _histogram(probabilities, truth)
        self._bins[1] += _histogram(probabilities.gather(1, chosen), truth.gather(1, chosen))

    def merge(self, other: Self) -> None:
        """Takes over what `other` has seen, wherever it lies."""
        self._sums += other._sums.to(self._sums.device)
        self._bins += other._bins.to(self._bins.device)

    def metrics(self) -> Metrics:
        """One host sync. InputError if something that was added was no probability."""
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        count = sums["decisions"]
        assert count, "a tally of no decisions"
        if sums["invalid"]:
            raise InputError(
                f"{int(sums['invalid'])} of {int(count)} decisions have values that are not probabilities",
                fix="return values from 0 to 1 for every expert (torch.sigmoid, or clamp), and no NaN",
            )
        every, chosen = (_error(each) for each in self._bins.cpu())
        return Metrics(
            decisions=int(count),
            top_1=sums["first"] / count,
            recall=sums["recalled"] / count,
            recall_wider=sums["recalled_wider"] / count,
            recall_double=sums["recalled_double"] / count,
            jaccard=sums["jaccard"] / count,
            perfect=sums["perfect"] / count,
            gate_mass=sums["gate_mass"] / sums["weighed"] if sums["weighed"] else None,
            recall_on_misses=sums["missed_recalled"] / sums["missed"] if sums["missed"] else None,
            missed=int(sums["missed"]),
            calibration_error=every,
            calibration_error_chosen=chosen,
        )

    def calibration(self) -> list[CalibrationBin]:
        """Of all E probabilities; bins that nothing fell into are left out."""
        count, said, happened = self._bins[0].tolist()
        return [
            CalibrationBin(
                index / CALIBRATION_BINS, int(count[index]), said[index] / count[index], times / count[index]
            )
            for index, times in enumerate(happened)
            if count[index]
        ]


def merged(tallies: Iterable[Tally]) -> Tally:
    """One tally of all, on the CPU."""
    together = Tally()
    for each in tallies:
        together.merge(each)
    return together


def _covered(weights: Tensor, hit: Tensor) -> Tensor:
    """[R]: share of each decision's weight on experts that were named."""
    applied = weights.double()
    return (applied * hit).sum(1) / applied.sum(1).clamp_min(torch.finfo(torch.float64).tiny)


def _histogram(probabilities: Tensor, truth: Tensor) -> Tensor:
    """[3, bins]: count, sum of what was said, times it was so."""
    said = probabilities.flatten().nan_to_num(0.0).clamp(0.0, 1.0)
    bins = (said * CALIBRATION_BINS).long().clamp_max(CALIBRATION_BINS - 1)
    so = torch.bincount(bins + CALIBRATION_BINS * truth.flatten(), minlength=2 * CALIBRATION_BINS)
    sums = torch.bincount(bins, weights=said.double(), minlength=CALIBRATION_BINS)
    not_so, happened = so.double().view(2, CALIBRATION_BINS)
    return torch.stack([not_so + happened, sums, happened])


def _error(bins: Tensor) -> float:
    """`bins` [3, bins]: mean over everything said of |said - happened| in its bin."""
    count, said, happened = bins
    return float((said - happened).abs().sum() / count.sum())
