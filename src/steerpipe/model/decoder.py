"""One decoder for all families: embed, layers of attention and MLP or MoE, norm, head.

R rows (padded to cells), V valid rows, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from steerpipe.core.events import RoutingRecord
from steerpipe.core.protocols import ExpertSource, ForwardTap, OutputSink, RouterProbe, RoutingSink
from steerpipe.model.attention import AttentionWeights, alike, attend, rows_of, store_keys
from steerpipe.model.cells import by_cell
from steerpipe.model.layers import MlpWeights, gated_mlp, rms_norm
from steerpipe.model.misses import MissDesk, Settled
from steerpipe.model.moe import MoeWeights, Route, combine, route_rows, run_experts, run_shared, worth_keeping
from steerpipe.model.rope import RopeTable, rotate
from steerpipe.model.spec import AttentionSpec, ModelSpec, QkNorm
from steerpipe.model.step import StepRows
from steerpipe.model.weights import LayerWeights, ModelWeights

Experts = TypeVar("Experts", contravariant=True)


class StepDecoder(Protocol[Experts]):
    """What an engine drives: `Decoder` over an ExpertSource, `gpu.GpuDecoder` over a BlockSource."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def rows_device(self) -> torch.device:
        """Where the tensors of a StepRows belong."""
        ...

    def forward(
        self, rows: StepRows, experts: Experts, wanted: Sequence[int], sink: RoutingSink | None = None
    ) -> Tensor:
        """Logits [len(wanted), vocab], fp32, of the valid rows `wanted` (indices into `rows.valid`)."""
        ...


@dataclass(frozen=True, slots=True)
class _Watch:
    """Who looks on in one pass."""

    sink: RoutingSink | None
    tap: ForwardTap | None
    misses: MissDesk | None
    outputs: OutputSink | None


