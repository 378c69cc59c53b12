"""A horizon is what exists at the decision, offline and live."""

import numpy as np
import pytest
import torch

from steerpipe.core.errors import PeekError
from steerpipe.core.ids import SequenceId
from steerpipe.predict.live import LiveSight, Memory
from steerpipe.predict.records import Geometry, PackedTrace, States, TracedSequence, pack_traces
from steerpipe.predict.sight import Decision, Sight, rows_for

SHAPE = Geometry(layers=4, experts=6, top_k=2, hidden=3)


def traced(name: str, tokens: int, seed: int) -> TracedSequence:
    random = np.random.default_rng(seed)
    experts = np.stack([random.permutation(6)[:2] for _ in range(tokens * 4)]).reshape(tokens, 4, 2)
    states = [torch.from_numpy(random.normal(size=(tokens, 4, 3)).astype(np.float32)) for _ in range(3)]
    weights = random.random((tokens, 4, 2)).astype(np.float16)
    ids = random.integers(1, 90, tokens).astype(np.int32)
    return TracedSequence(name, ids, 1, experts.astype(np.uint8), weights, States(*states))


def packed() -> PackedTrace:
    return pack_traces([traced("a", 5, 0), traced("b", 7, 1)], SHAPE)


def all_rows(trace: PackedTrace) -> torch.Tensor:
    return torch.arange(trace.rows)


@pytest.mark.parametrize("layer", [2, 3])
def test_one_ahead_of_layer_2_sees_layer_1_and_nothing_later(layer: int) -> None:
    sight = Sight(packed(), torch.arange(3), Decision(2, 1))
    assert sight.residual(1).shape == (3, 3) and sight.hot(1).sum() == 6 and sight.entering(1).shape == (3, 3)
    for ask in (sight.residual, sight.shared, sight.entering, sight.hot, sight.gates, sight.experts):
        with pytest.raises(PeekError, match=f"layer {layer} does not exist yet"):
            ask(layer)


def test_before_attention_sees_what_enters_the_layer_and_not_its_residual() -> None:
    sight = Sight(packed(), torch.arange(3), Decision(2, 0))
    assert sight.entering(2).shape == (3, 3) and sight.residual(1).shape == (3, 3)
    for ask in (sight.residual, sight.shared, sight.hot):
        with pytest.raises(PeekError):
            ask(2)
    with pytest.raises(PeekError):
        sight.entering(3)


def test_a_decision_beyond_the_first_layer_is_taken_in_the_token_before() -> None:
    trace = packed()
    decision = Decision(0, 1)
    rows = rows_for(trace, decision)
    assert rows.tolist() == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    sight = Sight(trace, rows, decision)
    assert sight.crosses and sight.layer == 3
    assert torch.equal(sight.tokens(), trace.tokens[rows - 1])
    assert trace.states is not None and torch.equal(sight.residual(3), trace.states.residual[rows - 1, 3])


def test_earlier_tokens_are_all_there_and_stop_at_the_beginning_of_the_sequence() -> None:
    trace = packed()
    sight = Sight(trace, all_rows(trace), Decision(1, 1))
    before = sight.hot(3, back=1)
    assert before[0].sum() == 0 and before[5].sum() == 0  # the first tokens of the two sequences
    assert torch.equal(before[6], trace.routed(torch.tensor([5]), 3)[0])
    assert sight.tokens(back=2)[6] == 0 and sight.tokens(back=2)[7] == trace.tokens[5]
    with pytest.raises(PeekError, match="ahead of the decision"):
        sight.tokens(back=-1)


def test_gates_lie_where_the_experts_are() -> None:
    trace = packed()
    gates = Sight(trace, torch.tensor([3]), Decision(2, 1)).gates(1)
    assert trace.weights is not None
    for rank in range(2):
        assert gates[0, trace.experts[3, 1, rank].long()] == trace.weights[3, 1, rank].float()
    assert (gates > 0).sum() == 2


def play(memory: Memory, trace: PackedTrace, rows: torch.Tensor, names: tuple[SequenceId, ...], layers: int) -> None:
    """One forward pass over `rows` of the trace, up to the router of layer `layers - 1`."""
    assert trace.states is not None and trace.weights is not None and trace.states.shared is not None
    step = memory.begin(names, trace.tokens[rows])
    for layer in range(layers):
        step.entering[layer] = trace.states.entering[rows, layer]
        step.residual[layer] = trace.states.residual[rows, layer]
        step.shared[layer] = trace.states.shared[rows, layer]
        step.experts[layer] = trace.experts[rows, layer].long()
        step.weights[layer] = trace.weights[rows, layer].float()


def test_a_live_sight_shows_what_a_recorded_one_shows() -> None:
    trace, memory = packed(), Memory(SHAPE)
    names = (SequenceId(7), SequenceId(9))
    for token in range(4):  # tokens 0 to 3 of both sequences, the last one only up to layer 2
        play(memory, trace, torch.tensor([token, 5 + token]), names, 4 if token < 3 else 2)
    live = LiveSight(memory, Decision(2, 1))
    recorded = Sight(trace, torch.tensor([3, 8]), Decision(2, 1))
    for back in (0, 1, 2, 3, 4):
        assert torch.equal(live.tokens(back), recorded.tokens(back))
        for layer in (0, 1) if back == 0 else (0, 1, 2, 3):
            assert torch.equal(live.hot(layer, back), recorded.hot(layer, back))
            assert torch.equal(live.gates(layer, back), recorded.gates(layer, back))
            for which in ("residual", "shared", "entering"):
                assert torch.equal(getattr(live, which)(layer, back), getattr(recorded, which)(layer, back))
    with pytest.raises(PeekError):
        live.residual(2)


def test_a_sequence_that_joins_has_no_past_and_one_that_stays_keeps_its_own() -> None:
    trace, memory = packed(), Memory(SHAPE)
    play(memory, trace, torch.tensor([0, 5]), (SequenceId(7), SequenceId(9)), 4)
    play(memory, trace, torch.tensor([6, 0]), (SequenceId(9), SequenceId(11)), 1)
    before = LiveSight(memory, Decision(1, 1)).hot(2, back=1)
    assert torch.equal(before[0], trace.routed(torch.tensor([5]), 2)[0])
    assert before[1].sum() == 0


def test_a_step_that_was_cut_short_is_not_a_token() -> None:
    trace, memory = packed(), Memory(SHAPE)
    names = (SequenceId(7),)
    play(memory, trace, torch.tensor([0]), names, 4)
    play(memory, trace, torch.tensor([1]), names, 2)  # failed in layer 2
    play(memory, trace, torch.tensor([1]), names, 2)
    assert torch.equal(LiveSight(memory, Decision(2, 1)).tokens(back=1), trace.tokens[:1])
