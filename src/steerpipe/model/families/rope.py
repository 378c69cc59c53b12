"""Reading rotary settings, in both spellings and all kinds that the decoder computes."""

import math

from steerpipe.core.errors import UnsupportedConfigError
from steerpipe.model.keys import ConfigKeys, flag, mapping, number, numbers, positive
from steerpipe.model.spec import RopeKind, RopeSpec


def read_rope(keys: ConfigKeys, head_dim: int, context: int, default_theta: float) -> RopeSpec:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    keys.must_equal("partial_rotary_factor", (1, 1.0))
    outer_theta = keys.understood("rope_theta", number, default_theta)
    rope = keys.sub(keys.optional("rope_parameters", mapping, "rope_scaling") or {}, "rope_parameters")
    theta = rope.understood("rope_theta", number, outer_theta)
    name = rope.understood("rope_type", str, "default", "type")
    rope.must_equal("partial_rotary_factor", (1, 1.0))
    if name not in {kind.value for kind in RopeKind}:
        raise UnsupportedConfigError(
            f"rope type {name!r} is not computed here", fix=f"known are {', '.join(kind.value for kind in RopeKind)}"
        )
    kind = RopeKind(name)
    spec = _ROPE_READERS[kind](rope, RopeSpec(kind, theta, head_dim), context)
    rope.finish()
    return spec


def _read_default(rope: ConfigKeys, spec: RopeSpec, context: int) -> RopeSpec:
    return spec


def _read_linear(rope: ConfigKeys, spec: RopeSpec, context: int) -> RopeSpec:
    return RopeSpec(spec.kind, spec.theta, spec.dim, factor=rope.required("factor", number))


def _read_dynamic(rope: ConfigKeys, spec: RopeSpec, context: int) -> RopeSpec:
    rope.required("factor", number)  # acts only beyond max_position_embeddings, where we do not go
    rope.optional("original_max_position_embeddings", positive)
    return spec


def _read_llama3(rope: ConfigKeys, spec: RopeSpec, context: int) -> RopeSpec:
    return RopeSpec(
        spec.kind, spec.theta, spec.dim,
        factor=rope.required("factor", number),
        original_context=rope.understood("original_max_position_embeddings", positive, context),
        low_freq_factor=rope.required("low_freq_factor", number),
        high_freq_factor=rope.required("high_freq_factor", number),
    )  # fmt: skip


def _read_yarn(rope: ConfigKeys, spec: RopeSpec, context: int) -> RopeSpec:
    original = rope.understood("original_max_position_embeddings", positive, context)
    factor = rope.understood("factor", number, context / original)
    mscale, mscale_all = rope.optional("mscale", number), rope.optional("mscale_all_dim", number)
    from_scale = _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor, 1)
    return RopeSpec(
        spec.kind, spec.theta, spec.dim, factor=factor, original_context=original,
        attention_factor=rope.understood("attention_factor", number, from_scale),
        beta_fast=rope.understood("beta_fast", number, 32.0),
        beta_slow=rope.understood("beta_slow", number, 1.0),
        truncate=rope.understood("truncate", flag, True),
    )  # fmt: skip


def _read_longrope(rope: ConfigKeys, spec: RopeSpec, context: int) -> RopeSpec:
    original = rope.understood("original_max_position_embeddings", positive, context)
    factor = rope.understood("factor", number, context / original)
    scaled = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    rope.required("long_factor", numbers)  # acts only beyond the original context, where we do not go
    short = rope.required("short_factor", numbers)
    if len(short) != spec.dim // 2:
        raise UnsupportedConfigError(
            f"short_factor has {len(short)} entries for {spec.dim // 2} rotated pairs", fix="correct config.json"
        )
    return RopeSpec(
        spec.kind, spec.theta, spec.dim, original_context=original, short_factor=short,
        attention_factor=rope.understood("attention_factor", number, scaled),
    )  # fmt: skip


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


_ROPE_READERS = {
    RopeKind.DEFAULT: _read_default,
    RopeKind.LINEAR: _read_linear,
    RopeKind.DYNAMIC: _read_dynamic,
    RopeKind.LLAMA3: _read_llama3,
    RopeKind.YARN: _read_yarn,
    RopeKind.LONGROPE: _read_longrope,
}
