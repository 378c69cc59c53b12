"""OLMoE (1B-7B): queries and keys normalised over all heads at once, values optionally clipped."""

from steerpipe.model.families.base import Family, read_decoder, read_heads, read_moe
from steerpipe.model.keys import ConfigKeys, above_zero, flag
from steerpipe.model.spec import AttentionSpec, ModelSpec, QkNorm
from steerpipe.model.tensors import TensorNames


def read(keys: ConfigKeys) -> ModelSpec:
    heads, kv_heads, head_dim = read_heads(keys, head_dim_key=False)
    bias = keys.understood("attention_bias", flag, False)
    clip = keys.optional("clip_qkv", above_zero)
    attention = AttentionSpec(
        heads, kv_heads, head_dim, qkv_bias=bias, out_bias=bias, qk_norm=QkNorm.ALL_HEADS, clip_qkv=clip
    )
    moe = read_moe(
        keys, width="intermediate_size", renormalise=keys.understood("norm_topk_prob", flag, False)
    )  # fmt: skip
    return read_decoder(keys, "olmoe", lambda _: attention, lambda _: moe, norm_eps=1e-5, theta=10_000.0)


FAMILY = Family("olmoe", "OlmoeForCausalLM", read, TensorNames())
