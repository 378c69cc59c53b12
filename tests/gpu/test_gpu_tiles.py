"""Tiles of a prompt, built on the device as it is compiled, and in a graph. Legend: R rows, k experts per row."""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from steerpipe.kernels import reference_experts as reference
from steerpipe.kernels.experts import expert_tiles
from steerpipe.kernels.tiles import align_tiles, tiles_for
from steerpipe.model.gpu.tiles import Tiles
from tests.kernels.expert_slots import distance, fill_slots, poisoned

pytestmark = pytest.mark.gpu

CUDA = "cuda"
SHAPES = [(17, 2, 5), (512, 8, 128), (33, 3, 60), (1, 1, 1), (2048, 1, 2), (4112, 8, 128), (4096, 4, 60)]


def drawn(rows: int, top_k: int, experts: int) -> Tensor:
    """[R, k] int32, with rows of padding and pairs that are left out."""
    chosen = torch.rand(rows, experts).argsort(1)[:, :top_k].int()
    chosen[rows // 2] = -1
    chosen[torch.rand(rows, top_k) < 0.1] = -1
    return chosen.to(CUDA)


def buffers(rows: int, top_k: int, experts: int) -> dict[str, Tensor]:
    tiles = tiles_for(rows, top_k, experts)
    shapes = {"counts": (experts,), "tile_expert": (tiles,), "tile_pairs": (tiles, 16)}
    return {name: torch.full(shape, 99, dtype=torch.int32, device=CUDA) for name, shape in shapes.items()}


def check(chosen: Tensor, experts: int, out: dict[str, Tensor]) -> None:
    wanted_expert, wanted_pairs = Tiles(chosen.cpu().numpy().reshape(-1), experts).of(range(experts))
    used = len(wanted_expert)
    tile_expert, tile_pairs = out["tile_expert"].cpu(), out["tile_pairs"].cpu()
    assert torch.equal(tile_expert[:used], torch.from_numpy(wanted_expert))
    assert torch.equal(tile_pairs[:used], torch.from_numpy(wanted_pairs))
    assert (tile_expert[used:] == -1).all() and (tile_pairs[used:] == -1).all()


@pytest.mark.parametrize(("rows", "top_k", "experts"), SHAPES)
def test_tiles_are_those_that_the_host_would_build(rows: int, top_k: int, experts: int) -> None:
    chosen, out = drawn(rows, top_k, experts), buffers(rows, top_k, experts)
    align_tiles(chosen, **out)
    check(chosen, experts, out)


def test_all_pairs_of_one_expert_and_none_at_all() -> None:
    for expert in (0, 127, -1):
        chosen, out = torch.full((2500, 8), expert, dtype=torch.int32, device=CUDA), buffers(2500, 8, 128)
        align_tiles(chosen, **out)
        check(chosen, 128, out)


def test_a_graph_builds_them_anew_for_other_experts() -> None:
    chosen, out = drawn(512, 8, 128), buffers(512, 8, 128)
    align_tiles(chosen, **out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        align_tiles(chosen, **out)
    for _ in range(3):
        chosen.copy_(drawn(512, 8, 128))
        for each in out.values():
            each.fill_(99)
        graph.replay()
        check(chosen, 128, out)


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_a_prompt_through_all_tiles_equals_the_reference(kind: str) -> None:
    slots = fill_slots(kind, 640, 1408, 9, device=CUDA)
    x = torch.randn(77, 640, device=CUDA).bfloat16()
    chosen, out = drawn(77, 3, 9), buffers(77, 3, 9)
    align_tiles(chosen, **out)
    act, part = poisoned(231, 1408, dtype=x.dtype, device=CUDA), poisoned(231, 640, device=CUDA)
    tiles = out["tile_expert"], out["tile_pairs"]
    expert_tiles(x, *tiles, slots.table, slots.form, top_k=3, act=act, part=part)
    real = chosen.flatten() >= 0
    wanted = reference.expert_pairs(x, chosen, slots.blocks, slots.form, torch.float64)[1]
    assert distance(part[real], wanted[real]) < 1e-2
    assert part[~real].isnan().all(), "what is left out is not touched"
