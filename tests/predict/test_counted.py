"""What is counted finds the rule that was planted for it, and knows nothing of other rules."""

import pytest
import torch

from steerpipe.predict.records import PackedTrace
from steerpipe.predict.sight import Decision, Sight, rows_for
from steerpipe.predict.stored import StoredPredictor
from steerpipe.train.counts import count_affinity, count_frequency, count_previous, count_transition
from tests.predict.planted import (
    GEOMETRY,
    VOCAB,
    by_layer_before,
    by_token,
    by_token_before,
    recall,
    ruled_trace,
)

CHANCE = GEOMETRY.top_k / GEOMETRY.experts


def recall_at(predictor: StoredPredictor, trace: PackedTrace, target: int, horizon: int) -> float:
    decision = Decision(target, horizon)
    sight = Sight(trace, rows_for(trace, decision), decision)
    return recall(predictor.probabilities(sight), sight.truth())


def test_frequency_tells_how_often_each_expert_is_used() -> None:
    trace = ruled_trace(lambda ids, place, free: free.clamp_max(3))
    counted = count_frequency(trace)
    shares = trace.routed(torch.arange(trace.rows), 1).mean(0)
    said = counted.probabilities(Sight(trace, torch.tensor([4, 5]), Decision(1, 0)))
    torch.testing.assert_close(said, shares.expand(2, -1))


def test_previous_token_finds_experts_that_stay() -> None:
    train, test = ruled_trace(by_token_before), ruled_trace(by_token_before, seed=8)
    counted = count_previous(train)
    first = 1 / 25  # of the tokens have none before them
    assert recall_at(counted, test, 2, 1) > 1 - first
    assert recall_at(counted, test, 0, 1) > 1 - first  # decided in the token before
    assert recall_at(counted, ruled_trace(lambda i, p, free: free, seed=9), 2, 1) < CHANCE + 0.05


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_transition_finds_what_follows_from_the_decision_layer(horizon: int) -> None:
    train, test = ruled_trace(by_layer_before), ruled_trace(by_layer_before, seed=8)
    counted = count_transition(train)
    assert recall_at(counted, test, 3, horizon) == 1.0
    assert recall_at(counted, test, 0, horizon) < CHANCE + 0.05  # the next token is drawn anew


def test_affinity_finds_what_follows_from_the_token() -> None:
    train, test = ruled_trace(by_token), ruled_trace(by_token, seed=8)
    counted = count_affinity(train, VOCAB)
    assert recall_at(counted, test, 2, 1) == 1.0
    assert recall_at(counted, test, 0, 1) < CHANCE + 0.06  # the token is not known yet
    only_first = count_affinity(train, VOCAB, own_layers=1)
    assert recall_at(only_first, test, 0, 0) == 1.0
    assert recall_at(only_first, test, 2, 1) < CHANCE + 0.06


def test_affinity_from_the_token_before() -> None:
    """Tokens that count upwards say what follows them."""

    def trace(seed: int) -> PackedTrace:
        drawn = ruled_trace(lambda ids, place, free: place[:, None].expand(free.shape), seed=seed)
        return PackedTrace(drawn.geometry, drawn.place % VOCAB, drawn.sequence, drawn.place, drawn.experts, None, None)

    counted = count_affinity(trace(1), VOCAB)
    assert recall_at(counted, trace(2), 0, 1) == 1.0
