"""Every trainer learns, is repeatable, and knows nothing of shuffled labels."""

import pytest
import torch
from torch import nn

from steerpipe.arena.evaluation import evaluate
from steerpipe.core.errors import ConfigError
from steerpipe.predict.estimator import Estimator
from steerpipe.predict.head import ResidualHead
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.preattention import Architecture, PreAttentionNetwork
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.sight import Decision, Sight, rows_for
from steerpipe.predict.storage import Storage, in_four_bits, restored, stored
from steerpipe.predict.stored import StoredPredictor
from steerpipe.train.blending import train_blend
from steerpipe.train.catalogue import TRAINERS, Options, train
from steerpipe.train.counts import count_frequency, count_previous
from steerpipe.train.drift import drifting_layers, recall_by_layer
from steerpipe.train.fit import Schedule, batches_of, drawn_pools, fit
from steerpipe.train.logistic import logistic_line
from steerpipe.train.losses import divergence_loss, margin_loss, ranking_loss, weighted_loss
from steerpipe.train.material import Material
from steerpipe.train.networks import fit_network
from steerpipe.train.recipes import make_hybrid, train_estimator, train_head, train_lookahead, train_preattention
from steerpipe.train.reuse_recipe import evenly
from steerpipe.train.rounding import _Rounded, settle
from steerpipe.train.shrink import shrink
from tests.predict.planted import GEOMETRY, VOCAB, model_trace, planted_defaults, planted_routers, recall

CHANCE = GEOMETRY.top_k / GEOMETRY.experts


def material(tokens: int = 3000, seed: int = 5, memory: float = 0.0) -> Material:
    trace = model_trace(tokens=tokens, seed=seed, memory=memory)
    return Material(trace, prompts=tokens // 25, vocab=VOCAB, routers=planted_routers())


def recall_of(predictor: StoredPredictor, trace: PackedTrace, target: int, horizon: int) -> float:
    decision = Decision(target, horizon)
    sight = Sight(trace, rows_for(trace, decision), decision)
    return recall(predictor.probabilities(sight), sight.truth())


@pytest.mark.parametrize("architecture", list(Architecture))
@pytest.mark.parametrize("loss", [weighted_loss, ranking_loss])
def test_preattention_learns_the_router_from_what_enters(architecture: Architecture, loss) -> None:  # type: ignore[no-untyped-def]
    schedule = Schedule(200, 256, 5e-3)
    made = train_preattention(material(), schedule, architecture=architecture, width=64, loss=loss)
    assert recall_of(made, model_trace(tokens=500, seed=9), 1, 0) > 0.75  # chance: .25


def test_batch_normalisation_is_torchs() -> None:
    network = PreAttentionNetwork(planted_routers(), architecture=Architecture.BATCHNORM, width=12).train()
    theirs = nn.BatchNorm1d(12)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        hidden = 2 + 3 * torch.randn(1, 50, 12, generator=draw)
        torch.testing.assert_close(network._normalised(hidden, slice(1, 2))[0], theirs(hidden[0]))
    network.eval(), theirs.eval()
    hidden = torch.randn(1, 5, 12, generator=draw)
    torch.testing.assert_close(network._normalised(hidden, slice(1, 2))[0], theirs(hidden[0]))


def test_the_estimator_learns_and_the_hybrid_takes_it_where_it_is_better() -> None:
    source, test = material(memory=0.7), model_trace(tokens=800, seed=9, memory=0.7)
    made = train_estimator(source, 1, Schedule(300, 256, 5e-3), width=64, defaults=planted_defaults())
    assert isinstance(made, Estimator) and recall_of(made, test, 2, 1) > 2 * CHANCE
    hybrid = make_hybrid(made, source)
    looked = RouterLookahead(made.routers, shared=True, defaults=planted_defaults())
    assert hybrid.drifting == drifting_layers(made, looked, source.trace)
    estimated, by_router = recall_by_layer(made, test, 1), recall_by_layer(looked, test, 1)
    for layer, ours in enumerate(recall_by_layer(hybrid, test, 1)):
        assert ours == (estimated if layer in hybrid.drifting else by_router)[layer]


def test_calibration_makes_lookahead_say_what_happens() -> None:
    source = material(memory=0.7)
    made = train_lookahead(source, defaults=planted_defaults(), shared=True, horizons=(1,))
    plain = RouterLookahead(source.needed_routers("x"), shared=True, defaults=planted_defaults(), horizons=(1,))
    decision = Decision(2, 1)
    sight = Sight(source.trace, rows_for(source.trace, decision), decision)

    def surprise(predictor: StoredPredictor) -> float:
        said = predictor.probabilities(sight).clamp(1e-6, 1 - 1e-6)
        return float(nn.functional.binary_cross_entropy(said, sight.truth()))

    assert surprise(made) < surprise(plain)
    assert recall_of(made, source.trace, 2, 1) == recall_of(plain, source.trace, 2, 1)  # the order stays


def test_a_blend_is_no_worse_than_its_parts() -> None:
    source, test = material(memory=0.7), model_trace(tokens=800, seed=9, memory=0.7)
    parts = [
        RouterLookahead(source.needed_routers("x"), shared=True),
        count_previous(source.trace),
        count_frequency(source.trace),
    ]
    blend = train_blend(parts, source.trace, 1)
    for target in range(1, GEOMETRY.layers):
        best = max(recall_of(part, test, target, 1) for part in parts)
        assert recall_of(blend, test, target, 1) > best - 0.02
    said = blend.probabilities(Sight(test, torch.arange(1, 500), Decision(2, 1)))
    assert abs(float(said.sum(1).mean()) - GEOMETRY.top_k) < 0.2


def test_parts_of_another_horizon_cannot_be_blended() -> None:
    source = material(tokens=100)
    late = RouterLookahead(source.needed_routers("x"), shared=True, horizons=(2,))
    with pytest.raises(ConfigError, match="cannot be blended at horizon 1"):
        train_blend([late], source.trace, 1)


def test_shuffled_routers_leave_a_head_at_chance() -> None:
    """Labels of other tokens: whatever it learns, held-out tokens are guessed as well as by drawing."""
    source = material(tokens=2000)
    states = source.trace.states
    assert states is not None
    order = torch.randperm(source.trace.rows, generator=torch.Generator().manual_seed(0))
    mixed = type(states)(states.entering[order], states.residual, states.shared)
    trace = PackedTrace(
        source.trace.geometry, source.trace.tokens, source.trace.sequence, source.trace.place, source.trace.experts,
        source.trace.weights, mixed,
    )  # fmt: skip
    shuffled = Material(trace, 80, VOCAB, source.routers)
    made = train_preattention(shuffled, Schedule(100, 256, 5e-3), architecture=Architecture.SILU, width=32)
    assert abs(recall_of(made, model_trace(tokens=800, seed=9), 1, 0) - CHANCE) < 0.08


@pytest.mark.parametrize("loss", [margin_loss, divergence_loss, weighted_loss, ranking_loss])
def test_losses_are_least_at_the_truth(loss) -> None:  # type: ignore[no-untyped-def]
    true = 3 * torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0))
    sharp = true * 5 if loss in (weighted_loss, ranking_loss) else true  # they want certainty, not the distribution
    at_truth = loss(sharp - sharp.topk(3).values[..., 1:].mean(-1, keepdim=True), true, 2)
    for seed in range(5):
        other = true + torch.randn(true.shape, generator=torch.Generator().manual_seed(seed + 1)) * 3
        assert loss(other, true, 2) > at_truth


