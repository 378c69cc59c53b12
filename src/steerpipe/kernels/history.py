"""The seed's ExpertTransformer on the routing of one token's layers: five kernels in a row.

As torch's it is some forty, each of which waits for the one before. Here the heads of an encoder layer, then parts of
its 512, are programs of their own; each begins with the sum of what the programs before it left, and its norm.
Legend: S steps of history, padded; D width; H width of a head; F of the inner layer; E experts, k of them per step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS, PARTS = 4, 8  # programs: one for each head; of the inner layer
UNROLLED = 64  # steps x experts that are gathered at once: 8 experts spill 712 bytes of registers, 20 steps 7 KB


@triton.jit
def _normed(x, scale, bias, EPS: tl.constexpr, D: tl.constexpr):
    """[S, D] → each row with mean 0 and variance 1, scaled."""
    col = tl.arange(0, D)
    x = x - tl.sum(x, 1)[:, None] / D
    x = x * tl.rsqrt(tl.sum(x * x, 1) / D + EPS)[:, None]
    return x * tl.load(scale + col)[None, :].to(tl.float32) + tl.load(bias + col)[None, :].to(tl.float32)


@triton.jit
def _summed(x, parts, bias, S: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    """What went round a part of a layer, and what its N programs made of it: [S, D]."""
    at = tl.arange(0, S)[:, None] * D + tl.arange(0, D)[None, :]
    total = tl.load(x + at) + tl.load(bias + tl.arange(0, D))[None, :].to(tl.float32)
    for part in tl.static_range(N):
        total += tl.load(parts + part * S * D + at)
    return total


@triton.jit
def _embedded(embedding, expert, E: tl.constexpr, D: tl.constexpr):
    """[S] → [S, D]; an expert that there is not gives nothing."""
    known = (expert >= 0) & (expert < E)
    rows = tl.load(embedding + expert[:, None] * D + tl.arange(0, D)[None, :], mask=known[:, None], other=0.0)
    return rows.to(tl.float32)


@triton.jit(do_not_specialize=["order"])
def _attend(
    routed, stride, order, steps, embedding, embedded_bias, positions, fed, fed_parts, fed_bias, norm, norm_bias, inner,
    inner_bias, outer, x, parts, EPS: tl.constexpr, FIRST: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One head. The first layer reads `routed` [L, k], rows `stride` apart, the second what the first one left."""
    head = tl.program_id(0)
    step, col, own = tl.arange(0, S), tl.arange(0, D), tl.program_id(0) * H + tl.arange(0, H)
    dtype = inner.dtype.element_ty
    if FIRST:
        there = step < steps
        layer = order - steps + 1 + step
        seen = tl.load(positions + step[:, None] * D + col[None, :], mask=there[:, None], other=0.0).to(tl.float32)
        seen += tl.load(embedded_bias + col)[None, :].to(tl.float32)
        rows, shown = routed + layer * stride, there & (layer >= 0)
        if UNROLL:
            for rank in tl.static_range(K):
                seen += _embedded(embedding, tl.load(rows + rank, mask=shown, other=-1), E, D)
        else:
            for rank in range(K):
                seen += _embedded(embedding, tl.load(rows + rank, mask=shown, other=-1), E, D)
    else:
        seen = _normed(_summed(fed, fed_parts, fed_bias, S, D, N), norm, norm_bias, EPS, D)
    if head == 0:
        tl.store(x + step[:, None] * D + col[None, :], seen)
    given = seen.to(dtype)
    at = own[None, :] * D + col[:, None]  # [D, H]
    query = tl.dot(given, tl.load(inner + at)) + tl.load(inner_bias + own)[None, :].to(tl.float32)
    key = tl.dot(given, tl.load(inner + D * D + at)) + tl.load(inner_bias + D + own)[None, :].to(tl.float32)
    value = tl.dot(given, tl.load(inner + 2 * D * D + at)) + tl.load(inner_bias + 2 * D + own)[None, :].to(tl.float32)
    score = tl.dot(query.to(dtype), tl.trans(key.to(dtype))) * (H**-0.5)
    score = tl.where((step < steps)[None, :], score, float("-inf"))
    score = tl.exp(score - tl.max(score, 1)[:, None])
    share = score / tl.sum(score, 1)[:, None]
    heard = tl.dot(share.to(dtype), value.to(dtype))  # [S, H]
    told = tl.dot(heard.to(dtype), tl.load(outer + col[None, :] * D + own[:, None]))
    tl.store(parts + head * S * D + step[:, None] * D + col[None, :], told)


