"""What the declarations share: the decoder-only transformer that they are variations of."""

from collections.abc import Callable
from dataclasses import dataclass

from steerpipe.core.errors import UnsupportedConfigError
from steerpipe.model.families.rope import read_rope
from steerpipe.model.keys import ConfigKeys, above_zero, count, counts, expert_count, flag, layer_count, positive
from steerpipe.model.spec import AttentionSpec, DenseMlpSpec, LayerSpec, ModelSpec, MoeSpec, RopeKind
from steerpipe.model.tensors import TensorNames


@dataclass(frozen=True, slots=True)
class Family:
    """A declaration: how to read this architecture's config, and what its tensors are called."""

    model_type: str
    architecture: str
    read: Callable[[ConfigKeys], ModelSpec]
    names: TensorNames


def read_decoder(
    keys: ConfigKeys,
    family: str,
    attention: Callable[[int], AttentionSpec],
    mlp: Callable[[int], DenseMlpSpec | MoeSpec],
    *,
    norm_eps: float,
    theta: float,
) -> ModelSpec:
    """The keys that every family has; `attention` and `mlp` give the parts of each layer."""
    keys.must_equal("hidden_act", ("silu",))
    layers = keys.required("num_hidden_layers", layer_count)
    context = keys.required("max_position_embeddings", positive)
    parts = tuple(LayerSpec(attention(i), mlp(i)) for i in range(layers))
    rope = read_rope(keys, parts[0].attention.head_dim, context, theta)
    capped = rope.kind is RopeKind.LONGROPE  # beyond it the frequencies of all earlier keys would change
    return ModelSpec(
        family=family,
        vocab=keys.required("vocab_size", positive),
        hidden=keys.required("hidden_size", positive),
        layers=parts,
        norm_eps=keys.understood("rms_norm_eps", above_zero, norm_eps),
        rope=rope,
        tied_embeddings=keys.understood("tie_word_embeddings", flag, False),
        max_context=min(context, rope.original_context) if capped else context,
        stored_dtype=keys.understood("dtype", str, "float32", "torch_dtype"),
    )


def read_heads(keys: ConfigKeys, *, kv_default: int | None = None, head_dim_key: bool = True) -> tuple[int, int, int]:
    """Heads, key-value heads and head width; checks that they fit each other."""
    heads = keys.required("num_attention_heads", positive)
    kv_heads = keys.understood("num_key_value_heads", positive, kv_default or heads)
    hidden = keys.required("hidden_size", positive)
    head_dim = (keys.optional("head_dim", positive) if head_dim_key else None) or hidden // heads
    if heads % kv_heads or (not head_dim_key and hidden % heads) or head_dim % 2 or not head_dim:
        raise UnsupportedConfigError(
            f"{keys.where} asks for {heads} heads of {head_dim} over {kv_heads} key-value heads "
            f"in a width of {hidden}, which do not fit each other",
            fix="num_attention_heads must be a multiple of num_key_value_heads, and a head's width even: "
            "take config.json from the model's own repository",
        )
    return heads, kv_heads, head_dim


def read_mlps(keys: ConfigKeys, *, renormalise: bool, shared_width: int = 0) -> Callable[[int], DenseMlpSpec | MoeSpec]:
    """Qwen's rule for dense layers among the MoE layers: `mlp_only_layers` and `decoder_sparse_step`."""
    experts = keys.understood("num_experts", count, 0, "num_local_experts")
    dense_layers = frozenset(keys.optional("mlp_only_layers", counts) or ())
    step = keys.understood("decoder_sparse_step", positive, 1)
    dense = DenseMlpSpec(keys.required("intermediate_size", positive))
    for name in ("num_experts_per_tok", "moe_intermediate_size"):
        keys.optional(name, count)  # a model whose layers are all dense carries them unused
    moe = (
        read_moe(keys, width="moe_intermediate_size", renormalise=renormalise, shared_width=shared_width)
        if experts
        else None
    )

    def mlp(layer: int) -> DenseMlpSpec | MoeSpec:
        sparse = layer not in dense_layers and (layer + 1) % step == 0
        return moe if moe and sparse else dense

    return mlp


def read_moe(keys: ConfigKeys, *, width: str, renormalise: bool, shared_width: int = 0) -> MoeSpec:
    experts = keys.required("num_experts", expert_count, "num_local_experts")
    top_k = keys.required("num_experts_per_tok", positive)
    if top_k > experts:
        raise UnsupportedConfigError(
            f"{keys.where} says num_experts_per_tok = {top_k}, but there are only {experts} experts",
            fix="take config.json from the model's own repository",
        )
    return MoeSpec(experts, top_k, keys.required(width, positive), renormalise, shared_width)
