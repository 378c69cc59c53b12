"""Reading rotary settings, in both spellings and all kinds that the decoder computes."""

import math
from typing import Any

from steerpipe.core.errors import UnsupportedConfigError
from steerpipe.model.keys import ConfigKeys, above_zero, at_least_one, factors, flag, mapping, number, positive
from steerpipe.model.spec import RopeKind, RopeSpec


def read_rope(keys: ConfigKeys, head_dim: int, context: int, default_theta: float) -> RopeSpec:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    keys.must_equal("partial_rotary_factor", (1, 1.0))
    outer_theta = keys.optional("rope_theta", _theta)
    rope = keys.sub(keys.optional("rope_parameters", mapping, "rope_scaling") or {}, "rope_parameters")
    inner_theta = rope.optional("rope_theta", _theta)
    if outer_theta and inner_theta and outer_theta != inner_theta:
        raise keys.contradiction({"rope_theta": outer_theta, "rope_parameters.rope_theta": inner_theta})
    theta = inner_theta or outer_theta or default_theta
    name = rope.understood("rope_type", str, "default", "type")
    rope.must_equal("partial_rotary_factor", (1, 1.0))
    if name not in {kind.value for kind in RopeKind}:
        raise UnsupportedConfigError(
            f"{keys.where} says rope_type = {name!r}, which is not computed here",
            fix=f"run this model through transformers; known here are {', '.join(kind.value for kind in RopeKind)}",
        )
    kind = RopeKind(name)
    spec = _ROPE_READERS[kind](rope, RopeSpec(kind, theta, head_dim), context)
    rope.finish()
    return spec


def _read_default(rope: ConfigKeys, spec: RopeSpec, context: int) -> RopeSpec:
    return spec


def _read_linear(rope: ConfigKeys, spec: RopeSpec, context: int) -> RopeSpec:
    return RopeSpec(spec.kind, spec.theta, spec.dim, factor=rope.required("factor", at_least_one))


def _read_dynamic(rope: ConfigKeys, spec: RopeSpec, context: int) -> RopeSpec:
    rope.required("factor", at_least_one)  # acts only beyond max_position_embeddings, where we do not go
    rope.optional("original_max_position_embeddings", positive)
    return spec


def _read_llama3(rope: ConfigKeys, spec: RopeSpec, context: int) -> RopeSpec:
    low, high = rope.required("low_freq_factor", above_zero), rope.required("high_freq_factor", above_zero)
    if low >= high:
        raise UnsupportedConfigError(
            f"{rope.where} has low_freq_factor = {low} and high_freq_factor = {high}",
            fix="the low one must be below the high one: take config.json from the model's own repository",
        )
    return RopeSpec(
        spec.kind, spec.theta, spec.dim,
        factor=rope.required("factor", at_least_one),
        original_context=rope.understood("original_max_position_embeddings", positive, context),
        low_freq_factor=low,
        high_freq_factor=high,
    )  # fmt: skip


def _read_yarn(rope: ConfigKeys, spec: RopeSpec, context: int) -> RopeSpec:
    original = rope.understood("original_max_position_embeddings", positive, context)
    factor = rope.understood("factor", at_least_one, context / original)
    mscale, mscale_all = rope.optional("mscale", above_zero), rope.optional("mscale_all_dim", above_zero)
    from_scale = _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor, 1)
    return RopeSpec(
        spec.kind, spec.theta, spec.dim, factor=factor, original_context=original,
        attention_factor=rope.understood("attention_factor", above_zero, from_scale),
        beta_fast=rope.understood("beta_fast", above_zero, 32.0),
        beta_slow=rope.understood("beta_slow", above_zero, 1.0),
        truncate=rope.understood("truncate", flag, True),
    )  # fmt: skip


def _read_longrope(rope: ConfigKeys, spec: RopeSpec, context: int) -> RopeSpec:
    original = rope.understood("original_max_position_embeddings", positive, context)
    factor = rope.understood("factor", above_zero, context / original)
    scaled = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    rope.required("long_factor", factors)  # acts only beyond the original context, where we do not go
    short = rope.required("short_factor", factors)
    if len(short) != spec.dim // 2:
        raise UnsupportedConfigError(
            f"{rope.where} has a short_factor of {len(short)} entries for {spec.dim // 2} rotated pairs",
            fix="take config.json from the model's own repository",
        )
    return RopeSpec(
        spec.kind, spec.theta, spec.dim, original_context=original, short_factor=short,
        attention_factor=rope.understood("attention_factor", above_zero, scaled),
    )  # fmt: skip


def _theta(value: Any) -> float:
    if number(value) <= 1:  # yarn divides by its logarithm, and no rotation slows down without it
        raise ValueError("a number above 1 is needed")
    return float(value)


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
