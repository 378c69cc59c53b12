"""The tracker reports what the experts really received, and leaves no trace of itself in the model."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from steerpipe.core.errors import ConfigError, UnsupportedConfigError
from steerpipe.integrations.form import find_experts
from steerpipe.trace.seams import find_seams
from steerpipe.trace.tracker import MoERouterTracker, Pass
from tests.integrations.models import FAMILIES, logits, prompt, tiny_model

# The residual stream of these is not residual + block: another norm or factor comes after, or there is one MoE layer.
_OTHER_SUMS = ("flex_olmo", "minimax", "nemotron_h")
_WITHOUT_SHARED = (
    "qwen3_moe", "mixtral", "olmoe", "flex_olmo", "phimoe", "minimax", "gpt_oss", "granitemoe", "jamba", "lfm2_moe",
)  # fmt: skip


@pytest.fixture
def received() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """(ids, weights) of every call of an experts implementation of our own: what experts compute with."""
    calls: list[tuple[Tensor, Tensor]] = []

    def witness(module: nn.Module, hidden: Tensor, index: Tensor, gates: Tensor) -> Tensor:
        calls.append((index.clone(), gates.clone()))
        out: Tensor = ALL_EXPERTS_FUNCTIONS["batched_mm"](module, hidden, index, gates)
        return out

    ALL_EXPERTS_FUNCTIONS.register("witness", witness)
    yield calls
    del type(ALL_EXPERTS_FUNCTIONS)._global_mapping["witness"]


def traced(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Pass:
    with MoERouterTracker(model, **options) as tracker:
        logits(model, tokens)
        (found,) = tracker.take()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_weights_are_those_that_the_experts_received(
    family: str, received: list[tuple[Tensor, Tensor]]
) -> None:
    model = tiny_model(family)
    model.set_experts_implementation("witness")
    tokens = prompt(rows=3, length=11)
    found = traced(model, tokens)
    assert len(received) == found.experts.shape[1] == len(find_experts(model)) > 0
    for layer, (index, gates) in enumerate(received):
        assert torch.equal(found.experts[:, layer].long(), index.reshape(33, -1))
        assert torch.equal(found.weights[:, layer], gates.reshape(33, -1))
    assert len({tuple(row) for row in found.experts.flatten(1).tolist()}) > 10, "rows are routed differently"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in _OTHER_SUMS])
def test_states_and_experts_outputs_add_up_to_what_enters_the_next_layer(family: str) -> None:
    model = tiny_model(family)
    outputs: list[Tensor] = []
    for module in find_experts(model).values():
        module.register_forward_hook(lambda _module, _args, out: outputs.append(out.detach()))  # type: ignore[attr-defined]
    found = traced(model, prompt(), states=True)
    states = found.states
    assert states is not None
    assert (states.shared is None) == (family in _WITHOUT_SHARED)
    shared = states.shared[:, 0] if states.shared is not None else torch.zeros_like(states.residual[:, 0])
    assert states.residual[:, 0].std() > 0
    total = states.residual[:, 0] + outputs[0].reshape_as(shared) + shared
    torch.testing.assert_close(states.entering[:, 1], total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "gpt_oss", "lfm2_moe", "nemotron_h", "minimax"])
def test_the_norm_of_the_residual_is_what_the_block_is_given(family: str) -> None:
    model = tiny_model(family)
    given: list[Tensor] = []
    seam = find_seams(model)[-1]
    seam.block.register_forward_pre_hook(lambda _module, args: given.append(args[0].detach().flatten(0, 1)))
    found = traced(model, prompt(), states=True)
    assert found.states is not None
    names = ("post_attention_layernorm", "ffn_norm", "norm")
    norm = next(getattr(seam.layer, name) for name in names if hasattr(seam.layer, name))
    with torch.no_grad():
        assert torch.equal(norm(found.states.residual[:, -1]), given[0])
    assert not torch.equal(found.states.residual[:, -1], given[0])


def test_without_a_norm_in_front_the_residual_is_the_input_of_the_block() -> None:
    model = tiny_model("flex_olmo")
    given: list[Tensor] = []
    find_seams(model)[0].block.register_forward_pre_hook(lambda _module, args: given.append(args[0].detach()))
    found = traced(model, prompt(), states=True)
    assert found.states is not None
    assert torch.equal(found.states.residual[:, 0], given[0].flatten(0, 1))


def test_entering_the_first_layer_are_the_embeddings() -> None:
    model = tiny_model("qwen2_moe")
    found = traced(model, prompt(), states=True, state_dtype=torch.bfloat16)
    assert found.states is not None and found.states.entering.dtype == torch.bfloat16
    with torch.no_grad():
        embedded = model.get_input_embeddings()(prompt()).flatten(0, 1)
    assert torch.equal(found.states.entering[:, 0], embedded.to(torch.bfloat16))


def test_a_watched_model_computes_the_same_bits_and_is_left_without_hooks() -> None:
    model = tiny_model("qwen2_moe")
    before, hooks = logits(model), _hooks(model)
    tracker = MoERouterTracker(model, states=True)
    assert _hooks(model) > hooks
    assert torch.equal(logits(model), before)
    tracker.close()
    tracker.close()  # twice is once
    assert _hooks(model) == hooks and torch.equal(logits(model), before)


def _hooks(model: nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


def test_generation_is_one_pass_per_step_with_the_rows_of_the_whole_text() -> None:
    model = tiny_model("qwen3_moe")
    tokens = prompt(rows=2, length=5)
    with MoERouterTracker(model) as tracker:
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=4, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        passes = tracker.take()
        assert tracker.take() == []
    assert [len(each.experts) for each in passes] == [10, 2, 2, 2]
    rows = torch.cat([each.experts.unflatten(0, (2, -1)) for each in passes], dim=1)
    whole = traced(model, out[:, :-1]).experts.unflatten(0, (2, -1))
    assert torch.equal(rows, whole)


def test_a_pass_that_fails_half_way_is_not_taken_for_a_whole_one() -> None:
    model = tiny_model("mixtral")
    with MoERouterTracker(model) as tracker:
        second = find_seams(model)[1].block
        handle = second.register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="half way"):
            logits(model)
        handle.remove()
        with pytest.raises(ConfigError, match="before the last MoE layer"):
            tracker.take()
        logits(model)
        assert len(tracker.take()) == 1


def _fail(_module: nn.Module, _args: Any) -> None:
    raise RuntimeError("half way")


def test_two_trackers_see_the_same() -> None:
    model = tiny_model("deepseek_v3")
    with MoERouterTracker(model) as outer:
        inner = traced(model, prompt())
        (found,) = outer.take()
    assert torch.equal(found.experts, inner.experts)
    geometry = outer.geometry(found)
    assert (geometry.layers, geometry.experts, geometry.top_k, geometry.hidden) == (2, 8, 3, 32)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a transformers model"):
        MoERouterTracker(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_shared_expert_of_an_unknown_kind_is_refused_where_states_are_asked_for() -> None:
    model = tiny_model("qwen3_moe")
    find_seams(model)[1].block.add_module("shared_tower", nn.Linear(2, 2))
    with MoERouterTracker(model):
        pass
    with pytest.raises(ConfigError, match="shared_tower"):
        MoERouterTracker(model, states=True)


_STRANGE = {
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 16},
    "deepseek_v4": {"n_routed_experts": 8, "moe_intermediate_size": 16},  # four residual streams instead of one
}


@pytest.mark.parametrize("family", _STRANGE)
def test_layers_whose_states_are_not_understood_give_ids_and_refuse_states(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 16, "vocab_size": 97, "num_experts_per_tok": 3, "intermediate_size": 48}  # fmt: skip
    config = AutoConfig.for_model(family, **common, **_STRANGE[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert traced(model, prompt()).experts.shape == (18, 2, 3)
    with pytest.raises((ConfigError, UnsupportedConfigError), match=r"state|beside its attention"):
        traced(model, prompt(), states=True)