def test_every_row_comes_once_before_any_comes_again() -> None:
    rows = torch.arange(100, 137)
    schedule = Schedule(steps=20, rows=9, learning_rate=1e-3, seed=4)
    seen = [batch[0] for batch in batches_of(rows, schedule, lambda drawn: (drawn,), axis=0)]
    assert len(seen) == 20 and all(len(batch) == 9 for batch in seen)
    for first in range(0, 20, 4):  # 4 x 9 of 37 rows make a round
        assert len(set(torch.cat(seen[first : first + 4]).tolist())) == 36
    again = [batch[0] for batch in batches_of(rows, schedule, lambda drawn: (drawn,), axis=0)]
    assert all(torch.equal(one, two) for one, two in zip(seen, again, strict=True))
    assert not torch.equal(next(drawn_pools(rows, 9, seed=5)), next(drawn_pools(rows, 9, seed=4)))


def test_fit_finds_a_mean() -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(0)) + 3
    found = nn.Parameter(torch.zeros(()))
    told: list[tuple[str, int, int]] = []
    schedule = Schedule(300, 100, 0.1, weight_decay=0.0)
    fit([found], lambda rows: (values[rows] - found).pow(2).mean(), torch.arange(200), schedule, what="mean",
        progress=lambda *said: told.append(said))  # fmt: skip
    assert abs(float(found.detach()) - float(values.mean())) < 0.05
    assert told[-1] == ("mean", 300, 300)


def test_schedules_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError):
        Schedule(0, 10, 0.1)


NEED_MODEL = {"lookahead", "estimator", "hybrid"}  # default vectors: tested with a model in test_material and the CLI


