"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): queries and keys normalised per head, no shared expert."""

from steerpipe.core.errors import UnsupportedConfigError
from steerpipe.model.families.base import Family, read_decoder, read_heads, read_mlps
from steerpipe.model.keys import ConfigKeys, count, flag
from steerpipe.model.spec import AttentionSpec, ModelSpec, QkNorm
from steerpipe.model.tensors import TensorNames


def read(keys: ConfigKeys) -> ModelSpec:
    heads, kv_heads, head_dim = read_heads(keys, kv_default=4)
    bias = keys.understood("attention_bias", flag, False)
    switched_on = keys.understood("use_sliding_window", flag, False)
    window = keys.optional("sliding_window", count)
    if switched_on and not window:
        raise UnsupportedConfigError(
            f"{keys.where} switches use_sliding_window on, but gives no sliding_window",
            fix="set sliding_window to the model's width, or use_sliding_window to false",
        )
    keys.optional("max_window_layers", count)  # written by the releases, read by no implementation
    keys.must_equal("use_qk_norm", (True,))  # this and the next two: as Qwen3-Coder writes them
    keys.must_equal("qkv_bias", (bias,))
    keys.must_equal("shared_expert_intermediate_size", (0,))
    attention = AttentionSpec(
        heads, kv_heads, head_dim, qkv_bias=bias, out_bias=bias, qk_norm=QkNorm.HEAD,
        window=window if switched_on else None,
    )  # fmt: skip
    mlp = read_mlps(keys, renormalise=keys.understood("norm_topk_prob", flag, False))
    return read_decoder(keys, "qwen3_moe", lambda _: attention, mlp, norm_eps=1e-6, theta=10_000.0)


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, TensorNames())
