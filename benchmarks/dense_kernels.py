"""The dense CUDA kernels at the shapes of two models: which launch configuration is fastest, and how near the memory.

    python benchmarks/dense_kernels.py --json dense_kernels.json

Every time is per launch in a CUDA graph, with distinct weights or KV in turn so that nothing comes from the L2. What a
candidate computes is compared with torch before it is timed. "+" is an overlapped launch (dense_configs.OVERLAP).
"""

import argparse
import json
import time
from collections.abc import Sequence

import torch
from kernel_timing import Launch, Table, attempted, check, overlapping, poisoned, random, timed
from torch import Tensor
from torch.nn import functional as F

from steerpipe.kernels import reference
from steerpipe.kernels.attention import decode_attention, scratch_for, splits_for
from steerpipe.kernels.attention_prefill import prefill_attention
from steerpipe.kernels.combine import combine
from steerpipe.kernels.dense_configs import AttentionTile, RowTile
from steerpipe.kernels.linear import row_gated_linear, row_linear
from steerpipe.kernels.rotary import rotate_and_store
from steerpipe.kernels.router import route

BF16, FP32, EPS = torch.bfloat16, torch.float32, 1e-6
COLD_BYTES = 260_000_000  # several times the L2 of an H200
BLOCK = 128
SHARED_DOWN = ((4, 2048, 4), (2, 2048, 2), (8, 512, 4), (16, 512, 4), (2, 8192, 4), (1, 8192, 2))


