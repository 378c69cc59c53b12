"""A head starts as the router that it corrects, and learns what the router cannot see."""

import torch

from steerpipe.predict.calibration import uncalibrated
from steerpipe.predict.head import ALL_INPUTS, HeadNetwork, ResidualHead
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.sight import Decision, Sight, rows_for
from steerpipe.train.fit import Schedule
from steerpipe.train.material import Material
from steerpipe.train.recipes import train_head
from tests.predict.planted import GEOMETRY, VOCAB, model_trace, planted_routers, recall


def fresh_head(horizon: int, *, shared: bool = True) -> ResidualHead:
    routers = planted_routers()
    network = HeadNetwork(routers, rank=4, shared=shared, inputs=ALL_INPUTS)
    return ResidualHead(network, routers, horizon, uncalibrated(1, routers.layers))


def test_before_training_a_head_is_router_lookahead_to_the_bit() -> None:
    trace = model_trace(tokens=100, memory=0.7)
    for horizon in (0, 1, 2, 3):
        for shared in (True, False):
            lookahead = RouterLookahead(planted_routers(), shared=shared)
            for target in range(GEOMETRY.layers):
                decision = Decision(target, horizon)
                sight = Sight(trace, rows_for(trace, decision), decision)
                head = fresh_head(horizon, shared=shared)
                assert torch.equal(head.logits(sight), lookahead.logits(sight))
                assert torch.equal(head.probabilities(sight), lookahead.probabilities(sight))


def test_training_improves_on_the_router() -> None:
    trace, test = model_trace(tokens=6000, seed=5, memory=0.7), model_trace(tokens=1000, seed=6, memory=0.7)
    routers = planted_routers()
    material = Material(trace, prompts=240, vocab=VOCAB, routers=routers)
    head = train_head(material, 1, Schedule(300, 512, 1e-2), rank=16)
    lookahead = RouterLookahead(routers, shared=True)
    decision = Decision(target=2, horizon=1)
    sight = Sight(test, rows_for(test, decision), decision)
    before = recall(lookahead.probabilities(sight), sight.truth())
    after = recall(head.probabilities(sight), sight.truth())
    assert after > before + 0.1, f"{before:.3f} → {after:.3f}"


def test_the_same_seed_trains_the_same_head() -> None:
    trace = model_trace(tokens=300, memory=0.7)
    material = Material(trace, prompts=12, vocab=VOCAB, routers=planted_routers())
    one, two = (train_head(material, 2, Schedule(5, 64, 1e-2, seed=3), rank=4) for _ in range(2))
    assert all(torch.equal(value, two.tensors()[name]) for name, value in one.tensors().items())


def test_calibrated_probabilities_add_up_to_about_k() -> None:
    trace = model_trace(tokens=3000, memory=0.7)
    material = Material(trace, prompts=120, vocab=VOCAB, routers=planted_routers())
    head = train_head(material, 1, Schedule(60, 512, 1e-2), rank=8)
    decision = Decision(target=3, horizon=1)
    said = head.probabilities(Sight(trace, rows_for(trace, decision), decision))
    assert abs(float(said.sum(1).mean()) - GEOMETRY.top_k) < 0.15
