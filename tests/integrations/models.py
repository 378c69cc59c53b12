"""Tiny random models of many families, from transformers itself."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from steerpipe.integrations.blocks import SlotLayout
from steerpipe.integrations.exchange import expert_layers

VOCABULARY = 97
_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 3,  # two could be added in either order
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3}
_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
# What each family needs beside the common settings.
FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
        "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 16},
        "mixtral": {"num_local_experts": 4},
        "olmoe": {"num_experts": 8, "intermediate_size": 16},
        "flex_olmo": {"num_experts": 4},
        "phimoe": {"num_local_experts": 4},
        "minimax": {"num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
        "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8},
        "granitemoe": {"num_local_experts": 4},
        "granitemoehybrid": {"num_local_experts": 4, "layer_types": ["attention", "attention"], **_MAMBA},
        "deepseek_v2": {"n_routed_experts": 8, "moe_intermediate_size": 16, **_LATENT, **_GROUPS},
        "deepseek_v3": {"n_routed_experts": 8, "moe_intermediate_size": 16, "num_key_value_heads": 2, **_LATENT,
                        **_GROUPS},
        "glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 16, "head_dim": 16, **_GROUPS},
        "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 16, "head_dim": 16, **_GROUPS},
        "ernie4_5_moe": {"moe_num_experts": 8, "moe_intermediate_size": 16, "moe_k": 3, "moe_layer_start_index": 0},
        "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 3, "head_dim": 16},
        "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1,
                  "expert_layer_offset": 0, "mamba_d_state": 8, "mamba_dt_rank": 4},
        "lfm2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "num_dense_layers": 0,
                     "layer_types": ["full_attention", "full_attention"]},
        "nemotron_h": {"n_routed_experts": 8, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
                       "hybrid_override_pattern": "*E", "head_dim": 16,
                       "n_group": 1, "topk_group": 1},
        "qwen3_next": {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
                       "head_dim": 16, "layer_types": ["full_attention", "full_attention"]},
        "solar_open": {"n_routed_experts": 8, "moe_intermediate_size": 16, "head_dim": 16,
                       "n_group": 1, "topk_group": 1},
    }
)  # fmt: skip


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Random weights, on the CPU, in float32 unless told otherwise, with transformers' eager experts."""
    dtype = changes.pop("dtype", torch.float32)
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **changes})
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases begin as zeros, and would hide a mistake
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.set_experts_implementation("eager")
    return model


def prompt(rows: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model: PreTrainedModel, tokens: Tensor | None = None) -> Tensor:
    """[rows, length, vocabulary]"""
    with torch.no_grad():
        found: Tensor = model(prompt() if tokens is None else tokens).logits
    return found


def difference(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


def two_slots(model: PreTrainedModel) -> str:
    """The smallest legal budget, in bytes."""
    return str(2 * max(SlotLayout.of(layer.form).slot_bytes for layer in expert_layers(model)))
