"""How long the expert kernels of one step take by themselves: all layers in one graph, with nothing between them.

That is what the on-demand floor takes off the resident step, and what is held against the memory's rate. Weights differ
from step to step (a step's blocks are many times the cache), as in real decode. Legend: R rows, L MoE layers, k top-k.
"""

import statistics
from collections.abc import Callable

import torch

from steerpipe.bench.rates import timed
from steerpipe.bench.rig import Rig
from steerpipe.bench.routing import Routing
from steerpipe.core.blocks import BlockSource
from steerpipe.model.cells import CELL

_STEPS = 16


def expert_kernel_seconds(rig: Rig, source: BlockSource, routing: Routing, rows: int) -> float:
    """The median of some steps. `source` is resident: no kernel waits."""
    from steerpipe.model.gpu.experts import Direct
    from steerpipe.model.gpu.rows import routing_buffer

    assert source.resident, "kernels that wait are not timed alone"
    shape, laid = rig.shape, 1 if rows == 1 else CELL
    top_k, width = shape.moe.top_k, shape.moe.width
    ids = routing_buffer(shape.layers, laid, top_k, torch.int32, rig.device)  # [L, R, k]
    x = torch.ones(laid, shape.spec.hidden, dtype=rig.dtype, device=rig.device)
    act = torch.empty(laid * top_k, width, dtype=rig.dtype, device=rig.device)
    part = torch.empty(laid * top_k, shape.spec.hidden, dtype=torch.float32, device=rig.device)
    direct = Direct(source)

    def all_layers() -> None:
        for order, layer in enumerate(shape.spec.moe_layers):
            direct.run(layer, order, x, ids[order], act=act, part=part)

    run = _captured(all_layers, rig.device)
    seconds = []
    for step in range(_STEPS if rig.device.type == "cuda" else 1):
        ids[:, :rows] = torch.from_numpy(routing.step(step, rows)).to(rig.device)
        seconds.extend(timed(run, rig.device, rounds=1))
    return statistics.median(seconds)


def _captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same work as one graph; on a CPU as it is."""
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay
