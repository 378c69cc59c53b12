"""The layers of a model as a sequence of kernel launches: the same for a captured graph and for leases.

Nothing here waits for the device or reads from it. Legend: R rows, H hidden, E experts, k experts per row, D head
width, P = R · k pairs.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from steerpipe.kernels.attention import AttentionScratch, decode_attention, scratch_for, splits_for
from steerpipe.kernels.attention_prefill import prefill_attention
from steerpipe.kernels.combine import combine
from steerpipe.kernels.rotary import rotate_and_store
from steerpipe.kernels.router import Tickets, route
from steerpipe.model.gpu.dense import Dense, ManyRows, OneRow
from steerpipe.model.gpu.fetching import Fetching
from steerpipe.model.gpu.rows import Step, room_for
from steerpipe.model.gpu.tap import Forecaster, Sighted, Tap
from steerpipe.model.kv_cache import BLOCK, KvPool
from steerpipe.model.layers import MlpWeights
from steerpipe.model.moe import MoeWeights
from steerpipe.model.rope import RopeTable
from steerpipe.model.spec import AttentionSpec, ModelSpec
from steerpipe.model.weights import LayerWeights, ModelWeights


class ExpertRun(Protocol):
    """How the experts of a layer are computed once its router has chosen."""

    def tickets(self, layer: int, order: int) -> Tickets | None:
        """What the router needs where it takes slots for what is missing; None: it only chooses."""
        ...

    def begin(self, layer: int, experts: Tensor) -> None:
        """experts [R, k] int32 are queued. What follows until `run` does not depend on any expert."""
        ...

    def run(self, layer: int, order: int, x: Tensor, experts: Tensor, *, act: Tensor, part: Tensor) -> None:
        """x [R, H] → part [P, H] fp32, one row per pair; act [P, I] is scratch. Pairs of expert -1 are left out."""
        ...


class Network:
    """Weights, rotary table and KV layout of one model on one device. One thread."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, pool: KvPool, device: torch.device) -> None:
        self.spec = spec
        self._weights = weights
        self._layer_bytes = pool.layer_bytes
        self._order = {layer: at for at, layer in enumerate(spec.moe_layers)}
        self._one, self._many = OneRow(spec.norm_eps), ManyRows(spec.norm_eps)
        self.reach = min(spec.max_context, pool.capacity_blocks * BLOCK)  # positions that a sequence can have
        self._turns = _turns(spec, self.reach, device)
        self._scratch: dict[tuple[int, int, int], AttentionScratch] = {}

    def hidden(self, step: Step, experts: ExpertRun) -> Tensor:
        """Queues all layers: [R, H], before the last norm."""
        dense, clock = self._dense(step.rows), step.clock
        if clock is not None:
            clock.begin()
        x = F.embedding(step.tokens, self._weights.embed)  # [R, H]
        turn = self._turns.index_select(0, step.turns)  # [R, 2, dim / 2]
        for index, layer in enumerate(self._weights.layers):
            if clock is not None:
                clock.mark(f"layer {index}: attention and router")
            if step.watch is not None and isinstance(layer.mlp, MoeWeights):
                x = step.watch.enter(index, x)
            x = self._attention(index, layer, dense, x, turn, step)
            x = self._mlp(index, layer, dense, x, step, experts)
        if clock is not None:
            clock.mark("")
        if step.tap is not None:
            step.tap.join()
        if step.reuse is not None:
            step.reuse.join()
        if step.watch is not None:
            step.watch.end()
        return x

    def tap(self, forecaster: Forecaster, fetching: Fetching | None = None) -> Tap:
        """Its branch in the graphs of one row. `fetching`: what it names is sent for on the device."""
        return Tap(self.spec, self._weights, forecaster, self._weights.embed.dtype, self._turns.device, fetching)

    def head(self, x: Tensor) -> Tensor:
        """Logits of rows of `hidden`: [R, vocab], fp32."""
        return self._dense(x.shape[0]).head(x, self._weights.final_norm, self._weights.head)

    def _dense(self, rows: int) -> Dense:
        return self._one if rows == 1 else self._many

    def _attention(
        self, index: int, layer: LayerWeights, dense: Dense, x: Tensor, turn: Tensor, step: Step
    ) -> Tensor:  # fmt: skip
        spec, weights = self.spec.layers[index].attention, layer.attention
        qkv = dense.project(x, layer.input_norm, weights.qkv, weights.qkv_bias)  # [R, (heads + 2 kv_heads) D]
        queries = x.new_empty(step.rows, spec.heads, spec.head_dim)
        rotate_and_store(
            qkv, turn, step.positions, step.blocks, heads=spec.heads, kv_heads=spec.kv_heads,
            layer_bytes=self._layer_bytes[index], queries=queries, query_norm=weights.query_norm,
            key_norm=weights.key_norm, eps=self.spec.norm_eps, clip=spec.clip_qkv,
        )  # fmt: skip
        mixed = x.new_empty(step.rows, spec.heads * spec.head_dim)
        self._attend(index, spec, queries, step, mixed)
        return dense.add(x, mixed, weights.out, weights.out_bias)

    def _attend(self, index: int, spec: AttentionSpec, queries: Tensor, step: Step, out: Tensor) -> None:
        layer_bytes = self._layer_bytes[index]
        if step.base is not None:
            prefill_attention(
                queries, step.positions, step.blocks, kv_heads=spec.kv_heads, layer_bytes=layer_bytes,
                window=spec.window, base=step.base, out=out,
            )  # fmt: skip
            return
        decode_attention(
            queries, step.positions, step.blocks, kv_heads=spec.kv_heads, layer_bytes=layer_bytes,
            window=spec.window, splits=step.splits, scratch=self._scratch_of(step.rows, spec), out=out,
        )  # fmt: skip

    def _scratch_of(self, rows: int, spec: AttentionSpec) -> AttentionScratch:
        """Partial sums of decode attention; one for all layers, which come one after the other."""
        key = (rows, spec.heads, spec.head_dim)
        if key not in self._scratch:
            self._scratch[key] = scratch_for(*key, splits_for(room_for(self.reach)), self._turns.device)
        return self._scratch[key]

    def _mlp(
        self, index: int, layer: LayerWeights, dense: Dense, x: Tensor, step: Step, experts: ExpertRun
    ) -> Tensor:  # fmt: skip
        weights = layer.mlp
        if isinstance(weights, MlpWeights):
            return dense.add(x, dense.gated(x, layer.mlp_norm, weights), weights.down, None)
        spec, order = self.spec.moe(index), self._order[index]
        normed, logits = dense.score(x, layer.mlp_norm, weights.router)
        shared = _Shared(normed, weights, dense, step.side)
        chosen, gates = step.experts[order], step.gates[order]  # [R, k]
        if step.tap is not None and step.tap.decides(order):
            step.tap.await_said()  # chosen and gates are what the tap before named
        else:
            route(
                logits, top_k=spec.top_k, renormalise=spec.renormalise, experts=chosen, gates=gates,
                positions=step.positions, mailbox=None if step.mailbox is None else step.mailbox[order],
                stamp=None if step.mailbox is None else step.stamp,
                forced=None if step.forced is None else step.forced[order], tickets=experts.tickets(index, order),
            )  # fmt: skip
        experts.begin(index, chosen)
        shared.begin()
        if step.watch is not None:
            chosen, gates = step.watch.settle(index, Sighted(order, x, normed, *shared.queued, chosen, gates))
        if step.tap is not None:
            step.tap.look(Sighted(order, x, normed, *shared.queued, chosen, gates), step)
        if step.reuse is not None:
            step.reuse.look(order, x, step)
        if step.clock is not None:
            step.clock.mark(f"layer {index}: experts")
        pairs = step.rows * spec.top_k
        part = x.new_empty(pairs, x.shape[1], dtype=torch.float32)
        experts.run(index, order, normed, chosen, act=x.new_empty(pairs, spec.width), part=part)
        out = torch.empty_like(x)
        value, switch = shared.join()
        combine(part, chosen, gates, x, out=out, shared=value, shared_switch=switch)
        return out


