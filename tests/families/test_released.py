"""Released configs are read in every spelling, and promise the tensors that the released indexes list."""

import json
import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from steerpipe.core.errors import UnsupportedConfigError
from steerpipe.model.checkpoint import read_spec
from steerpipe.model.families import FAMILIES
from steerpipe.model.spec import ModelSpec, QkNorm, RopeKind
from steerpipe.model.tensors import Shape, dense_tensors, expert_tensors
from tests.families.released import (
    MIXTRAL_8X7B,
    OLMOE_0924,
    QWEN3_30B,
    QWEN3_30B_2507,
    QWEN3_30B_2507_SAVED_BY_5,
    QWEN3_CODER_30B,
    QWEN15_MOE,
    RELEASED,
    Released,
)

ALL = pytest.mark.parametrize("model", RELEASED.values(), ids=RELEASED.keys())
SAMPLES = {
    "qwen2_moe": {
        "model.layers.23.mlp.experts.59.down_proj.weight": (2048, 1408),
        "model.layers.0.mlp.shared_expert.gate_proj.weight": (5632, 2048),
        "model.layers.0.mlp.shared_expert_gate.weight": (1, 2048),
        "model.layers.11.self_attn.v_proj.bias": (2048,),
        "model.layers.11.mlp.gate.weight": (60, 2048),
    },
    "mixtral": {
        "model.layers.31.block_sparse_moe.experts.7.w1.weight": (14336, 4096),
        "model.layers.31.block_sparse_moe.experts.7.w2.weight": (4096, 14336),
        "model.layers.0.block_sparse_moe.gate.weight": (8, 4096),
        "model.layers.0.self_attn.k_proj.weight": (1024, 4096),
    },
    "olmoe": {
        "model.layers.15.mlp.experts.63.gate_proj.weight": (1024, 2048),
        "model.layers.0.self_attn.q_norm.weight": (2048,),
        "model.layers.0.self_attn.k_norm.weight": (2048,),
        "lm_head.weight": (50304, 2048),
    },
    "qwen3_moe": {
        "model.layers.47.mlp.experts.127.up_proj.weight": (768, 2048),
        "model.layers.0.self_attn.q_proj.weight": (4096, 2048),
        "model.layers.0.self_attn.o_proj.weight": (2048, 4096),
        "model.layers.0.self_attn.q_norm.weight": (128,),
        "model.norm.weight": (2048,),
    },
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return read_spec(FAMILIES[config["model_type"]], config, "config.json")


def tensors_of(config: dict[str, Any]) -> tuple[dict[str, Shape], dict[str, Shape]]:
    spec, names = spec_of(config), FAMILIES[config["model_type"]].names
    return dense_tensors(spec, names), expert_tensors(spec, names)


@ALL
def test_releases_name_the_class_that_the_family_declares(model: Released) -> None:
    family = FAMILIES[model.config["model_type"]]
    assert model.config["architectures"] == [family.architecture]
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type] == family.architecture


@ALL
def test_the_promised_tensors_are_as_many_and_as_large_as_the_index_says(model: Released) -> None:
    dense, experts = tensors_of(model.config)
    assert len(dense) + len(experts) == model.tensors
    assert 2 * sum(math.prod(shape) for shape in (dense | experts).values()) == model.total_size


@pytest.mark.parametrize("config", [QWEN15_MOE, MIXTRAL_8X7B, OLMOE_0924, QWEN3_30B], ids=lambda c: c["model_type"])
def test_names_of_the_released_indexes(config: dict[str, Any]) -> None:
    dense, experts = tensors_of(config)
    for name, shape in SAMPLES[config["model_type"]].items():
        assert (dense | experts)[name] == shape


@ALL
def test_a_config_that_transformers_saves_again_says_the_same(model: Released) -> None:
    saved = json.loads(AutoConfig.for_model(**model.config).to_json_string())
    assert "rope_theta" not in saved and "torch_dtype" not in saved, "transformers has not changed its spelling"
    assert spec_of(saved) == spec_of(model.config)


