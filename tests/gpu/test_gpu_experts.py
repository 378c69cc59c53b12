"""Expert kernels as they are compiled: against torch in float64, bits, graphs, waiting. Legend: R rows, k experts."""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from dataclasses import replace

from steerpipe.kernels import reference_experts as reference
from steerpipe.kernels.configs import LAUNCHES, Launch
from steerpipe.kernels.experts import down_row, expert_row, expert_tiles, gate_up_row, make_tiles
from tests.kernels.expert_slots import Slots, distance, fill_slots, poisoned

pytestmark = pytest.mark.gpu

CUDA = "cuda"
FORMATS = ["float32", "bfloat16", "float16", "int8", "int4"]
EXACT = {"int4": 1e-4}  # float32 rows; sums of int4 lose six bits (experts_blocks)
ROUNDED = 3e-3  # bfloat16 activations
ROUNDED_WEIGHTS = 1e-2  # and weights rounded to bfloat16

every_format = pytest.mark.parametrize("kind", FORMATS)
every_case = pytest.mark.parametrize(
    ("kind", "hidden", "width", "dtype"),
    [(kind, 80, 48, dtype) for kind in FORMATS for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    + [(kind, 2048, 768, torch.bfloat16) for kind in FORMATS]
    + [(kind, 640, 1408, torch.bfloat16) for kind in FORMATS[-2:]],
)


def run_row(x: Tensor, experts: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    act = poisoned(len(experts), slots.form.width, dtype=x.dtype, device=CUDA)
    part = poisoned(len(experts), slots.form.hidden, device=CUDA)
    expert_row(x, experts, slots.table, slots.form, act=act, part=part)
    return act, part


def run_tiles(x: Tensor, experts: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    count = min(len(slots.table), experts.numel())
    tile_expert = torch.full((count,), 99, dtype=torch.int32, device=CUDA)
    tile_pairs = torch.full((count, 16), 99, dtype=torch.int32, device=CUDA)
    make_tiles(experts, tile_expert=tile_expert, tile_pairs=tile_pairs)
    act = poisoned(experts.numel(), slots.form.width, dtype=x.dtype, device=CUDA)
    part = poisoned(experts.numel(), slots.form.hidden, device=CUDA)
    tiles = tile_expert, tile_pairs
    expert_tiles(x, *tiles, slots.table, slots.form, top_k=experts.shape[1], act=act, part=part)
    return act, part


def rows_of(count: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, hidden, device=CUDA).to(dtype)


def ids(*experts: int) -> Tensor:
    return torch.tensor(experts, dtype=torch.int32, device=CUDA)


@every_case
def test_one_row_equals_the_reference(kind: str, hidden: int, width: int, dtype: torch.dtype) -> None:
    slots = fill_slots(kind, hidden, width, 4, device=CUDA)
    x, experts = rows_of(1, hidden, dtype), ids(2, -1, 0, 3)
    act, part = run_row(x, experts, slots)
    wanted = reference.expert_pairs(x, experts.view(1, -1), slots.blocks, slots.form, torch.float64)
    limit = EXACT.get(kind, 1e-5) if dtype == torch.float32 else ROUNDED
    for got, right in zip((act, part), wanted, strict=True):
        assert got[1].isnan().all(), "the skipped pair is not touched"
        assert distance(got[[0, 2, 3]], right[[0, 2, 3]]) < limit


@every_case
def test_tiles_equal_the_reference(kind: str, hidden: int, width: int, dtype: torch.dtype) -> None:
    slots = fill_slots(kind, hidden, width, 5, device=CUDA)
    x = rows_of(7, hidden, dtype)
    experts = torch.stack([torch.randperm(5)[:3] for _ in range(7)]).int().to(CUDA)
    experts[4] = -1
    act, part = run_tiles(x, experts, slots)
    wanted = reference.expert_pairs(x, experts, slots.blocks, slots.form, torch.float64)
    real = experts.flatten() >= 0
    limit = 1e-5 if dtype == torch.float32 else ROUNDED_WEIGHTS
    for got, right in zip((act, part), wanted, strict=True):
        assert got[~real].isnan().all(), "padding is not touched"
        assert distance(got[real], right[real]) < limit


@pytest.mark.parametrize(("hidden", "width", "group"), [(96, 48, 24), (40, 20, 10), (128, 64, 16), (256, 128, 32)])
def test_any_even_group_of_int4_will_do(hidden: int, width: int, group: int) -> None:
    slots = fill_slots("int4", hidden, width, 2, group=group, device=CUDA)
    x, experts = rows_of(2, hidden, torch.float32), ids(1, 0).view(2, 1)
    wanted = reference.expert_pairs(x, experts, slots.blocks, slots.form, torch.float64)[1]
    assert distance(run_tiles(x, experts, slots)[1], wanted) < 1e-5
    assert distance(run_row(x[:1], experts[0], slots)[1], wanted[:1]) < EXACT["int4"]


@pytest.mark.parametrize(("rows", "top_k", "experts"), [(16, 8, 128), (1, 1, 3), (5, 4, 60), (16, 2, 2)])
def test_tiles_hold_the_experts_in_use(rows: int, top_k: int, experts: int) -> None:
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)]).int()
    chosen[rows // 2] = -1
    count = min(experts, rows * top_k)
    tile_expert = torch.full((count,), 99, dtype=torch.int32, device=CUDA)
    tile_pairs = torch.full((count, 16), 99, dtype=torch.int32, device=CUDA)
    make_tiles(chosen.to(CUDA), tile_expert=tile_expert, tile_pairs=tile_pairs)
    wanted_expert, wanted_pairs = reference.make_tiles(chosen, count)
    assert torch.equal(tile_expert.cpu(), wanted_expert)
    assert torch.equal(tile_pairs.cpu(), wanted_pairs)


@every_format
def test_bits_depend_on_neither_slot_place_nor_neighbours(kind: str) -> None:
    slots, other = fill_slots(kind, 2048, 768, 6, device=CUDA), fill_slots(kind, 2048, 768, 6, device=CUDA)
    x = rows_of(16, 2048)
    _, one = run_row(x[:1], ids(5, 2, 0), slots)
    _, two = run_row(x[:1], ids(-1, 0, 4, 2), other)
    assert torch.equal(one[1], two[3]) and torch.equal(one[2], two[1])
    experts = torch.stack([torch.randperm(6)[:2] for _ in range(16)]).int().to(CUDA)
    _, many = run_tiles(x, experts, slots)
    alone = torch.full_like(experts, -1)
    alone[9] = experts[9]
    _, few = run_tiles(torch.where(torch.arange(16, device=CUDA)[:, None] == 9, x, -3 * x), alone, other)
    assert torch.equal(many[18:20], few[18:20])


@every_format
def test_a_captured_graph_gives_the_same_bits(kind: str) -> None:
    slots = fill_slots(kind, 2048, 768, 8, device=CUDA)
    x, experts = rows_of(1, 2048), ids(*range(8))
    _, eager = run_row(x, experts, slots)
    act, part = poisoned(8, 768, dtype=x.dtype, device=CUDA), poisoned(8, 2048, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expert_row(x, experts, slots.table, slots.form, act=act, part=part)
    for _ in range(3):
        part.fill_(torch.nan)
        graph.replay()
    assert torch.equal(part, eager)


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_an_overlapping_launch_gives_the_same_bits(kind: str) -> None:
    slots = fill_slots(kind, 2048, 768, 8, device=CUDA)
    x, experts = rows_of(1, 2048), ids(*range(8))
    parts = []
    for overlap in (False, True):
        gate_up = replace(LAUNCHES["row_gate_up", kind], overlap=overlap)
        down = replace(LAUNCHES["row_down", kind], overlap=overlap)
        act, part = poisoned(8, 768, dtype=x.dtype, device=CUDA), poisoned(8, 2048, device=CUDA)
        graph = torch.cuda.CUDAGraph()
        run_row(x, experts, slots)
        _both(x, experts, slots, act, part, gate_up, down)  # compiles
        with torch.cuda.graph(graph):
            for _ in range(20):
                _both(x, experts, slots, act, part, gate_up, down)
        for _ in range(10):
            act.fill_(torch.nan)
            part.fill_(torch.nan)
            graph.replay()
        parts.append(part)
    assert torch.equal(parts[0], parts[1])
    assert not parts[1].isnan().any()


def _both(x: Tensor, experts: Tensor, slots: Slots, act: Tensor, part: Tensor, gate_up: Launch, down: Launch) -> None:
    gate_up_row(x, experts, slots.table, slots.form, act=act, launch=gate_up, followed=down.overlap)
    down_row(act, experts, slots.table, slots.form, part=part, launch=down)


@pytest.mark.parametrize("rows", [1, 3])
def test_kernels_wait_for_an_address_that_comes_later(rows: int) -> None:
    slots = fill_slots("bfloat16", 256, 128, 4, device=CUDA)
    x, experts = rows_of(rows, 256), ids(*([3, 0, 1] * rows)).view(rows, 3)

    def run() -> Tensor:
        return run_row(x, experts[0], slots)[1] if rows == 1 else run_tiles(x, experts, slots)[1]

    right = run()  # compiles
    address = slots.table[[0]].cpu().pin_memory()
    slots.table[0] = 0
    torch.cuda.synchronize()
    later = torch.cuda.Stream()
    done = torch.cuda.Event()
    got = run()
    done.record()
    before = done.query()
    with torch.cuda.stream(later):
        slots.table[:1].copy_(address, non_blocking=True)
    torch.cuda.synchronize()
    assert not before, "the kernels did not wait"
    assert torch.equal(got, right)