@pytest.mark.parametrize("name", [name for name in TRAINERS if name not in NEED_MODEL])
def test_every_name_trains(name: str) -> None:
    source = material(tokens=200)
    parts = (count_frequency(source.trace), count_previous(source.trace))
    options = Options(horizon=0 if "pre" in name and name != "previous" else 1, steps=3, rows=32, rank=4, parts=parts)
    made = train(name, source, options, "planted")
    assert made.training is not None and made.training.tokens == 200 and made.training.model == "planted"
    assert recall_of(made, source.trace, 2, made.horizons[0] if name != "transition" else 1) >= 0


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no predictor called 'oracle'") as caught:
        train("oracle", material(tokens=50), Options(), "planted")
    assert "transformer" in caught.value.fix


def test_a_shrunk_head_keeps_what_matters() -> None:
    source = material(tokens=4000, memory=0.7)
    wide = train_head(source, 1, Schedule(200, 256, 1e-2), rank=24)
    test = model_trace(tokens=800, seed=9, memory=0.7)

    def found(rank: int) -> float:
        network = shrink(wide, source.trace, rank, rows=2000)
        return recall_of(ResidualHead(network, wide.routers, 1, wide.calibration), test, 2, 1)

    whole = recall_of(wide, test, 2, 1)
    assert abs(found(24) - whole) < 0.01  # every unit: nothing is lost
    assert found(2) < found(12) < whole + 0.01
    with pytest.raises(ConfigError, match="cannot be shrunk to 25"):
        shrink(wide, source.trace, 25)


def test_a_head_that_was_settled_is_a_plain_head_again() -> None:
    source = material(tokens=4000, memory=0.7)
    head = train_head(source, 1, Schedule(150, 256, 1e-2), rank=8)
    before = head.network.down.detach().clone()
    settle(head, source, Schedule(20, 256, 1e-3))
    assert type(head.network.down) is nn.Parameter and not head.network.down.requires_grad
    assert not torch.equal(head.network.down, before)
    assert set(head.tensors()) >= {"network.down", "network.up"}


def test_rounding_is_what_the_file_keeps_and_lets_gradients_through() -> None:
    numbers = torch.randn(3, 5, 444, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rounded = _Rounded()(numbers)
    kept = restored(stored({"x": numbers}, Storage.INT4))["x"]
    assert torch.allclose(rounded, kept, atol=1e-6) and not torch.allclose(rounded, numbers, atol=1e-2)
    rounded.sum().backward()
    assert numbers.grad is not None and torch.equal(numbers.grad, torch.ones_like(numbers))
    assert torch.equal(in_four_bits(torch.ones(3, 8)), torch.ones(3, 8))  # narrow: kept in 8 bits


def test_taps_end_at_the_last_layer_whatever_their_number() -> None:
    assert evenly(24) == (5, 11, 17, 23) and evenly(3) == (0, 1, 2) and evenly(1) == (0,) and evenly(6) == (0, 2, 3, 5)


def test_the_logistic_line_is_found_from_far_away() -> None:
    draw = torch.Generator().manual_seed(0)
    x = 0.3 * torch.randn(200, 60, generator=draw) - 0.5
    for scale, bias in ((9.0, -1.5), (0.4, 2.0), (30.0, 6.0)):
        y = (torch.rand(x.shape, generator=draw) < torch.sigmoid(scale * x + bias)).float()
        found = logistic_line(x, y)
        assert abs(float(found[0]) / scale - 1) < 0.2 and abs(float(found[1]) - bias) < 0.6
    certain = logistic_line(x, (x > 0).float())
    assert torch.isfinite(certain).all() and certain[0] > 10


def test_calibrated_probabilities_come_true() -> None:
    source, test = material(memory=0.7), model_trace(tokens=2000, seed=9, memory=0.7)
    made = train_head(source, 1, Schedule(100, 256, 1e-2), rank=8)
    score = evaluate(made, test, 1)
    assert score.overall().calibration_error_chosen < 0.06
    assert score.overall().calibration_error < 0.03


def test_fixed_parameters_stay() -> None:
    source = material(tokens=300)
    head = train_head(source, 1, Schedule(5, 64, 1e-2), rank=4)
    before = {name: value.clone() for name, value in head.network.named_parameters()}
    routers = source.needed_routers("head")
    fit_network(head.network, source.trace, routers, 1, margin_loss, Schedule(5, 64, 1e-2), fixed={"down"})
    after = dict(head.network.named_parameters())
    assert torch.equal(after["down"], before["down"]) and not torch.equal(after["up"], before["up"])
