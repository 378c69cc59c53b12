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
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import ExpertSource, RoutingSink
from steerpipe.model.attention import AttentionUnit, AttentionWeights, attend, store_keys
from steerpipe.model.cells import CELL, by_cell, padded
from steerpipe.model.kv_cache import KvSequence
from steerpipe.model.layers import MlpWeights, gated_mlp, rms_norm
from steerpipe.model.moe import Route, route_rows, run_experts, run_shared
from steerpipe.model.rope import RopeTable, rotate
from steerpipe.model.spec import AttentionSpec, ModelSpec, QkNorm
from steerpipe.model.weights import LayerWeights, ModelWeights

Experts = TypeVar("Experts", contravariant=True)
PROMPT_TAIL = 4  # tokens; 4 of top-4 touch about a quarter of 60 experts, what a tight budget holds


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one forward pass and where they stand. KV room for them has been appended already."""

    tokens: Tensor  # [R] int64; 0 in padding
    positions: Tensor  # [R] int64; 0 in padding
    valid: Tensor  # [V] int64: which rows are real
    sequences: tuple[SequenceId, ...]  # of each valid row
    units: tuple[AttentionUnit, ...]
    cell: int  # 16, or 1 for one-row decode
    highest: int  # largest position
    keep_rows: int  # so many of the last valid rows say which experts the tokens to come may need


def prefill_rows(
    sequence: SequenceId, kv: KvSequence, tokens: Sequence[int], device: torch.device, *, last: bool = True
) -> StepRows:
    """The next `tokens` of one sequence, in padded cells at absolute positions; `last` if the prompt ends with them.

    Appends to `kv`.
    """
    start = kv.length
    kv.append(len(tokens))
    base = start - start % CELL
    rows = padded(start + len(tokens)) - base
    lead = start - base
    laid = torch.zeros(rows, dtype=torch.int64)
    laid[lead : lead + len(tokens)] = torch.tensor(tokens)
    units = tuple(
        AttentionUnit(kv, row, CELL, base + row, (max(lead - row, 0), min(lead + len(tokens) - row, CELL)))
        for row in range(0, rows, CELL)
    )
    return StepRows(
        tokens=laid.to(device),
        positions=torch.arange(base, base + rows, device=device),
        valid=torch.arange(lead, lead + len(tokens), device=device),
        sequences=(sequence,) * len(tokens),
        units=units,
        cell=CELL,
        highest=base + rows - 1,
        keep_rows=PROMPT_TAIL if last else 0,
    )


def decode_rows(
    sequences: Sequence[SequenceId],
    kvs: Sequence[KvSequence],
    tokens: Sequence[int],
    device: torch.device,
    *,
    cell: int,
) -> StepRows:
    """One token of each sequence. `cell` 1 is the one-row class and takes one sequence. Appends to every kv."""
    assert cell == CELL or len(sequences) == 1, "the one-row class decodes one sequence"
    count = len(sequences)
    rows = -(-count // cell) * cell
    appended: list[KvSequence] = []
    try:
        for kv in kvs:
            kv.append(1)
            appended.append(kv)
    except Exception:
        for kv in appended:
            kv.truncate(kv.length - 1)
        raise
    at = [kv.length - 1 for kv in kvs]
    padding = [0] * (rows - count)
    return StepRows(
        tokens=torch.tensor([*tokens, *padding], device=device),
        positions=torch.tensor([*at, *padding], device=device),
        valid=torch.arange(count, device=device),
        sequences=tuple(sequences),
        units=tuple(AttentionUnit(kv, row, 1, at[row], (0, 1)) for row, kv in enumerate(kvs)),
        cell=cell,
        highest=max(at),
        keep_rows=count,
    )


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


class Decoder:
    """Computes logits; owns no sequence state. One thread at a time."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, device: torch.device) -> None:
        self.spec = spec
        self.device = device
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
        x = F.embedding(rows.tokens, self._weights.embed)  # [R, H]
        turn = self._rope.rows(rows.positions, rows.highest)  # [R, 2, dim / 2]
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attention(index, layer, x, turn, rows)
            x = x + self._mlp(index, layer, x, rows, experts, sink)
        return self._head(x, rows, wanted)

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
            own = slice(unit.row, unit.row + unit.rows)
            mixed[own] = attend(index, spec, unit, queries[own])
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
        self, index: int, layer: LayerWeights, x: Tensor, rows: StepRows, source: ExpertSource, sink: RoutingSink | None
    ) -> Tensor:
        normed = by_cell(lambda r: rms_norm(r, layer.mlp_norm, self.spec.norm_eps), x, cell=rows.cell)
        weights = layer.mlp
        if isinstance(weights, MlpWeights):
            return by_cell(lambda r: gated_mlp(r, weights), normed, cell=rows.cell)
        route = route_rows(normed, weights.router, self.spec.moe(index), rows.valid, rows.cell)
        if sink is not None:
            sink.observe(_record(index, rows, route))
        total = torch.zeros_like(x, dtype=torch.float32)
        total[rows.valid] = run_experts(
            normed, route, rows.valid, source, index, cell=rows.cell, keep_rows=rows.keep_rows
        )
        if weights.shared is not None:
            total = total + run_shared(normed, weights, rows.cell).float()
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


def _record(layer: int, rows: StepRows, route: Route) -> RoutingRecord:
    return RoutingRecord(
        layer=layer,
        sequences=rows.sequences,
        positions=rows.positions[rows.valid].cpu().numpy(),
        experts=route.experts.cpu().numpy(),
        weights=route.gates.cpu().numpy(),
    )