@ALL
def test_transformers_builds_the_same_tensors_from_the_same_config(model: Released) -> None:
    dense, experts = tensors_of(model.config)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.config)).state_dict()
    fused = {name: tuple(tensor.shape) for name, tensor in built.items() if ".mlp.experts." in name}
    theirs = {name: tuple(tensor.shape) for name, tensor in built.items() if name not in fused}
    assert {name.replace(".block_sparse_moe.", ".mlp."): shape for name, shape in dense.items()} == theirs
    spec = spec_of(model.config)
    moe = spec.moe(0)
    for layer in spec.moe_layers:  # transformers keeps the experts of a layer as two tensors
        prefix = f"model.layers.{layer}.mlp.experts"
        assert fused.pop(f"{prefix}.gate_up_proj") == (moe.experts, 2 * moe.width, spec.hidden)
        assert fused.pop(f"{prefix}.down_proj") == (moe.experts, spec.hidden, moe.width)
    assert not fused
    assert len(experts) == len(spec.moe_layers) * moe.experts * 3


def test_what_the_families_do_differently() -> None:
    qwen2, qwen3, mixtral, olmoe = (spec_of(c) for c in (QWEN15_MOE, QWEN3_30B, MIXTRAL_8X7B, OLMOE_0924))
    assert [spec.moe(0).renormalise for spec in (qwen2, qwen3, mixtral, olmoe)] == [False, True, True, False]
    assert [spec.moe(0).top_k for spec in (qwen2, qwen3, mixtral, olmoe)] == [4, 8, 2, 8]
    assert [spec.moe(0).shared_width for spec in (qwen2, qwen3, mixtral, olmoe)] == [5632, 0, 0, 0]
    attention = [spec.layers[0].attention for spec in (qwen2, qwen3, mixtral, olmoe)]
    assert [a.qk_norm for a in attention] == [QkNorm.NONE, QkNorm.HEAD, QkNorm.NONE, QkNorm.ALL_HEADS]
    assert [(a.qkv_bias, a.out_bias) for a in attention] == [(True, False)] + [(False, False)] * 3
    assert [(a.heads, a.kv_heads, a.head_dim) for a in attention] == [
        (16, 16, 128), (32, 4, 128), (32, 8, 128), (16, 16, 128),
    ]  # fmt: skip
    assert all(a.window is None and a.clip_qkv is None for a in attention)
    assert [spec.norm_eps for spec in (qwen2, qwen3, mixtral, olmoe)] == [1e-6, 1e-6, 1e-5, 1e-5]
    assert [spec.rope.theta for spec in (qwen2, qwen3, mixtral, olmoe)] == [1e6, 1e6, 1e6, 1e4]
    assert [spec.max_context for spec in (qwen2, qwen3, mixtral, olmoe)] == [8192, 40960, 32768, 4096]


def test_both_spellings_of_one_release_agree() -> None:
    assert spec_of(QWEN3_30B_2507) == spec_of(QWEN3_30B_2507_SAVED_BY_5)


def test_a_config_with_both_spellings_that_agree() -> None:
    """As transformers 4.57 writes them: rope_parameters beside rope_theta and an empty rope_scaling."""
    both = QWEN3_30B_2507 | {"rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}, "dtype": "bfloat16"}
    assert spec_of(both) == spec_of(QWEN3_30B_2507)


def test_the_coder_is_an_ordinary_member_of_its_family() -> None:
    assert spec_of(QWEN3_CODER_30B) == spec_of(QWEN3_30B_2507 | {"intermediate_size": 5472})


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_long_context_recipe_of_the_model_cards(key: str) -> None:
    """Qwen3's cards tell people to add YaRN to config.json by hand, in either spelling."""
    said = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = spec_of(QWEN3_30B | {"max_position_embeddings": 131072, key: said})
    assert (spec.rope.kind, spec.rope.factor, spec.rope.original_context) == (RopeKind.YARN, 4.0, 32768)
    assert spec.rope.theta == 1e6
    assert spec.max_context == 131072


@pytest.mark.parametrize(
    ("config", "changes", "key"),
    [
        (QWEN3_30B, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (QWEN3_30B, {"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
        (MIXTRAL_8X7B, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (MIXTRAL_8X7B, {"world_size": 8}, "world_size"),
    ],
)
def test_derived_releases_that_compute_something_else_are_refused(
    config: dict[str, Any], changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(UnsupportedConfigError, match=key):
        spec_of(config | changes)