class _Shared:
    """The shared expert of a layer, where there is one: on a branch of its own, or in the order of the stream.

    It takes 18 us at Qwen1.5-MoE's shape, and the link has nothing to do if missing experts are read only after it.
    """

    def __init__(self, x: Tensor, weights: MoeWeights, dense: Dense, side: torch.cuda.Stream | None) -> None:
        """On a branch it is queued now. `x` [R, H] has to stay until `join`."""
        self._value: Tensor | None = None  # [R, H]
        self._switch: Tensor | None = None  # [R, 1]
        self._x, self._weights, self._dense = x, weights, dense
        self._side = None if weights.shared is None else side
        self._done: torch.cuda.Event | None = None
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._queue()
            self._done = torch.cuda.Event()
            self._done.record(self._side)

    def begin(self) -> None:
        """The routers' choice is on its way to the host: without a branch it is queued now."""
        if self._side is None:
            self._queue()

    @property
    def queued(self) -> tuple[Tensor | None, Tensor | None]:
        """Its output and its switch, for what is queued behind it."""
        return self._value, self._switch

    def join(self) -> tuple[Tensor | None, Tensor | None]:
        """The same, for what is queued from now on; what else runs on the branch is not waited for."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return self.queued

    def _queue(self) -> None:
        shared, switch = self._weights.shared, self._weights.shared_switch
        if shared is not None and switch is not None:
            self._switch = self._dense.linear(self._x, switch)
            self._value = self._dense.linear(self._dense.gated(self._x, None, shared), shared.down)


def _turns(spec: ModelSpec, reach: int, device: torch.device) -> Tensor:
    """[reach, 2, dim / 2]: all of it at once, because a captured graph must not see the table move."""
    return RopeTable(spec.rope, device).rows(torch.arange(reach, device=device), reach - 1)
