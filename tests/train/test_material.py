"""Material is what the model routed, in the order asked for; routers are the model's own."""

import numpy as np
import pytest
import torch

from steerpipe.core.errors import ConfigError, InputError
from steerpipe.predict.records import States
from steerpipe.trace.live import TokenSequence, trace_texts
from steerpipe.train.defaults import collect_defaults
from steerpipe.train.material import Material, collect
from steerpipe.train.models import check_routers, routers_of_model
from tests.integrations.models import VOCABULARY, tiny_model
from tests.predict.planted import VOCAB, by_token, model_trace, ruled_trace

LENGTHS = (5, 17, 8, 2, 30)


def sequences() -> list[TokenSequence]:
    draw = np.random.default_rng(0)
    return [TokenSequence(f"p{i}", draw.integers(3, VOCABULARY, n).tolist(), n) for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("max_tokens", [None, 10])
def test_collected_rows_are_the_traced_ones_in_the_given_order(max_tokens: int | None) -> None:
    model = tiny_model("qwen2_moe")
    packed = collect(model, sequences(), max_tokens=max_tokens, batch_tokens=64)
    assert packed.tokens.tolist() == [token for sequence in sequences() for token in sequence.tokens]
    assert packed.states is not None and packed.weights is not None
    row = 0
    for sequence in sequences():
        step = max_tokens or len(sequence.tokens)
        for start in range(0, len(sequence.tokens), step):
            piece = TokenSequence("alone", sequence.tokens[start : start + step], 0)
            (alone,) = trace_texts(model, [piece], states=True)
            end = row + len(piece.tokens)
            assert packed.place[row:end].tolist() == list(range(end - row))
            assert np.array_equal(packed.experts[row:end].numpy(), alone.experts)
            assert isinstance(alone.states, States)
            torch.testing.assert_close(packed.states.residual[row:end], alone.states.residual, rtol=0.02, atol=0.02)
            row = end
    assert row == packed.rows == int(sum(LENGTHS))


def test_openings_are_traced_but_not_kept() -> None:
    model = tiny_model("qwen2_moe")
    whole, cut = collect(model, sequences()), collect(model, sequences(), openings={"p1": 6})
    kept = torch.ones(whole.rows, dtype=torch.bool)
    kept[5:11] = False
    assert torch.equal(cut.tokens, whole.tokens[kept]) and torch.equal(cut.experts, whole.experts[kept])
    assert cut.place[5:7].tolist() == [0, 1]
    assert cut.states is not None and whole.states is not None
    assert torch.equal(cut.states.entering, whole.states.entering[kept])


def test_without_states_only_routing_is_collected() -> None:
    packed = collect(tiny_model("qwen2_moe"), sequences(), states=False)
    assert packed.states is None and packed.rows == sum(LENGTHS)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_routers_of_a_model_make_its_choices_again(family: str) -> None:
    model = tiny_model(family)
    routers = routers_of_model(model)
    agreement = check_routers(routers, collect(model, sequences()))
    assert agreement > 0.98  # states are kept in 16 bits


def test_routers_that_are_not_linear_are_refused() -> None:
    model = tiny_model("qwen2_moe")
    packed = collect(model, sequences())
    other = routers_of_model(tiny_model("qwen2_moe"))
    turned = type(other)(
        tuple(-weight for weight in other.weights), None, other.norms, other.input_norms, other.eps, other.top_k
    )
    with pytest.raises(ConfigError, match="makes only"):
        check_routers(turned, packed)


def test_default_vectors_are_mean_outputs_of_single_experts() -> None:
    model = tiny_model("qwen2_moe")
    packed = collect(model, sequences())
    routers = routers_of_model(model)
    made = collect_defaults(model, routers, packed)
    assert packed.states is not None
    layer = 1
    experts = [block for block in model.modules() if type(block).__name__.endswith("Experts")][layer]
    expert = int(packed.experts[0, layer, 0])
    rows = torch.nonzero((packed.experts[:, layer] == expert).any(1)).flatten()
    inputs = routers.normed(layer, packed.states.residual[rows, layer])
    gate_up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
    gate, up = (inputs @ gate_up.T).chunk(2, dim=-1)
    by_hand = ((torch.nn.functional.silu(gate) * up) @ down.T).mean(0)
    torch.testing.assert_close(made.vectors[layer, expert], by_hand, rtol=1e-3, atol=1e-4)
    assert int(made.counts.sum()) == packed.rows * packed.geometry.layers * packed.geometry.top_k
    unseen = torch.nonzero(made.counts[layer] == 0).flatten()
    used = made.counts[layer].float()[:, None]
    mean = (made.vectors[layer] * used).sum(0) / used.sum()
    for each in unseen.tolist():
        torch.testing.assert_close(made.vectors[layer, each], mean, rtol=1e-3, atol=1e-4)


def test_a_share_of_the_material_is_its_first_sequences() -> None:
    material = Material(model_trace(tokens=100), prompts=4, vocab=VOCAB)
    half = material.first(0.5)
    assert half.trace.rows == 50 and half.prompts == 2
    assert half.trace.states is not None and torch.equal(half.trace.tokens, material.trace.tokens[:50])
    with pytest.raises(ConfigError):
        material.first(0.0)


def test_kinds_that_need_states_say_so() -> None:
    material = Material(ruled_trace(by_token, tokens=50), prompts=2, vocab=VOCAB)
    with pytest.raises(InputError, match="learns from hidden states"):
        material.needed_routers("head")
    with pytest.raises(InputError, match="needs the model's experts"):
        material.needed_model("lookahead")
