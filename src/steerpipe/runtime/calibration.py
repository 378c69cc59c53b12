"""Measures what lossy answers to a miss cost a model, by policy, layers and rank, and sets the dial by it."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steerpipe.core.errors import InputError
from steerpipe.core.quality import KL_BOUNDS, OF_A_LAYER, Allowance, Dial, MissPolicy, QualityPlan, Substituted
from steerpipe.predict.logits import LogitPredictor
from steerpipe.runtime.quality_profile import Loss, Measurement, QualityProfile, Setting
from steerpipe.runtime.quality_rehearsal import PROMPT_TOKENS, CacheOnPaper, Exact, Rehearsal

RESIDENCY = 0.25
LATE_LAYERS = 2  # until a miss has come: what `patch` is measured with, and allows
SINGLE_LAYERS, GROUPS = 3, 5  # the first layers by themselves, the others in so many groups
OF_A_RANK = (MissPolicy.SURROGATE, MissPolicy.PATCH, MissPolicy.DROP)
DRIFTING = 1.25  # an early layer drifts if a surrogate costs so many times what it does in the median of the layers
SAFETY = 0.7  # so much of its bound a plan may take on the calibration texts: others cost more or less
LEAST_TOKENS = PROMPT_TOKENS + 16  # of a text
# Tokens. Of 1,110 the 95 % interval of `balanced` reached 1.38 times its mean (docs/quality.md), and SAFETY bears 1.43;
# it narrows with their root: 1,110 (.38 / .43)² are 870.
LEAST_MEASURED = 900
EXACT = Substituted()

Progress = Callable[[int, int], None]  # plans rehearsed, in all
Predictors = Callable[[QualityPlan], Mapping[int, LogitPredictor]]


@dataclass
class Meter:
    """Compares two answers to the same texts, token by token."""

    tokens: int = 0
    nats: float = 0.0  # KL
    surprise: float = 0.0  # of the true next tokens
    agreed: int = 0
    counts: Substituted = field(default_factory=Substituted)

    def add(self, exact: Tensor, lossy: Tensor, following: Tensor, counts: Substituted) -> None:
        """exact, lossy: log probabilities [M, vocab]; following: [M] the tokens that came."""
        self.tokens += len(following)
        self.nats += float((exact.exp() * (exact - lossy)).sum())
        self.surprise -= float(lossy.gather(1, following[:, None]).sum())
        self.agreed += int((exact.argmax(-1) == lossy.argmax(-1)).sum())
        self.counts += counts

    def add_text(self, exact: Exact, lossy: Tensor, counts: Substituted = EXACT) -> None:
        """The last token of a text has nothing after it."""
        following = torch.tensor(exact.tokens[exact.prompt_tokens + 1 :])
        self.add(exact.log_probabilities[:-1], lossy[:-1], following, counts)

    def loss(self) -> Loss:
        assert self.tokens, "nothing was measured"
        kl = self.nats / self.tokens
        replaced = self.counts.substituted
        cost = self.nats / replaced if replaced else 0.0
        return Loss(kl, math.exp(self.surprise / self.tokens), self.agreed / self.tokens, self.counts.share, cost)


def measured_tokens(texts: Sequence[Sequence[int]]) -> int:
    """Of texts of LEAST_TOKENS or more."""
    return sum(len(text) - PROMPT_TOKENS - 1 for text in texts)


class Calibration:
    """One model and its texts."""

    def __init__(
        self, rehearsal: Rehearsal, texts: Sequence[Sequence[int]], predictors: Predictors, *,
        residency: float = RESIDENCY, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """`texts` as token ids: those that are too short to have a prompt and an answer are left out."""
        self.texts = [text for text in texts if len(text) >= LEAST_TOKENS]
        if not self.texts:
            raise InputError(f"no text has {LEAST_TOKENS} tokens or more", fix="give longer texts")
        self.exact_perplexity = 0.0
        self._rehearsal = rehearsal
        self._predictors = predictors
        self._residency = residency
        self._progress = progress

    @property
    def tokens(self) -> int:
        return measured_tokens(self.texts)

    def measure(self, plans: Sequence[QualityPlan], late: int = LATE_LAYERS) -> list[Loss]:
        """What each plan costs on all texts, with the same misses."""
        geometry = self._rehearsal.geometry
        slots = max(geometry.top_k, round(self._residency * geometry.layers * geometry.experts))
        cache = CacheOnPaper(geometry.layers, geometry.experts, slots)
        meters, own = [Meter() for _ in plans], Meter()
        for number, text in enumerate(self.texts):
            exact = self._rehearsal.exact(text, cache)
            own.add_text(exact, exact.log_probabilities)
            for place, (plan, meter) in enumerate(zip(plans, meters, strict=True)):
                meter.add_text(exact, *self._rehearsal.lossy(exact, plan, self._predictors(plan), late))
                if self._progress is not None:
                    self._progress(number * len(plans) + place + 1, len(plans) * len(self.texts))
            self._rehearsal.forget(exact)
        self.exact_perplexity = own.loss().perplexity
        return [meter.loss() for meter in meters]

    def profile(self, model: str) -> QualityProfile:
        geometry = self._rehearsal.geometry
        layers, ranks = geometry.layers, geometry.top_k
        places = list(places_of(layers, ranks))
        losses = self.measure([only(*place, layers, ranks) for place in places])
        measured = tuple(
            Measurement(str(policy), span, rank, loss)
            for (policy, span, rank), loss in zip(places, losses, strict=True)
        )
        return self.set_dial(model, measured)

    def set_dial(self, model: str, measured: tuple[Measurement, ...]) -> QualityProfile:
        """The profile that follows from measurements of these texts."""
        geometry, drifting = self._rehearsal.geometry, drifting_layers(measured)
        settings = {
            dial: self._setting(dial, measured, drifting, geometry.layers, geometry.top_k) for dial in KL_BOUNDS
        }
        return QualityProfile(
            model, self.tokens, self._residency, self.exact_perplexity, drifting, measured,
            {dial: setting for dial, setting in settings.items() if setting is not None},
        )  # fmt: skip

    def _setting(
        self, dial: Dial, measured: Sequence[Measurement], drifting: Sequence[int], layers: int, ranks: int
    ) -> Setting | None:
        """The most lenient plan within the bound; the dearest part goes until it is. None: there is no such plan."""
        chosen = cheapest(measured, () if dial is Dial.FAST else drifting)
        bound = KL_BOUNDS[dial]
        while dial is not Dial.FAST and sum(each.loss.kl for each in chosen) > SAFETY * bound:
            chosen.pop()
        while chosen:
            plan = joined(chosen, layers, ranks)
            (loss,) = self.measure([plan])
            if loss.kl <= SAFETY * bound:
                (unmended,) = self.measure([plan], late=layers)
                per_token = None if dial is Dial.FAST else bound
                return Setting(plan, allowance(chosen, measured, loss, unmended, per_token, ranks), loss, unmended)
            if dial is Dial.FAST:  # it never waits, so nothing can be left out
                return None
            chosen.pop()
        return None


Place = tuple[MissPolicy, tuple[int, int], int | None]


def spans(layers: int) -> list[tuple[int, int]]:
    """The first layers one by one, the others in groups: (first, last) each."""
    singles = min(SINGLE_LAYERS, layers)
    edges = [singles + round(part * (layers - singles) / GROUPS) for part in range(GROUPS + 1)]
    groups = [(first, end - 1) for first, end in itertools.pairwise(edges) if end > first]
    return [(layer, layer) for layer in range(singles)] + groups


def places_of(layers: int, ranks: int) -> Iterator[Place]:
    """What is measured: every policy of a rank by layers and rank, those of a whole layer by layers."""
    for span in spans(layers):
        for policy in OF_A_RANK:
            for rank in range(ranks):
                yield policy, span, rank
        if span != (0, 0):
            for policy in OF_A_LAYER:
                yield policy, span, None


def only(policy: MissPolicy, span: tuple[int, int], rank: int | None, layers: int, ranks: int) -> QualityPlan:
    """The policy there, and exact everywhere else."""

    def at(layer: int, own: int) -> MissPolicy:
        inside = span[0] <= layer <= span[1] and rank in (None, own)
        return policy if inside else MissPolicy.WAIT

    return QualityPlan(tuple(tuple(at(layer, own) for own in range(ranks)) for layer in range(layers)), LATE_LAYERS)


def drifting_layers(measured: Sequence[Measurement]) -> tuple[int, ...]:
    """Those of the first layers in which a surrogate costs clearly more than in the median of all spans."""
    cost: dict[tuple[int, int], float] = {}
    for each in measured:
        if each.policy == MissPolicy.SURROGATE:
            cost[each.layers] = cost.get(each.layers, 0.0) + each.loss.cost
    middle = statistics.median(cost.values())
    early = [span for span in sorted(cost) if span[1] < SINGLE_LAYERS]
    return tuple(first for first, last in early if cost[first, last] > DRIFTING * middle)


def cheapest(measured: Sequence[Measurement], exact: Sequence[int]) -> list[Measurement]:
    """For each span and rank outside `exact` layers the policy without a wait that costs least; cheapest use first."""
    best: dict[tuple[tuple[int, int], int], Measurement] = {}
    for each in measured:
        if each.rank is None or each.layers[0] in exact:
            continue
        place = (each.layers, each.rank)
        if place not in best or each.loss.kl < best[place].loss.kl:
            best[place] = each
    return sorted(best.values(), key=lambda each: each.loss.cost)


def joined(chosen: Sequence[Measurement], layers: int, ranks: int) -> QualityPlan:
    policies = [[MissPolicy.WAIT] * ranks for _ in range(layers)]
    for each in chosen:
        for layer in range(each.layers[0], each.layers[1] + 1):
            assert each.rank is not None, "whole layers are not joined"
            policies[layer][each.rank] = MissPolicy(each.policy)
    return QualityPlan(tuple(tuple(own) for own in policies), LATE_LAYERS)


def allowance(
    chosen: Sequence[Measurement], measured: Sequence[Measurement], loss: Loss, unmended: Loss,
    per_token: float | None, ranks: int,
) -> Allowance:  # fmt: skip
    """Costs as measured place by place, times what the places cost more (never less) together.

    A patch is charged as the surrogate that it is until it has come.
    """
    layers = 1 + max(each.layers[1] for each in measured)
    surrogates = {(each.layers, each.rank): each for each in measured if each.policy == MissPolicy.SURROGATE}
    charged = [surrogates[m.layers, m.rank] if m.policy == MissPolicy.PATCH else m for m in chosen]

    def table(parts: Sequence[Measurement], whole: Loss) -> tuple[tuple[float, ...], ...]:
        apart = sum(each.loss.kl for each in parts)
        scale = max(1.0, whole.kl / apart) if apart else 1.0
        costs = [[0.0] * ranks for _ in range(layers)]
        for each in parts:
            for layer in range(each.layers[0], each.layers[1] + 1):
                assert each.rank is not None, "whole layers have no costs by rank"
                costs[layer][each.rank] = max(0.0, each.loss.cost) * scale
        return tuple(tuple(own) for own in costs)

    return Allowance(table(charged, unmended), table(chosen, loss), per_token)
