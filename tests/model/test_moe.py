"""Routing, leases, combination and the shared expert."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from steerpipe.core.protocols import ExpertSource, ExpertWeights, Lease
from steerpipe.model.layers import MlpWeights, gated_mlp
from steerpipe.model.moe import (
    MoeWeights,
    Route,
    combine,
    pair_up,
    route_rows,
    run_experts,
    run_shared,
    worth_keeping,
)
from steerpipe.model.spec import MoeSpec
from steerpipe.store.resident import ResidentExperts
from tests.support.running import ShuffledExperts

H, E, WIDTH = 8, 5, 12


def spec_of(top_k: int, *, renormalise: bool) -> MoeSpec:
    return MoeSpec(E, top_k, WIDTH, renormalise)


def random_experts(seed: int = 0) -> list[ExpertWeights]:
    torch.manual_seed(seed)
    return [ExpertWeights(torch.randn(2 * WIDTH, H), torch.randn(H, WIDTH)) for _ in range(E)]


def run_layer(x: Tensor, route: Route, valid: Tensor, source: ExpertSource, layer: int, *, cell: int) -> Tensor:
    with source.lease(layer, list(pair_up(route))) as lease:
        return combine(run_experts(x, route, valid, lease, cell=cell), route)


@dataclass(slots=True)
class Watched:
    """Keeps what was leased."""

    resident: ResidentExperts
    leased: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @contextmanager
    def lease(self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None) -> Iterator[Lease]:
        self.leased.append((layer, tuple(sorted(routed))))
        with self.resident.lease(layer, routed, keep) as lease:
            yield lease


# --- routing


@pytest.mark.parametrize("top_k", [1, 2, E])
def test_a_row_goes_to_its_likeliest_experts_in_rank_order(top_k: int) -> None:
    x, router = torch.randn(16, H), torch.randn(E, H)
    route = route_rows(x, router, spec_of(top_k, renormalise=False), torch.arange(16), 16)
    probabilities = F.linear(x, router).softmax(-1)
    want = probabilities.sort(dim=-1, descending=True)
    assert torch.equal(route.experts, want.indices[:, :top_k])
    torch.testing.assert_close(route.gates, want.values[:, :top_k])


def test_gates_are_divided_by_their_sum_only_where_the_family_says_so() -> None:
    x, router = torch.randn(16, H), torch.randn(E, H)
    plain = route_rows(x, router, spec_of(2, renormalise=False), torch.arange(16), 16)
    divided = route_rows(x, router, spec_of(2, renormalise=True), torch.arange(16), 16)
    assert (plain.gates.sum(-1) < 0.999).any()
    torch.testing.assert_close(divided.gates.sum(-1), torch.ones(16))
    torch.testing.assert_close(divided.gates, plain.gates / plain.gates.sum(-1, keepdim=True))
    assert torch.equal(plain.experts, divided.experts)


def test_rows_of_bf16_are_routed_in_fp32() -> None:
    x, router = torch.randn(16, H).bfloat16(), torch.randn(E, H)
    route = route_rows(x, router, spec_of(E, renormalise=False), torch.arange(16), 16)
    assert route.gates.dtype is torch.float32
    want = F.linear(x.double(), router.double()).softmax(-1).gather(1, route.experts)
    torch.testing.assert_close(route.gates.double(), want, rtol=1e-5, atol=1e-7)


def test_only_valid_rows_are_routed_and_only_their_experts_are_leased() -> None:
    torch.manual_seed(3)
    x, router, source = torch.randn(16, H), torch.randn(E, H), Watched(ResidentExperts({7: random_experts()}))
    valid = torch.tensor([2, 5])
    route = route_rows(x, router, spec_of(1, renormalise=False), valid, 16)
    everyone = route_rows(x, router, spec_of(1, renormalise=False), torch.arange(16), 16)
    assert torch.equal(route.experts, everyone.experts[valid]) and torch.equal(route.gates, everyone.gates[valid])
    out = run_layer(x, route, valid, source, 7, cell=16)
    assert out.shape == (2, H)
    assert source.leased == [(7, tuple(sorted(set(route.experts.flatten().tolist()))))]


def test_every_routed_expert_is_leased_once_however_many_rows_want_it() -> None:
    source = Watched(ResidentExperts({0: random_experts()}))
    route = Route(torch.tensor([[3, 1]] * 40), torch.rand(40, 2))
    run_layer(torch.randn(48, H), route, torch.arange(40), source, 0, cell=16)
    assert source.leased == [(0, (1, 3))]


# --- computing and adding


def reference(x: Tensor, weights: ExpertWeights) -> Tensor:
    gate, up = F.linear(x, weights.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, weights.down)


def test_the_layer_is_the_sum_of_gate_times_expert() -> None:
    experts = random_experts()
    x, route = torch.randn(16, H), Route(torch.stack([torch.randperm(E)[:3] for _ in range(16)]), torch.rand(16, 3))
    got = run_layer(x, route, torch.arange(16), ResidentExperts({0: experts}), 0, cell=16)
    for row in range(16):
        want = sum(
            route.gates[row, rank] * reference(x[row : row + 1], experts[route.experts[row, rank]])[0]
            for rank in range(3)
        )
        torch.testing.assert_close(got[row], want, rtol=1e-4, atol=1e-4)


def test_an_expert_s_biases_are_added_where_it_has_them() -> None:
    own = random_experts()[0]
    bias, out_bias = torch.randn(2 * WIDTH), torch.randn(H)
    x = torch.randn(16, H)
    source = ResidentExperts({0: [ExpertWeights(own.gate_up, own.down, bias, out_bias)]})
    route = Route(torch.zeros(16, 1, dtype=torch.int64), torch.ones(16, 1))
    got = run_layer(x, route, torch.arange(16), source, 0, cell=16)
    gate, up = (F.linear(x, own.gate_up) + bias).chunk(2, dim=-1)
    torch.testing.assert_close(got, F.linear(F.silu(gate) * up, own.down) + out_bias, rtol=1e-4, atol=1e-4)


def test_experts_with_many_rows_and_with_one_give_the_bits_that_each_row_gets_alone() -> None:
    source = ResidentExperts({0: random_experts()})
    x, chosen = torch.randn(48, H), torch.tensor([[0, 1]] * 40 + [[0, 2]] * 5)
    route = Route(chosen, torch.rand(45, 2))
    got = run_layer(x, route, torch.arange(45), source, 0, cell=16)
    for row in (0, 15, 16, 33, 44):
        one = Route(chosen[row : row + 1], route.gates[row : row + 1])
        assert torch.equal(got[row], run_layer(x, one, torch.tensor([row]), source, 0, cell=16)[0])


def test_contributions_are_added_in_ascending_expert_order() -> None:
    """1e8 + 1 is 1e8 in fp32, so (1e8 + 1) - 1e8 is 0 and (-1e8 + 1e8) + 1 is 1."""
    value = {0: 1e8, 1: 1.0, 2: -1e8}
    for experts, gates in (([2, 0, 1], [1.0] * 3), ([1, 2, 0], [1.0] * 3), ([0, 1, 2], [1.0] * 3)):
        part = torch.tensor([[[value[e]] * 4 for e in experts]])  # [1, 3, 4] in rank order
        got = combine(part, Route(torch.tensor([experts]), torch.tensor([gates])))
        assert torch.equal(got, torch.zeros(1, 4)), experts


def test_contributions_in_bf16_are_added_in_fp32() -> None:
    part = torch.tensor([[[256.0], [1.0]]]).bfloat16()  # 257 is no bf16 number
    got = combine(part, Route(torch.tensor([[0, 1]]), torch.ones(1, 2)))
    assert got.dtype is torch.float32 and got.item() == 257.0


@pytest.mark.parametrize("cell", [1, 16])
def test_waves_in_any_order_give_the_same_bits(cell: int) -> None:
    experts = ResidentExperts({0: random_experts()})
    rows = 1 if cell == 1 else 32
    x, valid = torch.randn(rows, H), torch.arange(rows)
    route = route_rows(x, torch.randn(E, H), spec_of(3, renormalise=True), valid, cell)
    want = run_layer(x, route, valid, experts, 0, cell=cell)
    for seed in range(10):
        late = ShuffledExperts(experts, Random(seed), singly=seed % 2 == 0)
        assert torch.equal(run_layer(x, route, valid, late, 0, cell=cell), want)


def test_only_the_experts_of_the_last_rows_are_worth_keeping() -> None:
    route = Route(torch.tensor([[0, 1], [2, 3], [1, 4]]), torch.rand(3, 2))
    assert worth_keeping(route, 1) == {1, 4}
    assert worth_keeping(route, 2) == {1, 2, 3, 4}
    assert worth_keeping(route, 0) == set()
    assert worth_keeping(route, 3) is None and worth_keeping(route, 9) is None


# --- the shared expert


def test_the_shared_expert_stands_behind_a_sigmoid_of_its_own() -> None:
    x, mlp, switch = torch.randn(32, H), MlpWeights(torch.randn(2 * WIDTH, H), torch.randn(H, WIDTH)), torch.randn(1, H)
    got = run_shared(x, MoeWeights(torch.zeros(E, H), mlp, switch), 16)
    torch.testing.assert_close(got, (x @ switch.T).sigmoid() * gated_mlp(x, mlp), rtol=1e-4, atol=1e-4)
    half = run_shared(x, MoeWeights(torch.zeros(E, H), mlp, torch.zeros(1, H)), 16)
    torch.testing.assert_close(half, 0.5 * gated_mlp(x, mlp), rtol=1e-4, atol=1e-4)


def test_a_family_without_a_shared_expert_has_none_to_run() -> None:
    with pytest.raises(AssertionError, match="this family has no shared expert"):
        run_shared(torch.randn(16, H), MoeWeights(torch.zeros(E, H), None, None), 16)
