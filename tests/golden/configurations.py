"""Random configurations of the four families (hypothesis)."""

from typing import Any

from hypothesis import strategies as st

from tests.golden.cases import ROPE_KINDS, longrope
from tests.support.tiny import CONTEXT, FAMILIES

Configuration = tuple[str, dict[str, Any]]  # family, its own keys


@st.composite
def configurations(draw: st.DrawFn, width_unit: int = 1) -> Configuration:
    """`width_unit`: every inner dimension of a matrix product is a multiple of it."""
    family = draw(st.sampled_from(FAMILIES))
    layers = draw(st.integers(1, 3))
    experts = draw(st.integers(1, 8))
    keys: dict[str, Any] = {
        "num_hidden_layers": layers,
        "vocab_size": draw(st.integers(2, 130)),
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "num_local_experts" if family == "mixtral" else "num_experts": experts,
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-3, 1e-1])),
    }
    keys |= draw(_heads(family, width_unit))
    keys |= draw(_family_keys(family, layers, width_unit))
    rope = draw(st.sampled_from([*ROPE_KINDS, "longrope"]))
    keys["rope_parameters"] = longrope(keys["_width"]) if rope == "longrope" else ROPE_KINDS[rope]
    del keys["_width"]
    return family, keys


@st.composite
def _heads(draw: st.DrawFn, family: str, unit: int) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    width = draw(st.sampled_from([4, 6, 8, 12, 16]))  # of one head; transformers divides by 0 at 2
    if heads * width % unit:
        width *= unit
    hidden = heads * width  # the only choice where the family has no key for a head's width
    if family != "olmoe":
        hidden = draw(st.integers(4, 20)) * max(unit, 2)
    keys = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": hidden, "_width": width}
    return keys if family == "olmoe" else keys | {"head_dim": width}


def _widths(unit: int) -> st.SearchStrategy[int]:
    return st.integers(2, 32 // unit).map(lambda n: n * unit)  # of width 1 transformers saves vectors


@st.composite
def _family_keys(draw: st.DrawFn, family: str, layers: int, unit: int) -> dict[str, Any]:
    keys: dict[str, Any] = {"intermediate_size": draw(_widths(unit))}
    window = draw(st.none() | st.integers(2, 70))
    if family == "mixtral":
        return keys | {"sliding_window": window}
    keys["norm_topk_prob"] = draw(st.booleans())
    if family == "olmoe":
        clip = draw(st.none() | st.floats(0.1, 2.0))
        return keys | {"attention_bias": draw(st.booleans()), "clip_qkv": clip}
    keys |= {
        "moe_intermediate_size": draw(_widths(unit)),
        "mlp_only_layers": draw(st.lists(st.integers(0, layers - 1), max_size=1)),
        "decoder_sparse_step": draw(st.sampled_from([1, 1, 1, 2])),
        "use_sliding_window": window is not None,
        "sliding_window": window or CONTEXT,
    }
    if draw(st.integers(0, 9)) == 0:
        keys["num_experts"] = 0  # a dense model
    if family == "qwen3_moe":
        return keys | {"attention_bias": draw(st.booleans())}
    if window is not None and draw(st.booleans()):
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        keys["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    return keys | {
        "qkv_bias": draw(st.booleans()),
        "shared_expert_intermediate_size": draw(_widths(unit)),
        "max_window_layers": draw(st.integers(0, layers)),
    }
