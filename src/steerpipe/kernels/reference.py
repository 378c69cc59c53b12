"""What the kernels compute, in torch: the same roundings, on any device, and KV as plain tensors.

R rows, H hidden, K inputs, N outputs, I width, E experts, k experts per row, D head dim, S keys. Kernels may add in
another order; everything else is meant to be equal.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Statistics in fp32, result in x's dtype. Normalises the last dimension."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def row_linear(
    x: Tensor, weight: Tensor, dtype: torch.dtype, *, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x: [R, K], weight: [N, K] → [R, N]: summed in fp32 and rounded once to `dtype`, then the residual."""
    total = F.linear(x.double(), weight.double())
    if bias is not None:
        total = total + bias.double()
    rounded = total.float().to(dtype)
    return rounded if residual is None else residual + rounded


def row_gated_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    """x: [R, K], gate_up: [2I, K] → [R, I]."""
    return gated(row_linear(x, gate_up, x.dtype))


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) · up: [R, 2I] → [R, I]; both halves, and silu's result, are in the dtype of the input."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def rotated_heads(
    qkv: Tensor,
    turn: Tensor,
    *,
    heads: int,
    kv_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv: [R, (heads + 2 kv_heads) D], turn: [R, 2, D / 2] → queries [R, heads, D], keys, values [R, kv_heads, D]."""
    rows, head_dim = len(qkv), qkv.shape[1] // (heads + 2 * kv_heads)
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    parts = list(torch.split(qkv, widths, dim=-1))
    for part, weight in enumerate((query_norm, key_norm)):
        if weight is not None:  # [D]: each head by itself; [heads · D]: all at once
            parts[part] = rms_norm(parts[part].reshape(rows, -1, len(weight)), weight, eps).flatten(1)
    if clip is not None:
        parts = [part.clamp(-clip, clip) for part in parts]
    queries, keys, values = (part.reshape(rows, -1, head_dim) for part in parts)
    return rotate(queries, turn), rotate(keys, turn), values


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotates pairs (i, i + D/2): x [R, heads, D], turn [R, 2, D / 2]; fp32 inside, x's dtype out."""
    cos, sin = turn[:, 0, None], turn[:, 1, None]  # [R, 1, D / 2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def attention(queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, window: int | None = None) -> Tensor:
    """queries: [R, heads, D]; keys, values: [R or 1, kv_heads, S, D] → [R, heads · D], zeros where a position is -1.

    A row sees the keys up to its position, and window - 1 before it where there is a window. In fp64.
    """
    rows, heads, head_dim = queries.shape
    out = torch.zeros_like(queries)
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        first = max(0, position - window + 1) if window else 0
        own = min(row, len(keys) - 1)
        k, v = (t[own, :, first : position + 1].double() for t in (keys, values))  # [kv_heads, seen, D]
        q = queries[row].double().view(len(k), -1, head_dim)  # [kv_heads, group, D]
        weights = (q @ k.transpose(1, 2) * head_dim**-0.5).softmax(-1)  # [kv_heads, group, seen]
        out[row] = (weights @ v).reshape(heads, head_dim).to(out.dtype)
    return out.view(rows, heads * head_dim)


def route(
    logits: Tensor, positions: Tensor, *, top_k: int, renormalise: bool, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits: [R, E] fp32 → experts [R, k] int32 and gates [R, k] fp32. The lower index wins a tie."""
    probabilities = logits.softmax(-1)
    experts = probabilities.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].int()
    if forced is not None:
        experts = torch.where(forced >= 0, forced, experts)
    gates = probabilities.gather(1, experts.long())
    if renormalise:
        gates = gates / gates.sum(-1, keepdim=True)
    real = (positions >= 0)[:, None]
    return torch.where(real, experts, -1), torch.where(real, gates, 0.0)


def mailbox_words(experts: Tensor, stamp: int) -> Tensor:
    """experts: [R, k] → [R · k] int64: the stamp above, the expert below."""
    return (stamp << 32) | (experts.long().flatten() & 0xFFFFFFFF)


def combine(
    part: Tensor,
    experts: Tensor,
    gates: Tensor,
    x: Tensor,
    *,
    shared: Tensor | None = None,
    shared_switch: Tensor | None = None,
) -> Tensor:
    """part: [R · k, H] fp32 → x + (what the experts gave, in ascending expert order, and the shared one): [R, H]."""
    part = part.view(*experts.shape, -1)
    used = (experts >= 0)[..., None]  # what an unused pair holds must not matter
    weighted = torch.where(used, part * gates[..., None], 0.0)  # [R, k, H]
    weighted = weighted.take_along_dim(experts.argsort(dim=1, stable=True)[..., None], dim=1)
    total = weighted[:, 0]
    for rank in range(1, experts.shape[1]):
        total = total + weighted[:, rank]
    if shared is not None:
        product = shared if shared_switch is None else torch.sigmoid(shared_switch) * shared
        total = total + product.float()
    return x + total.to(x.dtype)
