"""Lossy answers to a miss are what they say: dropped, stood in for, committed to, or made good later."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe.core.errors import ConfigError
from steerpipe.core.ids import ExpertId, SequenceId
from steerpipe.core.protocols import ExpertWeights, Lease
from steerpipe.core.quality import SAVED_TOKENS, Allowance, MissPolicy, Purse, QualityPlan, Substituted
from steerpipe.model.moe import Route, combine, expert_ffn, pair_up, run_experts
from steerpipe.runtime.substitutes import Substitutes
from steerpipe.store.resident import ResidentExperts

H, E, WIDTH, LAYERS, K, ROWS = 8, 6, 12, 4, 2, 3
NAMES = (1, 3, 5, 7)  # decoder layers with experts
ANSWERS = (SequenceId(8), SequenceId(9), SequenceId(8))  # of the rows


@dataclass
class HalfThere:
    """A source of which only some experts are there; leases give anything, at once, and are remembered."""

    there: set[ExpertId] = field(default_factory=set)
    sent: list[ExpertId] = field(default_factory=list)
    ranks: dict[int, int] = field(default_factory=dict)
    leased: list[ExpertId] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        weights = [[ExpertWeights(torch.randn(2 * WIDTH, H), torch.randn(H, WIDTH)) for _ in range(E)] for _ in NAMES]
        self.experts = ResidentExperts(dict(zip(NAMES, weights, strict=True)))
        self.weights = weights

    def missing(self, layer: int, experts: np.ndarray) -> np.ndarray:
        return ~np.array([ExpertId(layer, e) in self.there for e in range(E)])[experts]

    def send_for(self, layer: int, ranks: Mapping[int, int]) -> int:
        self.sent += [ExpertId(layer, e) for e in sorted(ranks)]
        self.ranks |= ranks
        return len(self.sent)

    def compute(self, expert: ExpertId, x: Tensor) -> Tensor | None:
        weights = self.weights[NAMES.index(expert.layer)][expert.expert]
        return expert_ffn(x, weights) if expert in self.there else None

    @contextmanager
    def lease(self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None) -> Iterator[Lease]:
        self.leased += [ExpertId(layer, e) for e in routed]
        with self.experts.lease(layer, routed, keep) as lease:
            yield lease


def defaults() -> Tensor:
    return torch.randn(LAYERS, E, H, generator=torch.Generator().manual_seed(1))


def plan(policy: MissPolicy, **options: Sequence[int]) -> QualityPlan:
    return QualityPlan.uniform(policy, LAYERS, K, **options)


def started(*given: object, **named: object) -> Substitutes:
    """A desk in the middle of a decode step of ROWS rows."""
    desk = Substitutes(*given, **named)  # type: ignore[arg-type]
    assert desk.begin(ANSWERS, decode=True)
    return desk


def routed() -> tuple[Tensor, Route]:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(ROWS, H, generator=draw), Route(
        torch.tensor([[0, 4], [4, 2], [1, 0]]), torch.rand(ROWS, K, generator=draw)
    )


def run(desk: Substitutes, source: HalfThere, number: int, x: Tensor, route: Route) -> Tensor:
    settled = desk.settle(NAMES[number], x, route)
    with source.lease(NAMES[number], list(pair_up(settled.route, settled.stand_ins))) as lease:
        valid = torch.arange(ROWS)
        outputs = run_experts(x, settled.route, valid, lease, cell=1, stand_ins=settled.stand_ins)
    return combine(outputs, settled.route)


def by_hand(
    source: HalfThere, number: int, x: Tensor, route: Route, stand_in: Tensor | None, there: set[int]
) -> Tensor:
    """Pair by pair; what is not there gives its stand-in, or nothing."""
    total = torch.zeros(ROWS, H)
    for row in range(ROWS):
        for expert, gate in sorted(zip(route.experts[row].tolist(), route.gates[row], strict=True), key=lambda p: p[0]):
            if expert in there:
                out = expert_ffn(x[row : row + 1], source.weights[number][expert])[0]
            else:
                out = torch.zeros(H) if stand_in is None else stand_in[expert]
            total[row] += gate * out
    return total


def some_there() -> HalfThere:
    return HalfThere({ExpertId(3, 0), ExpertId(3, 1)})


def test_what_is_dropped_adds_nothing_and_is_not_leased() -> None:
    source, (x, route) = some_there(), routed()
    desk = started(plan(MissPolicy.DROP), source, NAMES, None)
    torch.testing.assert_close(run(desk, source, 1, x, route), by_hand(source, 1, x, route, None, {0, 1}))
    assert source.leased == [ExpertId(3, 0), ExpertId(3, 1)]
    assert desk.accounts.total == Substituted(uses=6, substituted=3)


def test_a_surrogate_is_the_default_vector_times_the_gate() -> None:
    source, (x, route), means = some_there(), routed(), defaults()
    desk = started(plan(MissPolicy.SURROGATE), source, NAMES, means)
    torch.testing.assert_close(run(desk, source, 1, x, route), by_hand(source, 1, x, route, means[1], {0, 1}))
    assert source.sent == [ExpertId(3, 2), ExpertId(3, 4)]  # the cache learns of them all the same
    assert source.ranks == {2: 1, 4: 0}  # 4 is the second choice of one row and the first of another


def test_ranks_may_differ() -> None:
    source, (x, route), means = HalfThere(), routed(), defaults()
    mixed = QualityPlan(((MissPolicy.WAIT, MissPolicy.SURROGATE),) * LAYERS)
    settled = started(mixed, source, NAMES, means).settle(NAMES[0], x, route)
    assert settled.stand_ins is not None and settled.stand_ins.pairs == (1, 3, 5)  # rank 1 of each row
    assert torch.equal(settled.stand_ins.vectors, means[0, [4, 2, 0]])


@pytest.mark.parametrize("policy", [MissPolicy.DROP, MissPolicy.SURROGATE, MissPolicy.PATCH])
def test_nothing_changes_where_everything_is_there(policy: MissPolicy) -> None:
    source, (x, route) = HalfThere({ExpertId(layer, e) for layer in NAMES for e in range(E)}), routed()
    desk = started(plan(policy), source, NAMES, defaults())
    settled = desk.settle(NAMES[2], x, route)
    assert settled.route is route and settled.stand_ins is None
    assert desk.mend(NAMES[3]) is None and desk.accounts.total == Substituted(uses=6)


def test_a_patch_makes_the_surrogate_good_when_its_expert_has_come() -> None:
    source, (x, route), means = some_there(), routed(), defaults()
    desk = started(plan(MissPolicy.PATCH), source, NAMES, means)
    now = run(desk, source, 1, x, route)
    assert desk.mend(NAMES[2]) is None
    source.there |= {ExpertId(3, 4)}
    first = desk.mend(NAMES[2])
    source.there |= {ExpertId(3, 2)}
    second = desk.mend(NAMES[3])
    assert first is not None and second is not None and desk.mend(NAMES[3]) is None
    torch.testing.assert_close(now + first + second, by_hand(source, 1, x, route, None, set(range(E))))
    assert desk.accounts.total == Substituted(uses=6, substituted=3, patched=3)


def test_a_patch_that_comes_too_late_is_left_out() -> None:
    source, (x, route) = some_there(), routed()
    late = QualityPlan(plan(MissPolicy.PATCH).policies, patch_layers=1)
    desk = started(late, source, NAMES, defaults())
    run(desk, source, 1, x, route)
    assert desk.mend(NAMES[3]) is None  # two layers later, and nothing has come
    source.there |= {ExpertId(3, 2), ExpertId(3, 4)}
    assert desk.mend(NAMES[3]) is None


def test_a_patch_does_not_outlive_its_token() -> None:
    source, (x, route) = some_there(), routed()
    desk = started(plan(MissPolicy.PATCH), source, NAMES, defaults())
    run(desk, source, 3, x, route)
    assert desk.begin(ANSWERS, decode=True)
    source.there |= {ExpertId(7, e) for e in range(E)}
    assert desk.mend(NAMES[0]) is None


class Said:
    def propose(self, number: int) -> Route | None:
        return Route(torch.tensor([[0, 3], [2, 4], [5, 3]]), torch.full((ROWS, K), 0.25)) if number else None

    def weigh(self, number: int, x: Tensor, experts: Tensor) -> Tensor:
        return experts.float() / 10


@pytest.mark.parametrize("policy", [MissPolicy.COMMIT, MissPolicy.COMMIT_TRUE])
def test_commit_runs_what_was_predicted(policy: MissPolicy) -> None:
    source, (x, route) = HalfThere(), routed()
    desk = started(plan(policy), source, NAMES, None, Said())
    assert desk.settle(NAMES[0], x, route).route is route  # layer 0 waits: nothing was predicted for it
    settled = desk.settle(NAMES[1], x, route)
    assert settled.route.experts.tolist() == [[0, 3], [2, 4], [5, 3]] and settled.stand_ins is None
    want = torch.full((ROWS, K), 0.25) if policy is MissPolicy.COMMIT else settled.route.experts / 10
    assert torch.equal(settled.route.gates, want)
    assert (
        desk.accounts.total.uses == 12 and desk.accounts.total.substituted == 3 + 2 - 2
    )  # 3, 5 and 3 are not what was routed to


def test_prompts_are_exact() -> None:
    desk = Substitutes(plan(MissPolicy.DROP), HalfThere(), NAMES, None)
    assert desk.begin(ANSWERS, decode=True) and not desk.begin(ANSWERS, decode=False)
    rehearsed = Substitutes(plan(MissPolicy.DROP), HalfThere(), NAMES, None, in_prompts=True)
    assert rehearsed.begin(ANSWERS, decode=False)


@dataclass
class Near:
    """Takes the first of what it is offered, and computes it."""

    source: HalfThere
    offered: list[int] = field(default_factory=list)
    experts: tuple[int, ...] = ()
    layer: int = 0
    held: int = 0

    def take(self, layer: int, experts: Sequence[int]) -> "Near":
        self.offered, self.experts, self.layer, self.held = list(experts), tuple(experts[:1]), layer, 1
        return self

    def compute(self, expert: int, x: Tensor) -> Tensor:
        return expert_ffn(x, self.source.weights[NAMES.index(self.layer)][expert])

    def let_go(self) -> None:
        self.held = 0


def test_who_is_computed_where_it_lies_is_not_leased_and_the_weakest_choices_are_offered_first() -> None:
    source, (x, route) = some_there(), routed()  # missing: 4 of row 0, 4 and 2 of row 1, none of row 2
    near = Near(source)
    desk = started(plan(MissPolicy.CPU), source, NAMES, None, nearby=near)
    settled = desk.settle(NAMES[1], x, route)
    assert near.offered == [2, 4] and near.held  # 2 is a second choice, 4 a first one
    assert sorted(settled.leased()) == [0, 1, 4]
    with source.lease(NAMES[1], settled.leased()) as lease:
        found = combine(run_experts(x, route, torch.arange(ROWS), lease, cell=1, nearby=settled.nearby), route)
    assert not near.held
    there = HalfThere(there={ExpertId(NAMES[1], expert) for expert in range(E)})
    assert torch.equal(found, run(started(plan(MissPolicy.DROP), there, NAMES, None), there, 1, x, route))
    assert desk.accounts.total == Substituted(uses=6, computed=1)


def test_a_pass_that_failed_lets_go_of_what_it_held() -> None:
    source, (x, route) = some_there(), routed()
    near = Near(source)
    desk = started(plan(MissPolicy.CPU), source, NAMES, None, nearby=near)
    desk.settle(NAMES[1], x, route)
    assert near.held
    desk.begin(ANSWERS, decode=True)
    assert not near.held


def test_impossible_policies_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="nobody computes experts"):
        Substitutes(plan(MissPolicy.CPU), HalfThere(), NAMES, None)
    with pytest.raises(ConfigError, match="default vectors"):
        Substitutes(plan(MissPolicy.PATCH), HalfThere(), NAMES, None)


def test_every_answer_has_its_own_account() -> None:
    source, (x, route) = some_there(), routed()  # missing: 4 of row 0, 4 and 2 of row 1, none of row 2
    desk = started(plan(MissPolicy.DROP), source, NAMES, None)
    run(desk, source, 1, x, route)
    assert desk.accounts.take(ANSWERS[0]) == Substituted(uses=4, substituted=1)
    assert desk.accounts.take(ANSWERS[1]) == Substituted(uses=2, substituted=2)
    assert desk.accounts.take(ANSWERS[1]) == Substituted()  # once
    assert desk.accounts.total == Substituted(uses=6, substituted=3)


def priced(per_token: float | None) -> Allowance:
    return Allowance(((0.1, 0.2),) * LAYERS, ((0.01, 0.02),) * LAYERS, per_token)


def test_a_layer_waits_when_the_allowance_is_spent() -> None:
    source, (x, route) = some_there(), routed()
    desk = started(plan(MissPolicy.DROP), source, NAMES, None, allowance=priced(0.2))  # 3 rows earn 0.6
    assert desk.settle(NAMES[1], x, route).stand_ins is not None  # ranks 1, 0 and 1 cost 0.5
    assert desk.settle(NAMES[1], x, route).stand_ins is None
    assert desk.accounts.total.substituted == 3 and desk.accounts.total.nats == pytest.approx(0.5)
    assert desk.begin(ANSWERS, decode=True)
    assert desk.settle(NAMES[1], x, route).stand_ins is not None


def test_without_a_bound_nothing_waits_and_the_cost_is_told() -> None:
    source, (x, route) = some_there(), routed()
    desk = started(plan(MissPolicy.DROP), source, NAMES, None, allowance=priced(None))
    for _ in range(50):
        assert desk.settle(NAMES[1], x, route).stand_ins is not None
    assert desk.accounts.total.nats == pytest.approx(25.0)


def test_what_a_patch_makes_good_is_refunded() -> None:
    source, (x, route) = some_there(), routed()
    desk = started(plan(MissPolicy.PATCH), source, NAMES, defaults(), allowance=priced(0.2))
    desk.settle(NAMES[1], x, route)
    source.there |= {ExpertId(3, 2), ExpertId(3, 4)}
    assert desk.mend(NAMES[2]) is not None
    assert desk.accounts.total.nats == pytest.approx(0.05)
    source.there -= {ExpertId(3, 2), ExpertId(3, 4)}
    assert desk.settle(NAMES[1], x, route).stand_ins is not None  # 0.1 was left, 0.45 came back


def test_what_is_not_spent_does_not_grow_without_end() -> None:
    purse = Purse(0.5)
    purse.earn(1000)
    assert not purse.spend(SAVED_TOKENS * 0.5 + 0.01) and purse.spend(SAVED_TOKENS * 0.5)