class Decoder:
    """Computes logits; owns no sequence state. One thread at a time."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, device: torch.device, tap: ForwardTap | None = None,
        misses: MissDesk | None = None, outputs: OutputSink | None = None,
    ) -> None:  # fmt: skip
        """`tap` watches every pass from inside and changes no number; `misses` does, for experts that are not there.
        `outputs` hears what experts give; with `misses`, that may be what stands in for them.
        """
        self.spec = spec
        self.device = device
        self._tap = tap
        self._misses = misses
        self._outputs = outputs
        self._weights = weights
        self._rope = RopeTable(spec.rope, device)

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embed.dtype

    @property
    def rows_device(self) -> torch.device:
        return self.device

    @torch.inference_mode()
    def forward(
        self, rows: StepRows, experts: ExpertSource, wanted: Sequence[int], sink: RoutingSink | None = None
    ) -> Tensor:
        """Logits [len(wanted), vocab], fp32, of the valid rows `wanted` (indices into `rows.valid`)."""
        watch = self._watch(rows, sink)
        x = F.embedding(rows.tokens, self._weights.embed)  # [R, H]
        turn = self._rope.rows(rows.positions, rows.highest)  # [R, 2, dim / 2]
        for index, layer in enumerate(self._weights.layers):
            if isinstance(layer.mlp, MoeWeights):
                x = self._enter(index, x, rows, watch)
            x = x + self._attention(index, layer, x, turn, rows)
            x = x + self._mlp(index, layer, x, rows, experts, watch)
        if watch.tap is not None:
            watch.tap.end()
        return self._head(x, rows, wanted)

    def _watch(self, rows: StepRows, sink: RoutingSink | None) -> _Watch:
        tap, misses = self._tap, self._misses
        if tap is not None and not tap.begin(rows.sequences, rows.tokens[rows.valid], decode=rows.decode):
            tap = None
        if misses is not None and not misses.begin(rows.sequences, decode=rows.decode):
            misses = None
        return _Watch(sink, tap, misses, self._outputs)

    def _enter(self, index: int, x: Tensor, rows: StepRows, watch: _Watch) -> Tensor:
        """x: [R, H] as it enters a layer with experts."""
        added = watch.misses.mend(index) if watch.misses is not None else None
        if added is not None:
            x = x.index_add(0, rows.valid, added.to(x.dtype))
        if watch.tap is not None:
            watch.tap.entering(index, x.index_select(0, rows.valid))
        return x

    def _attention(self, index: int, layer: LayerWeights, x: Tensor, turn: Tensor, rows: StepRows) -> Tensor:
        spec, weights = self.spec.layers[index].attention, layer.attention

        def project(x: Tensor, turn: Tensor) -> Tensor:  # one cell → [cell, heads + 2 kv_heads, D]
            normed = rms_norm(x, layer.input_norm, self.spec.norm_eps)
            return self._heads(F.linear(normed, weights.qkv, weights.qkv_bias), spec, weights, turn)

        def output(mixed: Tensor) -> Tensor:
            return F.linear(mixed, weights.out, weights.out_bias)

        heads = by_cell(project, x, turn, cell=rows.cell)
        queries, keys, values = torch.split(heads, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        mixed = x.new_zeros(x.shape[0], spec.heads * spec.head_dim)
        for unit in rows.units:
            store_keys(index, unit, keys, values)
        for units in alike(rows.units, spec):
            own = rows_of(units)
            mixed[own] = attend(index, spec, units, queries[own])
        return by_cell(output, mixed, cell=rows.cell)

    def _heads(self, qkv: Tensor, spec: AttentionSpec, weights: AttentionWeights, turn: Tensor) -> Tensor:
        """[R, (heads + 2 kv_heads) D] → normalised, clipped and rotated [R, heads + 2 kv_heads, D]."""
        if spec.qk_norm is not QkNorm.NONE:
            qkv = self._normalise_heads(qkv, spec, weights)
        if spec.clip_qkv is not None:
            qkv = qkv.clamp(-spec.clip_qkv, spec.clip_qkv)
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        rotated = spec.heads + spec.kv_heads
        return torch.cat([rotate(heads[:, :rotated], turn), heads[:, rotated:]], dim=1)

    def _normalise_heads(self, qkv: Tensor, spec: AttentionSpec, weights: AttentionWeights) -> Tensor:
        query_norm, key_norm = weights.query_norm, weights.key_norm
        assert query_norm is not None and key_norm is not None, "a family that normalises has the weights"
        query_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        queries, keys, values = torch.split(qkv, [query_width, kv_width, kv_width], dim=-1)
        if spec.qk_norm is QkNorm.HEAD:
            queries = queries.view(len(qkv), spec.heads, spec.head_dim)
            keys = keys.view(len(qkv), spec.kv_heads, spec.head_dim)
        queries, keys = (rms_norm(t, w, self.spec.norm_eps) for t, w in ((queries, query_norm), (keys, key_norm)))
        return torch.cat([queries.flatten(1), keys.flatten(1), values], dim=-1)

    def _mlp(
        self, index: int, layer: LayerWeights, x: Tensor, rows: StepRows, source: ExpertSource, watch: _Watch
    ) -> Tensor:
        normed = by_cell(lambda r: rms_norm(r, layer.mlp_norm, self.spec.norm_eps), x, cell=rows.cell)
        weights = layer.mlp
        if isinstance(weights, MlpWeights):
            return by_cell(lambda r: gated_mlp(r, weights), normed, cell=rows.cell)
        route = route_rows(normed, weights.router, self.spec.moe(index), rows.valid, rows.cell)
        if watch.sink is not None:
            watch.sink.observe(_record(index, rows, route))
        settled = Settled(route)
        if watch.misses is not None:
            settled = watch.misses.settle(index, normed.index_select(0, rows.valid), route)
        run = settled.route
        total = torch.zeros_like(x, dtype=torch.float32)
        with source.lease(index, settled.leased(), worth_keeping(run, rows.keep_rows)) as lease:
            # what is missing is on its way: time for all that needs none of it
            shared = run_shared(normed, weights, rows.cell) if weights.shared is not None else None
            if watch.tap is not None:
                watch.tap.routed(_probe(index, x, rows, route, shared))
            outputs = run_experts(
                normed, run, rows.valid, lease, cell=rows.cell, stand_ins=settled.stand_ins, nearby=settled.nearby
            )  # [V, k, H]
            total[rows.valid] = combine(outputs, run)
        if watch.outputs is not None:
            watch.outputs.observe(index, run.experts, outputs, decode=rows.decode)
        if shared is not None:
            total = total + shared.float()
        return total.to(x.dtype)

    def _head(self, x: Tensor, rows: StepRows, wanted: Sequence[int]) -> Tensor:
        picked = rows.valid[torch.tensor(wanted, dtype=torch.int64, device=self.device)]  # rows of x
        needed = sorted({row // rows.cell for row in picked.tolist()})
        found: dict[int, Tensor] = {}
        for cell in needed:  # only the cells that hold a wanted row
            part = rms_norm(x[cell * rows.cell : (cell + 1) * rows.cell], self._weights.final_norm, self.spec.norm_eps)
            found[cell] = F.linear(part, self._weights.head).float()
        logits = [found[row // rows.cell][row % rows.cell] for row in picked.tolist()]
        return torch.stack(logits) if logits else x.new_empty(0, self.spec.vocab, dtype=torch.float32)


def _probe(layer: int, x: Tensor, rows: StepRows, route: Route, shared: Tensor | None) -> RouterProbe:
    picked = None if shared is None else shared.index_select(0, rows.valid)
    return RouterProbe(layer, x.index_select(0, rows.valid), route.experts, route.gates, picked)


def _record(layer: int, rows: StepRows, route: Route) -> RoutingRecord:
    return RoutingRecord(
        layer=layer,
        sequences=rows.sequences,
        positions=rows.positions[rows.valid].cpu().numpy(),
        experts=route.experts.cpu().numpy(),
        weights=route.gates.cpu().numpy(),
    )
