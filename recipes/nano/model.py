"""The Qwen2-MoE decoder, written for training on flat batches of windows (see corpus.py).

Parameters are float32; products run in `compute` (bfloat16 on a GPU), the residual stream and all sums stay in float32.
Every parameter with two or more axes is a stack of matrices in its last two, which is how the optimiser reads it.
Legend: T positions of a batch, H hidden, N heads, D head width, W width of an MLP, E experts.
"""

import inspect
import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from recipes.nano.config import ModelShape
from recipes.nano.experts import routed_experts, top_k

# torch 2.10 spells a causal mask `is_causal`, later ones `window_size`.
_CAUSAL: dict[str, Any] = (
    {"window_size": (-1, 0)} if "window_size" in inspect.signature(varlen_attn).parameters else {"is_causal": True}
)


class Layout(NamedTuple):
    """Where each position lies: rotary tables [T, D] and window bounds (int32; on a GPU padded by empty windows)."""

    cosine: Tensor
    sine: Tensor
    bounds: Tensor


class RouterLoss(NamedTuple):
    balance: Tensor  # E * sum(share of rows * mean probability): 1 when even
    z: Tensor  # mean squared log-partition of the router
    load: Tensor  # rows per expert [E]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product in the dtype of `x`, whatever the parameters are kept in."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)).to(dtype) * weight.to(dtype)


def rotate(x: Tensor, layout: Layout) -> Tensor:
    """Rotary embedding of x [T, N, D], halves paired as transformers pairs them."""
    low, high = x.chunk(2, -1)
    return x * layout.cosine[:, None] + torch.cat((-high, low), -1) * layout.sine[:, None]


def window_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, context: int) -> Tensor:
    """Causal attention inside each window; all [T, N, D]."""
    if query.is_cuda:
        return varlen_attn(query, key, value, layout.bounds, layout.bounds, context, context, **_CAUSAL)  # type: ignore[return-value]
    pieces = []
    for low, high in pairwise(layout.bounds.tolist()):
        q, k, v = (part[low:high].transpose(0, 1)[None] for part in (query, key, value))  # [1, N, window, D]
        pieces.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1))
    return torch.cat(pieces)


class DenseMlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, width, hidden))
        self.down = nn.Parameter(torch.empty(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.gate_up.flatten(0, 1)).chunk(2, -1)
        return linear(F.silu(gate) * up, self.down)


class MoeMlp(nn.Module):
    """top-k of E experts, weights not renormalised, plus a shared expert behind a sigmoid gate."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2, shape.expert_width, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.expert_width))
        self.shared = DenseMlp(shape.hidden, shape.shared_width)
        self.shared_gate = nn.Parameter(torch.empty(1, shape.hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, RouterLoss]:
        logits = linear(x, self.router).float()  # [T, E]
        probability = logits.softmax(-1)
        weight, expert = top_k(probability, self.top_k)  # [T, k]
        routed, load = routed_experts(
            x, weight.to(x.dtype), expert, self.gate_up.flatten(1, 2).to(x.dtype), self.down.to(x.dtype)
        )
        shared = torch.sigmoid(linear(x, self.shared_gate)) * self.shared(x)
        share = load.float() / expert.numel()
        balance = len(share) * (share * probability.mean(0)).sum()
        return routed + shared, RouterLoss(balance, logits.logsumexp(-1).pow(2).mean(), load)


class Block(nn.Module):
    def __init__(self, shape: ModelShape, dropout: float) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        hidden = shape.hidden
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Parameter(torch.empty(3, hidden, hidden))
        self.qkv_bias = nn.Parameter(torch.zeros(3 * hidden))
        self.out = nn.Parameter(torch.empty(hidden, hidden))
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.mlp = MoeMlp(shape) if shape.experts else DenseMlp(hidden, shape.dense_width)

    def attend(self, x: Tensor, layout: Layout, compute: torch.dtype) -> Tensor:
        """The residual stream [T, H] after attention: what lookahead predictors see."""
        normed = rms_norm(x, self.attention_norm, self.shape.norm_epsilon, compute)
        qkv = linear(normed, self.qkv.flatten(0, 1), self.qkv_bias).unflatten(-1, (3, self.shape.heads, -1))
        query, key, value = qkv.unbind(1)  # [T, N, D]
        query, key = rotate(query, layout), rotate(key, layout)
        mixed = window_attention(query, key, value.contiguous(), layout, self.shape.context)
        return x + F.dropout(linear(mixed.flatten(1), self.out), self.dropout, self.training)

    def normed(self, x: Tensor, compute: torch.dtype) -> Tensor:
        """What the router and the experts of this layer see, given the residual stream after attention."""
        return rms_norm(x, self.mlp_norm, self.shape.norm_epsilon, compute)

    def forward(self, x: Tensor, layout: Layout, compute: torch.dtype) -> tuple[Tensor, RouterLoss | None]:
        x = self.attend(x, layout, compute)
        out, loss = self.mlp(self.normed(x, compute)), None
        if isinstance(self.mlp, MoeMlp):
            out, loss = out
        return x + F.dropout(out, self.dropout, self.training), loss


class Decoder(nn.Module):
    def __init__(self, shape: ModelShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.embedding = nn.Parameter(torch.empty(shape.vocabulary, shape.hidden))
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self._initialise()

    def _initialise(self) -> None:
        """Normal, scaled by fan-in, and by depth where added to the residual stream; small routers start even."""
        for name, parameter in self.named_parameters():
            scale = 0.5 / math.sqrt(parameter.shape[-1])
            if name.endswith((".out", ".down")):
                scale /= math.sqrt(2 * self.shape.layers)
            if name.endswith((".router", "shared_gate", "embedding")):
                scale = 0.02
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=scale)

    @property
    def compute(self) -> torch.dtype:
        return torch.bfloat16 if self.embedding.is_cuda else torch.float32

    def layout(self, positions: Tensor, bounds: Tensor) -> Layout:
        half = torch.arange(0, self.shape.head_width, 2, device=positions.device, dtype=torch.float32)
        angle = positions[:, None].float() / self.shape.rope_theta ** (half / self.shape.head_width)  # [T, D / 2]
        angle = torch.cat((angle, angle), -1)
        return Layout(angle.cos().to(self.compute), angle.sin().to(self.compute), bounds)

    def embed(self, inputs: Tensor) -> Tensor:
        return F.dropout(F.embedding(inputs, self.embedding), self.dropout, self.training)  # [T, H] float32

    def forward(self, inputs: Tensor, positions: Tensor, bounds: Tensor) -> tuple[Tensor, list[RouterLoss]]:
        """The normed last hidden state [T, H] and the router losses of the layers that have a router."""
        layout = self.layout(positions, bounds)
        x, losses = self.embed(inputs), []
        for block in self.blocks:
            x, loss = block(x, layout, self.compute)
            if loss is not None:
                losses.append(loss)
        return rms_norm(x, self.norm, self.shape.norm_epsilon, self.compute), losses

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.embedding).float()  # [T, vocabulary]


def cross_entropy(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Nats per position [T]. Compiled as one piece so that float32 logits are never stored."""
    return F.cross_entropy(linear(hidden, embedding).float(), targets, reduction="none")


def soft_cross_entropy(hidden: Tensor, embedding: Tensor, teacher_logits: Tensor) -> Tensor:
    """Nats per position [T] against a teacher's distribution."""
    logits = linear(hidden, embedding).float().log_softmax(-1)
    return -(teacher_logits.float().softmax(-1) * logits).sum(-1)


def load_entropy(load: Tensor) -> Tensor:
    """Entropy of the rows per expert [..., E] as a part of an even load's: 1 is even, 0 is one expert."""
    share = load.double() / load.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(share).sum(-1)
    return entropy / math.log(load.shape[-1])
