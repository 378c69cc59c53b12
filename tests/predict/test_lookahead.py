"""The quasi state, against its formula worked out by hand and against a model in which it is exact."""

import torch

from steerpipe.predict.bounds import Oracle
from steerpipe.predict.calibration import margins
from steerpipe.predict.lookahead import DefaultVectors, RouterLookahead, quasi_state
from steerpipe.predict.sight import Decision, Sight, rows_for
from tests.predict.planted import GEOMETRY, model_trace, planted_defaults, planted_routers, recall


def test_the_quasi_state_is_residual_plus_shared_plus_gated_default_vectors() -> None:
    trace, defaults = model_trace(tokens=50), planted_defaults()
    assert trace.states is not None and trace.states.shared is not None and trace.weights is not None
    sight = Sight(trace, torch.tensor([7, 31]), Decision(target=3, horizon=2))
    said = quasi_state(sight, shared=True, defaults=defaults)
    for row, place in ((0, 7), (1, 31)):
        by_hand = trace.states.residual[place, 1] + trace.states.shared[place, 1]
        for rank in range(GEOMETRY.top_k):
            expert = int(trace.experts[place, 1, rank])
            by_hand = by_hand + float(trace.weights[place, 1, rank]) * defaults.vectors[1, expert]
        torch.testing.assert_close(said[row], by_hand)


def test_lookahead_is_right_where_the_quasi_state_is_exact() -> None:
    trace, routers, defaults = model_trace(), planted_routers(), planted_defaults()
    decision = Decision(target=2, horizon=1)
    sight = Sight(trace, rows_for(trace, decision), decision)

    def found(shared: bool, vectors: DefaultVectors | None) -> float:
        said = RouterLookahead(routers, shared=shared, defaults=vectors).probabilities(sight)
        return recall(said, sight.truth())

    assert found(True, defaults) > 0.995  # gates are stored in 16 bits
    assert found(False, defaults) < found(True, defaults)
    assert found(True, None) < found(True, defaults)
    assert found(False, None) < found(True, None)


def test_before_attention_the_router_is_applied_to_what_enters() -> None:
    trace, routers = model_trace(), planted_routers()  # whose attention adds nothing
    decision = Decision(target=0, horizon=0)
    sight = Sight(trace, rows_for(trace, decision), decision)
    assert recall(RouterLookahead(routers, shared=False).probabilities(sight), sight.truth()) == 1.0


def test_a_decision_in_the_token_before_sees_that_token() -> None:
    trace, routers = model_trace(tokens=50), planted_routers()
    assert trace.states is not None
    sight = Sight(trace, torch.tensor([8]), Decision(target=0, horizon=1))
    said = RouterLookahead(routers, shared=False).logits(sight)
    torch.testing.assert_close(said, routers.logits(0, routers.normed(0, trace.states.residual[7:8, 3])))


def test_an_expert_that_nobody_used_takes_its_layers_mean() -> None:
    sums = torch.tensor([[[2.0, 4.0], [0.0, 0.0], [6.0, 0.0]]])
    made = DefaultVectors.of_sums(sums, torch.tensor([[2, 0, 2]]))
    torch.testing.assert_close(made.vectors[0, 0], torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(made.vectors[0, 1], torch.tensor([2.0, 1.0]))  # of four tokens in all
    assert made.counts.tolist() == [[2, 0, 2]]


def test_margins_are_above_zero_for_exactly_k() -> None:
    logits = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    above = margins(logits, 3) > 0
    assert (above.sum(1) == 3).all()
    assert torch.equal(above.float(), torch.zeros(100, 8).scatter_(1, logits.topk(3).indices, 1.0))


def test_the_oracle_is_always_right() -> None:
    trace = model_trace(tokens=50)
    sight = Sight(trace, torch.arange(1, 50), Decision(target=0, horizon=0))
    assert torch.equal(Oracle().probabilities(sight), trace.routed(torch.arange(1, 50), 0))
