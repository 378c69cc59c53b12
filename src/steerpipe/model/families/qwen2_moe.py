"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): biased qkv, gated shared expert, top-k weights left as they are."""

from collections.abc import Callable

from steerpipe.core.errors import UnsupportedConfigError
from steerpipe.model.families.base import Family, read_decoder, read_heads, read_mlps
from steerpipe.model.keys import ConfigKeys, count, flag, layer_count, positive, texts
from steerpipe.model.spec import AttentionSpec, ModelSpec
from steerpipe.model.tensors import TensorNames


def read(keys: ConfigKeys) -> ModelSpec:
    heads, kv_heads, head_dim = read_heads(keys)
    bias = keys.understood("qkv_bias", flag, True)
    window = _read_windows(keys)
    mlp = read_mlps(
        keys,
        renormalise=keys.understood("norm_topk_prob", flag, False),
        shared_width=keys.understood("shared_expert_intermediate_size", positive, 5632),
    )

    def attention(layer: int) -> AttentionSpec:
        return AttentionSpec(heads, kv_heads, head_dim, qkv_bias=bias, window=window(layer))

    return read_decoder(keys, "qwen2_moe", attention, mlp, norm_eps=1e-6, theta=10_000.0)


def _read_windows(keys: ConfigKeys) -> Callable[[int], int | None]:
    """Layer → window. Without `layer_types`, every second layer below `max_window_layers` slides, if any does."""
    switched_on = keys.understood("use_sliding_window", flag, False)
    width = keys.optional("sliding_window", count)
    below = keys.understood("max_window_layers", count, 28)
    kinds = keys.optional("layer_types", texts)
    layers = keys.required("num_hidden_layers", layer_count)
    if switched_on and not width:
        raise UnsupportedConfigError(
            f"{keys.where} switches use_sliding_window on, but gives no sliding_window",
            fix="set sliding_window to the model's width, or use_sliding_window to false",
        )
    if kinds is not None and len(kinds) != layers:
        raise UnsupportedConfigError(
            f"{keys.where} has {len(kinds)} layer_types for {layers} layers", fix="give one for each layer"
        )
    if kinds is not None and not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UnsupportedConfigError(
            f"{keys.where} has layer_types {', '.join(sorted(set(kinds)))}",
            fix="only full_attention and sliding_attention are computed here: run this model through transformers",
        )
    if kinds is not None and "sliding_attention" in kinds and not switched_on:
        raise UnsupportedConfigError(
            f"{keys.where} has layer_types with sliding_attention, but use_sliding_window is off",
            fix="set use_sliding_window and sliding_window in config.json, or make the layers full_attention",
        )

    def window(layer: int) -> int | None:
        slides = kinds[layer] == "sliding_attention" if kinds else switched_on and layer % 2 == 0 and layer < below
        return width if slides else None

    return window


FAMILY = Family("qwen2_moe", "Qwen2MoeForCausalLM", read, TensorNames())
