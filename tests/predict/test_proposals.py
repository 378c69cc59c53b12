"""A committed route is the target's router on the state of an earlier layer, known when that layer routes."""

import pytest
import torch
from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.proposals import CommittedRoutes
from tests.predict.planted import GEOMETRY, planted_routers

LAYERS = tuple(10 + 2 * number for number in range(GEOMETRY.layers))  # the decoder's numbers
ROWS = (SequenceId(1), SequenceId(2))


def residual(number: int) -> Tensor:
    return torch.randn(len(ROWS), GEOMETRY.hidden, generator=torch.Generator().manual_seed(number))


def probe(number: int) -> RouterProbe:
    experts = torch.arange(GEOMETRY.top_k).repeat(len(ROWS), 1)
    return RouterProbe(LAYERS[number], residual(number), experts, torch.ones(experts.shape), None)


def routes(sent: list[int], *, horizon: int = 2, renormalise: bool = False) -> CommittedRoutes:
    lookahead = RouterLookahead(planted_routers(), shared=False)
    return CommittedRoutes(
        dict.fromkeys(range(horizon, GEOMETRY.layers), lookahead), GEOMETRY, LAYERS,
        renormalise=renormalise, horizon=horizon, send=lambda layer, _: sent.append(layer),
    )  # fmt: skip


def begun(made: CommittedRoutes, upto: int) -> CommittedRoutes:
    assert made.begin(ROWS, torch.zeros(2), decode=True)
    for number in range(upto + 1):
        made.routed(probe(number))
    return made


@pytest.mark.parametrize("renormalise", [False, True])
def test_ids_and_weights_are_the_targets_router_on_the_state_two_layers_before(renormalise: bool) -> None:
    said = begun(routes([], renormalise=renormalise), upto=0).propose(2)
    assert said is not None
    routers = planted_routers()
    probabilities = routers.logits(2, routers.normed(2, residual(0))).softmax(-1)
    gates, experts = probabilities.topk(GEOMETRY.top_k)
    assert torch.equal(said.experts, experts)
    torch.testing.assert_close(said.gates, gates / gates.sum(-1, keepdim=True) if renormalise else gates)


def test_experts_are_sent_for_as_soon_as_they_are_said() -> None:
    sent: list[int] = []
    made = begun(routes(sent), upto=0)
    assert sent == [LAYERS[2]] and made.propose(1) is None and made.propose(3) is None


def test_true_weights_are_the_routers_own_of_the_named_experts() -> None:
    made, x = begun(routes([]), upto=0), residual(7)
    experts = torch.tensor([[1, 0], [3, 2]])
    own = planted_routers().logits(2, x).softmax(-1).gather(1, experts)
    torch.testing.assert_close(made.weigh(2, x, experts), own)


def test_what_was_said_is_of_one_token_and_of_decode_alone() -> None:
    made = begun(routes([]), upto=0)
    assert made.propose(2) is not None
    assert made.begin(ROWS, torch.zeros(2), decode=True) and made.propose(2) is None
    assert not made.begin(ROWS, torch.zeros(2), decode=False)
