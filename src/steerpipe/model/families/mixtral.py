"""Mixtral (8x7B, 8x22B): top-k weights always renormalised; experts are called w1 (gate), w3 (up), w2 (down)."""

from steerpipe.model.families.base import Family, read_decoder, read_heads, read_moe
from steerpipe.model.keys import ConfigKeys, count
from steerpipe.model.spec import AttentionSpec, ModelSpec
from steerpipe.model.tensors import TensorNames


def read(keys: ConfigKeys) -> ModelSpec:
    heads, kv_heads, head_dim = read_heads(keys)
    attention = AttentionSpec(heads, kv_heads, head_dim, window=keys.optional("sliding_window", count) or None)
    keys.must_equal("attention_bias", (False,))  # merged models carry it over from their dense parts
    moe = read_moe(keys, width="intermediate_size", renormalise=True)
    return read_decoder(keys, "mixtral", lambda _: attention, lambda _: moe, norm_eps=1e-5, theta=1_000_000.0)


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    read,
    TensorNames(
        router="model.layers.{layer}.block_sparse_moe.gate",
        expert_gate="model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
        expert_up="model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
        expert_down="model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
    ),
)
