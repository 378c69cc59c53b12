"""Windows show the past and nothing else; the seed's networks learn a planted trajectory."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from steerpipe.core.errors import ConfigError
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.sight import Decision, Sight, rows_for
from steerpipe.predict.trajectory_networks import Architecture, ExpertTransformer, HistoryLstm, build, multiply_adds
from steerpipe.predict.window import Window, read_window
from steerpipe.train.fit import Schedule
from steerpipe.train.trajectories import train_trajectory
from tests.predict.planted import GEOMETRY, by_layer_before, by_token_before, recall, ruled_trace

CHANCE = GEOMETRY.top_k / GEOMETRY.experts


def sight_of(trace: PackedTrace, row: int, target: int, horizon: int) -> Sight:
    return Sight(trace, torch.tensor([row]), Decision(target, horizon))


def test_a_window_of_layers_ends_at_the_decision_and_is_zero_before_the_first() -> None:
    trace = ruled_trace(by_layer_before, tokens=50)
    said = read_window(sight_of(trace, 30, 3, 2), Window.LAYERS, steps=3)
    row = torch.tensor([30])
    expected = torch.stack([torch.zeros(1, 8), trace.routed(row, 0), trace.routed(row, 1)], dim=1)
    assert torch.equal(said, expected)
    assert torch.equal(read_window(sight_of(trace, 30, 3, 2), Window.LAYERS, 3, without={0})[:, 1], torch.zeros(1, 8))
    before = read_window(sight_of(trace, 30, 2, 0), Window.LAYERS, steps=1)  # pre-attention: layer 1 is the newest
    assert torch.equal(before[:, 0], trace.routed(row, 1))


def test_a_window_of_tokens_is_the_target_layer_of_tokens_before() -> None:
    trace = ruled_trace(by_layer_before, tokens=50)
    said = read_window(sight_of(trace, 27, 3, 2), Window.TOKENS, steps=3)  # the third token of its sequence
    assert torch.equal(said[:, 0], torch.zeros(1, 8))
    assert torch.equal(said[:, 1:], torch.stack([trace.routed(torch.tensor([row]), 3) for row in (25, 26)], dim=1))
    crossing = read_window(sight_of(trace, 28, 0, 1), Window.TOKENS, steps=1)  # decided in row 27
    assert torch.equal(crossing[:, 0], trace.routed(torch.tensor([27]), 0))


def test_both_windows_come_one_after_the_other() -> None:
    trace = ruled_trace(by_layer_before, tokens=50)
    sight = sight_of(trace, 40, 3, 1)
    parts = [read_window(sight, window, 2) for window in (Window.TOKENS, Window.LAYERS)]
    assert torch.equal(read_window(sight, Window.BOTH, 2), torch.cat(parts, dim=1))


def test_the_transformer_is_the_seeds() -> None:
    network = build(Architecture.TRANSFORMER, 60, 10)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    assert shapes["embedding.weight"] == (128, 60) and shapes["positions"] == (1, 50, 128)
    assert shapes["encoder.layers.1.linear1.weight"] == (512, 128) and shapes["out.weight"] == (60, 128)
    assert "encoder.layers.2.linear1.weight" not in shapes
    lstm = build(Architecture.LSTM, 60, 10).state_dict()
    assert lstm["lstm.weight_hh_l1"].shape == (4 * 256, 256) and "lstm.weight_hh_l2" not in lstm


def test_the_lstm_written_out_is_the_librarys() -> None:
    network = build(Architecture.LSTM, 60, 10)
    assert isinstance(network, HistoryLstm)
    history = torch.randint(0, 2, (5, 10, 60), generator=torch.Generator().manual_seed(0)).float()
    states, _ = network.lstm(history)
    assert torch.allclose(network(history), network.out(states[:, -1]), atol=1e-6)


def test_an_lstm_starts_at_the_rates_and_hears_its_inputs() -> None:
    torch.manual_seed(0)
    network = build(Architecture.LSTM, 8, 5)
    assert isinstance(network, HistoryLstm)
    rates = torch.tensor([0.5, 0.9, 0.02, 0.1, 0.1, 0.1, 0.2, 0.3])
    history = torch.randint(0, 2, (200, 5, 8)).float()
    deaf = network(history).std(0).mean()
    network.start_at(rates)
    said = network(history)
    assert torch.allclose(torch.sigmoid(said.mean(0)), rates, atol=0.05)
    assert said.std(0).mean() > 5 * deaf


def test_an_lstm_that_has_learnt_nothing_yet_says_the_rates_of_its_layer() -> None:
    trace, decision = ruled_trace(by_layer_before), Decision(3, 2)
    made = train_trajectory(trace, Architecture.LSTM, [decision], Schedule(2, 8, 1e-9), steps=2)
    sight = Sight(trace, rows_for(trace, decision), decision)
    assert torch.allclose(made.probabilities(sight).mean(0), sight.truth().mean(0), atol=0.05)


def test_computing_the_last_step_alone_changes_nothing() -> None:
    network = build(Architecture.TRANSFORMER, 60, 10).eval()
    assert isinstance(network, ExpertTransformer)
    history = (torch.rand(7, 20, 60, generator=torch.Generator().manual_seed(0)) < 0.07).float()
    plain = network.encoder(network.embedding(history) + network.positions[:, :20])[:, -1]
    torch.testing.assert_close(network(history), network.out(plain))
    assert not torch.equal(network.train()(history), network(history))  # dropout is on


def test_multiply_adds_of_the_transformer_are_those_of_its_products() -> None:
    """Counted by torch, twice: a multiply and an add."""
    network, history = build(Architecture.TRANSFORMER, 60, 10).eval(), torch.zeros(1, 10, 60)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(history)
    assert counter.get_total_flops() == 2 * multiply_adds(Architecture.TRANSFORMER, 60, 10)


def test_networks_that_learn_in_half_precision_are_kept_in_full() -> None:
    trace = ruled_trace(by_layer_before, tokens=2000)
    decisions = [Decision(2, 1), Decision(3, 1)]
    for several in (decisions[:1], decisions):
        made = train_trajectory(trace, Architecture.MLP, several, Schedule(150, 128, 3e-3, half=True), steps=2)
        assert {value.dtype for value in made.tensors().values()} == {torch.float32}
        for decision in several:
            sight = Sight(trace, rows_for(trace, decision), decision)
            assert recall(made.probabilities(sight), sight.truth()) > 0.9


@pytest.mark.parametrize("architecture", list(Architecture))
def test_each_network_learns_a_planted_trajectory(architecture: Architecture) -> None:
    train, test = ruled_trace(by_layer_before), ruled_trace(by_layer_before, seed=8)
    decision = Decision(3, 2)
    made = train_trajectory(train, architecture, [decision], Schedule(60, 128, 3e-3), steps=2)
    sight = Sight(test, rows_for(test, decision), decision)
    assert recall(made.probabilities(sight), sight.truth()) > 0.95


@pytest.mark.parametrize("architecture", list(Architecture))
def test_networks_of_many_layers_learn_together(architecture: Architecture) -> None:
    train, test = ruled_trace(by_layer_before), ruled_trace(by_layer_before, seed=8)
    decisions = [Decision(target, 1) for target in range(GEOMETRY.layers)]
    made = train_trajectory(train, architecture, decisions, Schedule(60, 128, 3e-3), steps=2)
    for decision in decisions:
        sight = Sight(test, rows_for(test, decision), decision)
        found = recall(made.probabilities(sight), sight.truth())
        assert found > 0.95 if decision.target else found < CHANCE + 0.06  # the next token is drawn anew


def test_a_rule_over_tokens_needs_the_window_of_tokens() -> None:
    train, test = ruled_trace(by_token_before), ruled_trace(by_token_before, seed=8)
    decision = Decision(3, 2)
    sight = Sight(test, rows_for(test, decision), decision)

    def found(window: Window) -> float:
        made = train_trajectory(train, Architecture.MLP, [decision], Schedule(60, 128, 3e-3), window=window, steps=2)
        return recall(made.probabilities(sight), sight.truth())

    assert found(Window.TOKENS) > 0.9 and found(Window.BOTH) > 0.9
    assert found(Window.LAYERS) < CHANCE + 0.15


def test_shuffled_labels_leave_chance() -> None:
    train = ruled_trace(by_layer_before)
    mixed = train.experts[torch.randperm(train.rows, generator=torch.Generator().manual_seed(0))]
    shuffled = PackedTrace(
        train.geometry, train.tokens, train.sequence, train.place,
        torch.cat([train.experts[:, :3], mixed[:, 3:]], dim=1), None, None,
    )  # fmt: skip
    decision = Decision(3, 2)
    made = train_trajectory(shuffled, Architecture.MLP, [decision], Schedule(60, 128, 3e-3), steps=2)
    test = ruled_trace(by_layer_before, seed=8)
    sight = Sight(test, rows_for(test, decision), decision)
    assert abs(recall(made.probabilities(sight), sight.truth()) - CHANCE) < 0.06


def test_a_decision_it_was_not_trained_for_is_refused() -> None:
    train = ruled_trace(by_layer_before, tokens=100)
    made = train_trajectory(train, Architecture.MLP, [Decision(3, 2)], Schedule(2, 16, 1e-3), steps=2)
    with pytest.raises(ConfigError, match="layer 2 at horizon 1"):
        made.probabilities(sight_of(train, 30, 2, 1))
