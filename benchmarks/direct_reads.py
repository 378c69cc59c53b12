"""What a layer costs that reads experts from pinned memory: the route, the expert kernels alone, and whole steps.

    PYTHONPATH=src python benchmarks/direct_reads.py [--shape qwen1.5-moe] [--format int4] [--json PATH]

Every layer misses the same number of experts: 0, 1, 2 or all of its top-k. The slope between two of these numbers is
what one missing expert costs, and holds against its bytes over the link's rate; what is left is the layer's own.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from steerpipe.bench.budgets import Ladder
from steerpipe.bench.rates import timed
from steerpipe.bench.residents import ResidentBlocks
from steerpipe.bench.rig import Rig
from steerpipe.bench.routing import Routing
from steerpipe.bench.shapes import Shape, make_shape
from steerpipe.core.blocks import BlockSource
from steerpipe.kernels.experts import Reads, expert_row
from steerpipe.kernels.router import Tickets, route
from steerpipe.store.formats import parse_expert_format

CUDA = torch.device("cuda")
PINNED = -(1 << 63)
LAUNCHES = 24  # in one graph
Figures = dict[str, float]  # microseconds per layer


def in_graph(run: Callable[[int], None]) -> float:
    """Microseconds of one of LAUNCHES calls, captured together."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(LAUNCHES):
            run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(LAUNCHES):
            run(index)
    return statistics.median(timed(graph.replay, CUDA, rounds=15)) * 1e6 / LAUNCHES


def routes(shape: Shape) -> Figures:
    experts, top_k = shape.moe.experts, shape.moe.top_k
    logits = torch.randn(1, experts, device=CUDA)
    chosen = torch.zeros(1, top_k, dtype=torch.int32, device=CUDA)
    gates, mailbox = torch.zeros(1, top_k, device=CUDA), torch.zeros(top_k, dtype=torch.int64, pin_memory=True)
    here, ring, tail, head, origin, target = (
        torch.full((count,), 4096, dtype=torch.int64, device=CUDA) for count in (experts, 64, 1, 1, top_k, top_k)
    )
    zero = torch.zeros(1, dtype=torch.int64, device=CUDA)

    def run(tickets: Tickets | None) -> float:
        return in_graph(
            lambda _: route(
                logits, top_k=top_k, renormalise=False, experts=chosen, gates=gates, positions=zero, mailbox=mailbox,
                stamp=zero, tickets=tickets,
            )
        )  # fmt: skip

    return {"route": run(None), "route with tickets": run(Tickets(here, ring, tail, head, origin, target))}


def kernels(shape: Shape, ladder: Ladder, source: BlockSource) -> Figures:
    """gate/up and down of one row; missing blocks are drawn from all that are pinned."""
    random, form, top_k = np.random.default_rng(0), shape.layout.form, shape.moe.top_k
    x = torch.randn(1, shape.spec.hidden, device=CUDA).bfloat16()
    act = torch.empty(top_k, shape.moe.width, dtype=x.dtype, device=CUDA)
    part = torch.empty(top_k, shape.spec.hidden, device=CUDA)
    ids = torch.arange(top_k, dtype=torch.int32, device=CUDA)
    table = source.table(shape.spec.moe_layers[0])  # nobody looks there
    kept = torch.empty(2 * top_k, shape.layout.block_bytes, dtype=torch.uint8, device=CUDA)

    def reads(layer: int, missed: int) -> Reads:
        there = source.table(shape.spec.moe_layers[layer % shape.layers])[:top_k].tolist()
        far = [ladder.backing.view(int(each)) | PINNED for each in random.integers(shape.all_experts, size=missed)]
        into = [kept[(layer * top_k + rank) % len(kept)].data_ptr() for rank in range(missed)]
        origin, target = [*far, *there[missed:]], [*into, *[0] * (top_k - missed)]
        return Reads(torch.tensor(origin, device=CUDA), torch.tensor(target, device=CUDA))

    found = {}
    for missed in sorted({0, 1, 2, top_k}):
        layers = [reads(layer, missed) for layer in range(LAUNCHES)]
        found[f"kernels, {missed} missing"] = in_graph(
            lambda index: expert_row(x, ids, table, form, act=act, part=part, reads=layers[index])  # noqa: B023
        )
    return found


def steps(shape: Shape, ladder: Ladder) -> Figures:
    """Whole steps, divided by the layers: the host's part is in them."""
    rig = Rig(shape, CUDA, torch.bfloat16, sequences=1, tokens=512, kernels=True)
    kvs = [rig.sequence(128)]

    def median(source: BlockSource, missed: int) -> float:
        seconds: list[float] = []
        for first, count in ((0, 24), (24, 60)):  # the first to warm up
            kvs[0].truncate(128)
            seconds = rig.decode(source, kvs, always_missing(shape, missed), first, count)
        return statistics.median(seconds) * 1e6 / shape.layers

    resident = ResidentBlocks(shape, CUDA)
    found = {"step, resident": median(resident, 0)}
    resident.close()
    rig.forget()
    with ladder.open(shape.all_experts // 4, "lru", "direct") as source:
        for missed in sorted({0, 1, 2, shape.moe.top_k}):
            found[f"step, {missed} missing"] = median(source, missed)
    return found


def always_missing(shape: Shape, missed: int) -> Routing:
    """Each layer goes round its experts with `missed` of its ranks, and always has the others."""
    experts, top_k = shape.moe.experts, shape.moe.top_k
    ids = np.broadcast_to(experts - 1 - np.arange(top_k), (256, shape.layers, top_k)).copy()
    turn = np.arange(256)[:, None] * missed + np.arange(missed)
    ids[:, :, :missed] = (turn % (experts - top_k))[:, None, :]
    return Routing(f"{missed} of {top_k} missing", ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen1.5-moe")
    parser.add_argument("--format", default="int4")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    expert_format = parse_expert_format(given.format)
    assert expert_format is not None, "a format of its own"
    shape = make_shape(given.shape, expert_format, 1024)
    with Ladder(shape, CUDA) as ladder:
        link = ladder.measure_link()
        found = {"one block over the link": shape.layout.block_bytes / link * 1e6, **routes(shape)}
        resident = ResidentBlocks(shape, CUDA)
        found |= kernels(shape, ladder, resident)
        resident.close()
        found |= steps(shape, ladder)
    print(f"{given.shape} {given.format}, us per layer; link {link / 1e9:.1f} GB/s")
    for name, microseconds in found.items():
        print(f"  {name:28} {microseconds:8.1f}")
    if given.json:
        given.json.write_text(json.dumps({"link_bytes_per_second": link, "us_per_layer": found}, indent=1))


if __name__ == "__main__":
    main()
