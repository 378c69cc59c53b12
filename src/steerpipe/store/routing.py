"""Reads recorded routing, from which the order on disk is derived."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.errors import PackError
from steerpipe.model.safetensors import read_header, read_tensor
from steerpipe.model.spec import ModelSpec
from steerpipe.store.order import order_experts

_FIX = (
    "give a safetensors file with an integer tensor 'routing' of [tokens, MoE layers, top_k] recorded from this model"
)


def index_order(spec: ModelSpec) -> dict[int, tuple[int, ...]]:
    """Layer → experts as they are numbered."""
    return {layer: tuple(range(spec.moe(layer).experts)) for layer in spec.moe_layers}


def recorded_order(spec: ModelSpec, file: Path) -> dict[int, tuple[int, ...]]:
    """Layer → experts so that those that fire together are neighbours. Reads the whole file."""
    routing = _read(file)
    layers = spec.moe_layers
    if routing.ndim != 3 or routing.shape[1] != len(layers):
        raise PackError(f"'routing' in {file} has shape {list(routing.shape)}, for {len(layers)} MoE layers", fix=_FIX)
    order: dict[int, tuple[int, ...]] = {}
    for column, layer in enumerate(layers):
        experts = spec.moe(layer).experts
        routed = routing[:, column]  # [tokens, top_k]
        if routed.size and not 0 <= int(routed.min()) <= int(routed.max()) < experts:
            raise PackError(
                f"{file} routes layer {layer} to experts {routed.min()} to {routed.max()} of {experts}", fix=_FIX
            )
        order[layer] = tuple(int(expert) for expert in order_experts(routed, experts))
    return order


def _read(file: Path) -> NDArray[np.int64]:
    if not file.is_file():
        raise PackError(f"{file} does not exist", fix=_FIX)
    entry = read_header(file).get("routing")
    if entry is None or entry.dtype.is_floating_point:
        raise PackError(f"{file} has no integer tensor 'routing'", fix=_FIX)
    return np.asarray(read_tensor(entry).numpy(), dtype=np.int64)
