"""Sequences in padded batches are routed as each of them alone, and come back whole."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from steerpipe.core.errors import ConfigError, InputError
from steerpipe.predict.records import Geometry, pack_traces
from steerpipe.trace.live import TokenSequence, batches, read_geometry, trace_texts, windows
from steerpipe.trace.tracker import MoERouterTracker
from tests.integrations.models import VOCABULARY, tiny_model

LENGTHS = (3, 17, 8, 1, 30)


def sequences() -> list[TokenSequence]:
    draw = np.random.default_rng(0)
    return [TokenSequence(f"p{i}", draw.integers(3, VOCABULARY, n).tolist(), n - 1) for i, n in enumerate(LENGTHS)]


def alone(model: PreTrainedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    with MoERouterTracker(model) as tracker, torch.no_grad():
        model(torch.tensor([tokens]))
        (found,) = tracker.take()
    return found.experts, found.weights


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v2", "jamba", "qwen3_next"])
def test_a_batch_routes_each_sequence_as_it_is_routed_alone(family: str) -> None:
    model = tiny_model(family)
    found = {each.prompt: each for each in trace_texts(model, sequences(), batch_tokens=64)}
    assert len(found) == len(LENGTHS)
    for sequence in sequences():
        traced = found[sequence.prompt]
        experts, weights = alone(model, list(sequence.tokens))
        assert traced.tokens.tolist() == list(sequence.tokens) and traced.tokens.dtype == np.int32
        assert traced.prompt_tokens == sequence.prompt_tokens
        assert np.array_equal(traced.experts, experts.numpy()) and traced.experts.dtype == np.uint8
        assert traced.weights is not None
        np.testing.assert_allclose(traced.weights, weights.numpy(), rtol=2e-3, atol=1e-4)


def test_states_are_those_of_the_sequence_alone() -> None:
    model = tiny_model("qwen2_moe")
    together = {s.prompt: s for s in trace_texts(model, sequences(), states=True, state_dtype=torch.float32)}
    for sequence in sequences():
        (single,) = trace_texts(model, [sequence], states=True, state_dtype=torch.float32)
        ours, theirs = together[sequence.prompt].states, single.states
        assert ours is not None and theirs is not None and ours.shared is not None and theirs.shared is not None
        assert ours.entering.shape == (len(sequence.tokens), 2, 32)
        torch.testing.assert_close(ours.entering, theirs.entering)
        torch.testing.assert_close(ours.residual, theirs.residual)
        torch.testing.assert_close(ours.shared, theirs.shared)


def test_what_is_traced_can_be_packed_and_trained_on() -> None:
    model = tiny_model("qwen2_moe")
    packed = pack_traces(trace_texts(model, sequences(), states=True), read_geometry(model))
    assert packed.rows == sum(LENGTHS) and packed.states is not None and packed.weights is not None
    assert packed.states.residual.dtype == torch.bfloat16 and not packed.states.residual.is_inference()
    assert packed.geometry == Geometry(layers=2, experts=8, top_k=3, hidden=32)


def test_long_sequences_are_cut_into_windows_under_one_name() -> None:
    sequence = TokenSequence("long", list(range(10)), 6)
    cut = list(windows([sequence], 4))
    assert [(each.prompt, list(each.tokens), each.prompt_tokens) for each in cut] == [
        ("long", [0, 1, 2, 3], 4), ("long", [4, 5, 6, 7], 2), ("long", [8, 9], 0),
    ]  # fmt: skip
    assert list(windows([sequence], None)) == [sequence]


def test_a_batch_has_no_more_rows_than_asked_for_unless_one_sequence_has() -> None:
    formed = list(batches(sequences(), 20))
    padded = [len(batch) * max(len(each.tokens) for each in batch) for batch in formed]
    assert padded == [30, 17, 16, 1]
    assert sorted(each.prompt for batch in formed for each in batch) == [f"p{i}" for i in range(len(LENGTHS))]


def test_a_model_in_training_mode_and_an_empty_prompt_are_refused() -> None:
    model = tiny_model("mixtral")
    with pytest.raises(InputError, match="empty has no tokens"):
        list(trace_texts(model, [TokenSequence("empty", [], 0)]))
    with pytest.raises(ConfigError, match="training mode"):
        list(trace_texts(model.train(), sequences()))