@triton.jit
def _feed(
    x, parts, outer_bias, norm, norm_bias, up, up_bias, down, fed, fed_parts, EPS: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """P of the inner layer's F."""
    part = tl.program_id(0)
    step, col, own = tl.arange(0, S), tl.arange(0, D), tl.program_id(0) * P + tl.arange(0, P)
    dtype = up.dtype.element_ty
    seen = _normed(_summed(x, parts, outer_bias, S, D, N), norm, norm_bias, EPS, D)
    at = step[:, None] * D + col[None, :]
    if part == 0:
        tl.store(fed + at, seen)
    between = tl.dot(seen.to(dtype), tl.load(up + own[None, :] * D + col[:, None]))
    between = tl.maximum(between + tl.load(up_bias + own)[None, :].to(tl.float32), 0.0)
    told = tl.dot(between.to(dtype), tl.load(down + col[None, :] * F + own[:, None]))
    tl.store(fed_parts + part * S * D + at, told)


@triton.jit
def _say(
    steps, fed, fed_parts, fed_bias, norm, norm_bias, out, out_bias, logits, stamp, positions, asked,
    EPS: tl.constexpr, S: tl.constexpr, D: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The last step speaks."""
    col, expert = tl.arange(0, D), tl.arange(0, E_PAD)
    seen = _normed(_summed(fed, fed_parts, fed_bias, S, D, N), norm, norm_bias, EPS, D)
    last = tl.sum(tl.where((tl.arange(0, S) == steps - 1)[:, None], seen, 0.0), 0)  # [D]
    rows = tl.load(out + expert[:, None] * D + col[None, :], mask=(expert < E)[:, None], other=0.0)
    said = tl.sum(rows.to(tl.float32) * last[None, :], 1)
    bias = tl.load(out_bias + expert, mask=expert < E, other=0.0).to(tl.float32)
    tl.store(logits + expert, said + bias, mask=expert < E)
    if asked is not None:
        tl.store(asked, tl.load(stamp))
        tl.store(asked + 1, tl.load(positions))


@dataclass(frozen=True, slots=True)
class Kept:
    """Where an answer stays: logits [1, E] fp32, and when it was given: stamp and position `when` [2] int64, of which
    the step has the first in `stamp`, the second in `positions` [1]."""

    logits: Tensor
    when: Tensor
    stamp: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayer:
    """Of `torch.nn.TransformerEncoderLayer`: what its kernels read."""

    inner: Tensor  # [3 D, D]
    inner_bias: Tensor
    outer: Tensor  # [D, D]
    outer_bias: Tensor
    up: Tensor  # [F, D]
    up_bias: Tensor
    down: Tensor  # [D, F]
    down_bias: Tensor
    norms: tuple[Tensor, Tensor, Tensor, Tensor]  # scale and bias, after attention and at the end

    @classmethod
    def of(cls, state: Mapping[str, Tensor], prefix: str) -> "EncoderLayer":
        def tensor(name: str) -> Tensor:
            return state[f"{prefix}.{name}"].contiguous()

        return cls(
            tensor("self_attn.in_proj_weight"), tensor("self_attn.in_proj_bias"),
            tensor("self_attn.out_proj.weight"), tensor("self_attn.out_proj.bias"), tensor("linear1.weight"),
            tensor("linear1.bias"), tensor("linear2.weight"), tensor("linear2.bias"),
            (tensor("norm1.weight"), tensor("norm1.bias"), tensor("norm2.weight"), tensor("norm2.bias")),
        )  # fmt: skip


class TransformerKernels:
    """The network of a `state_dict` of predict/trajectory_networks.py's ExpertTransformer, for windows of layers.

    Two encoder layers of four heads (how many heads there are no `state_dict` tells); its widths are powers of two.
    """

    def __init__(self, state: Mapping[str, Tensor], steps: int, top_k: int) -> None:
        """`steps` of history, of `top_k` experts each."""
        self._embedding = state["embedding.weight"].T.contiguous()  # [E, D]
        self._embedded_bias, self._positions = state["embedding.bias"], state["positions"].contiguous()
        self._layers = [EncoderLayer.of(state, f"encoder.layers.{number}") for number in range(2)]
        self._out, self._out_bias = state["out.weight"].contiguous(), state["out.bias"]
        (self.experts, width), device = self._embedding.shape, self._embedding.device
        assert steps <= self._positions.shape[1], f"{steps} layers are shown, and there are fewer positions"
        widths = width // HEADS, self._layers[0].up.shape[0] // PARTS
        assert all(each >= 16 and each & (each - 1) == 0 for each in widths), f"no dot has parts of {widths}"
        assert "encoder.layers.2.linear1.weight" not in state, "more than two encoder layers"
        self.steps, self.top_k, self._room = steps, top_k, max(16, triton.next_power_of_2(steps))

        def room(*sizes: int) -> Tensor:
            return torch.zeros(*sizes, self._room, width, dtype=torch.float32, device=device)

        self._x, self._fed, self._parts, self._fed_parts = room(), room(), room(HEADS), room(PARTS)

    def answer(self, routed: Tensor, order: int, kept: Kept | None = None) -> Tensor:
        """`routed` [L, k], -1 for none, of which layer `order` is the last to be shown → logits [1, E] fp32.

        It may lie in pinned memory. One question after the other: its kernels have one place for what they leave.
        """
        assert routed.stride(1) == 1, "a layer's experts lie side by side"
        inner = self._layers[0].up.shape[0]
        width, eps = self._embedding.shape[1], 1e-5
        sizes = {"EPS": eps, "S": self._room, "D": width}
        before: EncoderLayer | None = None
        for layer in self._layers:
            ends = layer if before is None else before  # of the first one it is not read
            _attend[(HEADS,)](
                routed, routed.stride(0), order, self.steps, self._embedding, self._embedded_bias, self._positions,
                self._fed, self._fed_parts, ends.down_bias, *ends.norms[2:], layer.inner, layer.inner_bias, layer.outer,
                self._x, self._parts, FIRST=before is None, H=width // HEADS, E=self.experts, K=self.top_k,
                N=PARTS, UNROLL=self._room * self.top_k <= UNROLLED, **sizes,
            )  # fmt: skip
            _feed[(PARTS,)](
                self._x, self._parts, layer.outer_bias, *layer.norms[:2], layer.up, layer.up_bias, layer.down,
                self._fed, self._fed_parts, F=inner, P=inner // PARTS, N=HEADS, **sizes,
            )  # fmt: skip
            before = layer
        noted: tuple[Tensor | None, ...] = (None,) * 3
        if kept is None:
            logits = torch.empty(1, self.experts, dtype=torch.float32, device=self._x.device)
        else:
            logits, noted = kept.logits, (kept.stamp, kept.positions, kept.when)
        last = self._layers[-1]
        _say[(1,)](
            self.steps, self._fed, self._fed_parts, last.down_bias, *last.norms[2:], self._out, self._out_bias,
            logits, *noted, E=self.experts, E_PAD=triton.next_power_of_2(self.experts), N=PARTS, **sizes,
        )  # fmt: skip
        return logits