def copy_rate(table: Table) -> None:
    source = torch.empty(2_000_000_000, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    table.add("copy 2 GB", "", timed([lambda: target.copy_(source)]), 2 * source.nbytes)


def tiles(columns: int, itemsize: int) -> list[RowTile]:
    """Candidates for a product of so many columns, the usual first."""
    wide = 1 << (columns - 1).bit_length()
    rows = max(1, 16384 // (wide * itemsize))
    found = [RowTile(rows, wide, 2), RowTile(rows, wide, 4), RowTile(2 * rows, wide, 4)]
    found += [RowTile(max(1, rows // 2), wide, 1)]
    found += [RowTile(rows, wide, 2, hold=False), RowTile(4, min(wide, 1024), 2), RowTile(8, min(wide, 1024), 4)]
    return list(dict.fromkeys([*found, RowTile(16, min(wide, 512), 4), RowTile(2, min(wide, 2048), 2)]))


def linear_shape(
    table: Table, what: str, outputs: int, inputs: int, candidates: Sequence[RowTile],
    *, dtype: torch.dtype = BF16, normed: bool = False, gated: bool = False, out_dtype: torch.dtype = BF16,
) -> None:  # fmt: skip
    """All candidates as plain launches, the best three overlapped, and cuBLAS."""
    bytes_each = outputs * inputs * dtype.itemsize
    copies = min(256, max(1, COLD_BYTES // bytes_each))
    rounds = max(1, 48 // copies)
    weights = [random(outputs, inputs, dtype=dtype, scale=inputs**-0.5) for _ in range(copies)]
    x, norm = random(1, inputs), random(inputs) if normed else None
    out = poisoned(1, outputs // 2 if gated else outputs, dtype=out_dtype)
    row = x if norm is None else reference.rms_norm(x, norm, EPS)
    want = reference.row_gated_linear(row, weights[0]) if gated else reference.row_linear(row, weights[0], out_dtype)

    def launches(tile: RowTile) -> list[Launch]:
        product = row_gated_linear if gated else row_linear
        return [lambda w=w: product(x, w, out=out, norm=norm, eps=EPS, tile=tile) for w in weights]

    def measured(tile: RowTile, overlap: bool) -> float:
        def measure() -> float:
            out.fill_(torch.nan)
            launches(tile)[0]()
            check(out, want)
            return timed(launches(tile), rounds)

        name = f"{tile.rows}x{tile.columns} {tile.warps}w{'' if tile.hold else ' free'}{' +' if overlap else ''}"
        with overlapping(overlap):
            return attempted(table, what, name, measure, bytes_each)

    if dtype == BF16:
        table.add(what, "cuBLAS", timed([lambda w=w: F.linear(x, w) for w in weights], rounds), bytes_each)
    took = {tile: measured(tile, False) for tile in candidates if not table.late}
    for tile in sorted(took, key=lambda tile: took[tile])[:3]:
        if not table.late:
            measured(tile, True)


def linears(table: Table) -> None:
    few = [RowTile(1, 2048, 2), RowTile(1, 2048, 4), RowTile(1, 2048, 8), RowTile(2, 2048, 4)]
    linear_shape(table, "qkv 5120x2048, norm", 5120, 2048, tiles(2048, 2), normed=True)
    linear_shape(table, "out 2048x4096", 2048, 4096, tiles(4096, 2))
    linear_shape(table, "router 128x2048 fp32, norm", 128, 2048, few, dtype=FP32, normed=True, out_dtype=FP32)
    linear_shape(table, "head 151936x2048, norm", 151_936, 2048, tiles(2048, 2)[:5], normed=True, out_dtype=FP32)
    linear_shape(table, "shared up 11264x2048", 11_264, 2048, tiles(2048, 2)[:4], gated=True)
    linear_shape(table, "shared down 2048x5632", 2048, 5632, [RowTile(*numbers) for numbers in SHARED_DOWN])


def kv_memory(keys: int, kv_heads: int) -> tuple[Tensor, Tensor, list[int]]:
    """Blocks [B, layers, 2, kv_heads, 128, 128], their addresses [1, B], and layer_bytes of cold layers."""
    layer = 2 * kv_heads * BLOCK * 128
    count = -(-keys // BLOCK)
    layers = min(256, max(2, COLD_BYTES // (2 * layer * count)))
    memory = random(count, layers, 2, kv_heads, BLOCK, 128)
    addresses = memory.data_ptr() + torch.randperm(count, device="cuda") * memory[0].nbytes
    return memory, addresses.view(1, -1), [2 * layer * index for index in range(layers)]


def decode(table: Table, heads: int, kv_heads: int, keys: int) -> None:
    memory, blocks, offsets = kv_memory(keys, kv_heads)
    queries, positions = random(1, heads, 128), torch.tensor([keys - 1], device="cuda")
    scratch, out = scratch_for(1, heads, 128, BLOCK, queries.device), poisoned(1, heads * 128)
    order = (blocks[0] - memory.data_ptr()) // memory[0].nbytes
    dense = memory[order, 0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None]  # [2, 1, kv_heads, S, D]
    want = reference.attention(queries, positions, *dense)

    def launch(offset: int, tile: AttentionTile) -> None:
        decode_attention(
            queries, positions, blocks, kv_heads=kv_heads, layer_bytes=offset, splits=splits_for(keys),
            scratch=scratch, out=out, tile=tile,
        )  # fmt: skip

    plans = [(4, 2, False), (4, 2, True)]
    if keys > 128:
        plans += [(4, 1, False), (4, 3, False), (8, 2, False), (2, 2, False)]
    for warps, stages, overlap in plans:
        if table.late:
            return

        def measure(tile: AttentionTile = AttentionTile(warps, stages)) -> float:  # noqa: B008
            out.fill_(torch.nan)
            launch(0, tile)
            check(out, want)
            return timed([lambda o=o: launch(o, tile) for o in offsets])

        name = f"{warps}w {stages}s{' +' if overlap else ''}"
        with overlapping(overlap):
            attempted(table, f"decode {heads}/{kv_heads} {keys} keys", name, measure, keys * kv_heads * 128 * 4)


def prefill(table: Table, heads: int, kv_heads: int, rows: int) -> None:
    memory, blocks, _ = kv_memory(rows, kv_heads)
    queries, positions, out = random(rows, heads, 128), torch.arange(rows, device="cuda"), poisoned(rows, heads * 128)
    for warps, stages in ((4, 2), (4, 3), (8, 2)):
        if table.late:
            return
        tile = AttentionTile(warps, stages)

        def run(tile: AttentionTile = tile) -> None:
            prefill_attention(queries, positions, blocks, base=0, kv_heads=kv_heads, layer_bytes=0, out=out, tile=tile)

        def measure(run: Launch = run) -> float:
            return timed([run])

        attempted(table, f"prefill {heads}/{kv_heads} {rows} rows", f"{warps}w {stages}s", measure)
    assert bool(out.isfinite().all()) and memory.numel() > 0


class LayerChain:
    """The launches of Qwen3-30B layers without their experts; weights and KV are a layer's own, the rest is shared."""

    HIDDEN, HEADS, KV_HEADS, EXPERTS, TOP_K = 2048, 32, 4, 128, 8
    STEPS = ("qkv", "rotate", "attend", "out", "router", "route", "combine")

    def __init__(self, count: int, keys: int) -> None:
        wide, hidden = self.HEADS * 128, self.HIDDEN
        self.keys, self.positions = keys, torch.tensor([keys - 1], device="cuda")
        self.memory, self.blocks, self.offsets = kv_memory(keys, self.KV_HEADS)
        self.qkv_weights = [random(wide + 2 * self.KV_HEADS * 128, hidden, scale=hidden**-0.5) for _ in range(count)]
        self.out_weights = [random(hidden, wide, scale=wide**-0.5) for _ in range(count)]
        self.routers = [random(self.EXPERTS, hidden, dtype=FP32) for _ in range(count)]
        self.norm, self.head_norm, self.turned = random(hidden), random(128), random(1, 2, 64, dtype=FP32)
        self.x, self.normed, self.mixed = random(1, hidden), poisoned(1, hidden), poisoned(1, wide)
        self.heads, self.queries = poisoned(1, len(self.qkv_weights[0])), poisoned(1, self.HEADS, 128)
        self.scratch = scratch_for(1, self.HEADS, 128, BLOCK, self.x.device)
        self.part, self.scores = random(self.TOP_K, hidden, dtype=FP32), poisoned(1, self.EXPERTS, dtype=FP32)
        self.gates, self.chosen = poisoned(1, self.TOP_K, dtype=FP32), torch.zeros(1, self.TOP_K).int().cuda()
        self.mailbox, self.stamp = torch.zeros(self.TOP_K).long().pin_memory(), torch.ones(1).long().cuda()

    def place(self, layer: int) -> dict[str, int]:
        return {"kv_heads": self.KV_HEADS, "layer_bytes": self.offsets[layer % len(self.offsets)]}

    def qkv(self, layer: int) -> None:
        row_linear(self.x, self.qkv_weights[layer], out=self.heads, norm=self.norm, eps=EPS)

    def rotate(self, layer: int) -> None:
        rotate_and_store(
            self.heads, self.turned, self.positions, self.blocks, heads=self.HEADS, queries=self.queries,
            query_norm=self.head_norm, key_norm=self.head_norm, eps=EPS, **self.place(layer),
        )  # fmt: skip

    def attend(self, layer: int) -> None:
        decode_attention(
            self.queries, self.positions, self.blocks, splits=splits_for(self.keys), scratch=self.scratch,
            out=self.mixed, **self.place(layer),
        )  # fmt: skip

    def out(self, layer: int) -> None:
        row_linear(self.mixed, self.out_weights[layer], out=self.x, residual=self.x)

    def router(self, layer: int) -> None:
        row_linear(self.x, self.routers[layer], out=self.scores, norm=self.norm, eps=EPS, normed=self.normed)

    def route(self, layer: int) -> None:
        route(
            self.scores, top_k=self.TOP_K, renormalise=True, experts=self.chosen, gates=self.gates,
            positions=self.positions, mailbox=self.mailbox, stamp=self.stamp,
        )  # fmt: skip

    def combine(self, layer: int) -> None:
        combine(self.part, self.chosen, self.gates, self.x, out=self.x)


def whole_layers(table: Table, count: int = 24) -> None:
    """Each launch of a layer by itself, and whole layers."""
    chain = LayerChain(count, 256)
    for overlap in (False, True):
        mark = "+" if overlap else ""
        with overlapping(overlap):
            for step in chain.STEPS:
                launches = [lambda s=step, i=i: getattr(chain, s)(i) for i in range(count)]
                table.add(f"alone: {step}", mark, timed(launches, 4))
            whole = [lambda s=s, i=i: getattr(chain, s)(i) for i in range(count) for s in chain.STEPS]
            table.add("layer without experts", mark, timed(whole) * len(chain.STEPS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write all results")
    parser.add_argument("--seconds", type=float, default=75.0, help="no candidate is begun after so long")
    options = parser.parse_args()
    table = Table(time.monotonic() + options.seconds)
    print(torch.cuda.get_device_name())
    try:
        copy_rate(table)
        whole_layers(table)
        linears(table)
        for heads, kv_heads in ((32, 4), (16, 16)):
            for keys in (128, 4096, 32_768):
                decode(table, heads, kv_heads, keys)
        prefill(table, 32, 4, 2048)
    finally:
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"device": torch.cuda.get_device_name(), "results": table.rows}, file, indent=1)


if __name__ == "__main__":
    main()
