"""The reuse forecast learns what a stream of texts does."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe.core.errors import InputError
from steerpipe.predict.records import Geometry, PackedTrace, States
from steerpipe.predict.reuse import LiveReuse, ReuseConfig, ReuseForecast, normed
from steerpipe.store.policies import LEAST_COUNT, Lfru
from steerpipe.train.fit import Schedule
from steerpipe.train.reuse import gather_material, gather_states, tap_targets, train_reuse
from steerpipe.train.reuse_streams import FARTHEST_TOKENS, contexts, log_counts, next_use

LAYERS, EXPERTS, TOP_K, HIDDEN, TOKENS = 3, 8, 2, 6, 600
CONFIG = ReuseConfig(LAYERS, EXPERTS, HIDDEN, (0, 2), context_tokens=4.0, count_tokens=32.0, horizon_tokens=8.0)


def routing(seed: int = 0, tokens: int = TOKENS) -> Tensor:
    """[T, L, k] distinct experts."""
    random = np.random.default_rng(seed)
    chosen = random.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
    return torch.from_numpy(chosen.astype(np.int16))


def planted() -> PackedTrace:
    """The first half of the state says which half of the experts the next 20 tokens use; the rest is noise."""
    random = np.random.default_rng(1)
    topic = np.repeat(random.integers(0, 2, TOKENS // 20), 20)
    experts = routing().numpy() % (EXPERTS // 2)
    experts[..., 1] = (experts[..., 0] + 1) % (EXPERTS // 2)
    experts += (topic[:, None, None] * (EXPERTS // 2)).astype(np.int16)
    states = random.normal(0, 0.3, (TOKENS, LAYERS, HIDDEN)).astype(np.float32)
    states[:, :, 0] += 2 * topic[:, None] - 1
    residual = torch.from_numpy(states)
    place = torch.arange(TOKENS) % 100
    shape = Geometry(LAYERS, EXPERTS, TOP_K, HIDDEN)
    return PackedTrace(
        shape, torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS) // 100, place, torch.from_numpy(experts),
        None, States(residual, residual, None),
    )  # fmt: skip


def test_next_use_counts_tokens_to_the_next_one_that_uses_it() -> None:
    experts = routing()
    until = next_use(experts, EXPERTS)
    hot = torch.zeros(TOKENS, LAYERS * EXPERTS, dtype=torch.bool)
    numbers = experts.long() + torch.arange(LAYERS)[:, None] * EXPERTS
    hot.scatter_(1, numbers.flatten(1), True)
    for token in (0, 255, 256, 300, TOKENS - 2, TOKENS - 1):
        for expert in range(LAYERS * EXPERTS):
            later = torch.nonzero(hot[token + 1 :, expert]).flatten()
            expected = int(later[0]) + 1 if len(later) else FARTHEST_TOKENS
            assert min(int(until[token, expert]), 1000) == min(expected, 1000), (token, expert)


def test_log_counts_are_those_of_lfru() -> None:
    experts = routing()
    policy = Lfru(LAYERS * EXPERTS, 32.0)
    counts = log_counts(experts, EXPERTS, 32.0)
    for token, layers in enumerate(experts.tolist()):
        for layer, chosen in enumerate(layers):
            policy.touch_many([layer * EXPERTS + each for each in chosen], float(token))
        expected = np.log2(policy.counts(token) + LEAST_COUNT)
        assert counts[token].numpy() == pytest.approx(expected, abs=4e-3)  # fp16


def test_a_running_mean_begins_anew_with_each_text() -> None:
    residual, keeps = torch.randn(10, HIDDEN), 0.75
    place = torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2, 3])
    means = contexts(residual, place, keeps)
    expected = torch.zeros(HIDDEN)
    for row in range(10):
        fresh = (1 - keeps) * normed(residual[row])
        expected = fresh if place[row] == 0 else keeps * expected + fresh
        assert means[row].float().numpy() == pytest.approx(expected.numpy(), abs=3e-3)


def test_layers_up_to_the_tap_are_used_by_a_later_token_the_others_perhaps_by_this_one() -> None:
    trace = planted()
    material = gather_material(trace, CONFIG)
    row = torch.tensor([50])
    wanted, past = tap_targets(material, CONFIG, 0, row)
    used = int(trace.experts[50, 2, 0]) + 2 * EXPERTS  # by this token, two layers after the tap
    assert float(wanted[0, used]) == pytest.approx(math.exp(-(2 / 3) / 8.0))
    assert float(past[0, used]) == float(material.counts[49, used])
    behind = int(trace.experts[50, 0, 0])
    away = int(material.until[50, behind])
    assert float(wanted[0, behind]) == pytest.approx(math.exp(-away / 8.0))
    assert float(past[0, behind]) == float(material.counts[50, behind])


@pytest.fixture(scope="module")
def trained() -> ReuseForecast:
    return train_reuse(gather_material(planted(), CONFIG), CONFIG, Schedule(150, 128, 0.02), rank=4)


def test_it_learns_which_experts_a_state_announces(trained: ReuseForecast) -> None:
    live = LiveReuse(trained)
    topic = torch.zeros(1, HIDDEN)
    for sign, half in ((-1.0, 0), (1.0, 1)):
        live.restart()
        topic[0, 0] = sign
        scores = live.at(2, topic)
        assert scores is not None
        halves = scores.view(LAYERS, 2, EXPERTS // 2).mean((0, 2))
        assert halves[half] > halves[1 - half] + 2


def test_the_same_seed_gives_the_same_forecast() -> None:
    material = gather_material(planted(), CONFIG)
    one, other = (train_reuse(material, CONFIG, Schedule(5, 64, 0.02), rank=2) for _ in range(2))
    assert torch.equal(one.expand, other.expand)
    assert one.history == other.history


def test_a_history_that_is_given_is_not_learnt() -> None:
    material = gather_material(planted(), CONFIG)
    made = train_reuse(material, CONFIG, Schedule(5, 64, 0.02), rank=2, shared=False, history=0.5)
    assert made.history == pytest.approx(0.5)
    assert made.expand.shape == (2, 2, LAYERS * EXPERTS)


def test_live_scores_are_those_of_the_trace(trained: ReuseForecast) -> None:
    trace = planted()
    assert trace.states is not None
    states, means = gather_states(trace, CONFIG)
    live = LiveReuse(trained)
    for row in range(3):
        for tap, layer in enumerate(CONFIG.taps):
            said = live.at(layer, trace.states.residual[row : row + 1, layer])
            inputs = torch.cat([normed(states[layer][row]), normed(means[layer][row])])[None]
            assert said is not None
            assert said.numpy() == pytest.approx(trained.scores(tap, inputs)[0].numpy(), abs=0.05)  # means are fp16
        assert live.at(1, trace.states.residual[row : row + 1, 1]) is None


def test_a_trace_without_states_is_refused() -> None:
    trace = planted()
    bare = PackedTrace(trace.geometry, trace.tokens, trace.sequence, trace.place, trace.experts, None, None)
    with pytest.raises(InputError, match="hidden states"):
        gather_material(bare, CONFIG)
