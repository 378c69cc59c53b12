"""Tiles of 16 rows through one expert each, against torch. Legend: R rows, k experts per row, P pairs, T tiles."""

import pytest
import torch
from torch import Tensor

from steerpipe.kernels import reference_experts as reference
from steerpipe.kernels.configs import Launch
from steerpipe.kernels.experts import down_tiles, expert_tiles, gate_up_tiles, make_tiles
from tests.kernels.expert_slots import Slots, distance, fill_slots, poisoned

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")
NEAR = 1e-6  # of float32 arithmetic
ROUNDED = 0.04  # the interpreter truncates to bfloat16, weights too

ROUTED = torch.tensor([[1, 4], [4, 0], [-1, -1], [0, 1], [3, -1]], dtype=torch.int32)


def run(x: Tensor, experts: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    tile_expert, tile_pairs = reference.make_tiles(experts, min(len(slots.table), experts.numel()))
    act = poisoned(experts.numel(), slots.form.width, dtype=x.dtype)
    part = poisoned(experts.numel(), slots.form.hidden)
    tiles = tile_expert, tile_pairs
    expert_tiles(x, *tiles, slots.table, slots.form, top_k=experts.shape[1], act=act, part=part)
    return act, part


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_pair_gets_what_the_reference_gives(kind: str, dtype: torch.dtype) -> None:
    slots = fill_slots(kind, 80, 48, 5)
    x = torch.randn(5, 80).to(dtype)
    act, part = run(x, ROUTED, slots)
    wanted_act, wanted_part = reference.expert_pairs(x, ROUTED, slots.blocks, slots.form)
    real = ROUTED.flatten() >= 0
    limit = NEAR if dtype == torch.float32 else ROUNDED
    assert distance(act[real], wanted_act[real]) < limit
    assert distance(part[real], wanted_part[real]) < limit
    assert act[~real].isnan().all(), "padding rows and free places are not touched"
    assert part[~real].isnan().all()


@pytest.mark.parametrize(("hidden", "width", "group"), [(96, 48, 24), (40, 20, 10), (128, 64, 64)])
def test_any_even_group_of_int4_will_do(hidden: int, width: int, group: int) -> None:
    slots = fill_slots("int4", hidden, width, 2, group=group)
    x, experts = torch.randn(2, hidden), torch.tensor([[1], [0]], dtype=torch.int32)
    _, part = run(x, experts, slots)
    assert distance(part, reference.expert_pairs(x, experts, slots.blocks, slots.form)[1]) < NEAR


@pytest.mark.parametrize("kind", ["float16", "int8", "int4"])
def test_steps_and_blocks_that_do_not_divide_the_matrix(kind: str) -> None:
    slots = fill_slots(kind, 80, 48, 1)
    x, launch = torch.randn(2, 80), Launch(rows=32, columns=32, warps=4)
    tiles = torch.tensor([0], dtype=torch.int32), torch.tensor([[0, 1, *[-1] * 14]], dtype=torch.int32)
    act, part = poisoned(2, 48), poisoned(2, 80)
    gate_up_tiles(x, *tiles, slots.table, slots.form, top_k=1, act=act, launch=launch)
    down_tiles(act, *tiles, slots.table, slots.form, part=part, launch=launch)
    experts = torch.zeros(2, 1, dtype=torch.int32)
    assert distance(part, reference.expert_pairs(x, experts, slots.blocks, slots.form)[1]) < NEAR


@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_a_row_has_the_same_bits_whatever_its_neighbours_place_and_tile(kind: str) -> None:
    """20 pairs of one expert in two tiles, then one of them alone, in another place of another tile."""
    slots = fill_slots(kind, 64, 32, 2)
    x = torch.randn(20, 64)
    full = torch.full((3, 16), -1, dtype=torch.int32)
    full[0], full[2, 5:9] = torch.arange(16), torch.arange(16, 20)
    alone = torch.full((3, 16), -1, dtype=torch.int32)
    alone[1, 9] = 17
    parts = []
    for tile_expert, tile_pairs in (([1, -1, 1], full), ([-1, 1, -1], alone)):
        act, part = poisoned(20, 32), poisoned(20, 64)
        chosen = torch.tensor(tile_expert, dtype=torch.int32)
        expert_tiles(x, chosen, tile_pairs, slots.table, slots.form, top_k=1, act=act, part=part)
        parts.append(part)
        x = x * torch.where(torch.arange(20) == 17, 1.0, -7.0)[:, None]
    assert not parts[0].isnan().any()
    assert torch.equal(parts[0][17], parts[1][17])
    assert parts[1][torch.arange(20) != 17].isnan().all()


@pytest.mark.parametrize(("rows", "top_k", "experts"), [(16, 4, 10), (1, 1, 3), (5, 3, 64), (16, 2, 2)])
def test_tiles_hold_the_experts_in_use_in_ascending_order(rows: int, top_k: int, experts: int) -> None:
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)]).int()  # [R, k]
    chosen[rows // 2] = -1  # padding
    count = min(experts, rows * top_k)
    tile_expert = torch.full((count,), 77, dtype=torch.int32)
    tile_pairs = torch.full((count, 16), 77, dtype=torch.int32)
    make_tiles(chosen, tile_expert=tile_expert, tile_pairs=tile_pairs)
    wanted_expert, wanted_pairs = reference.make_tiles(chosen, count)
    assert torch.equal(tile_expert, wanted_expert)
    assert torch.equal(tile_pairs, wanted_pairs)
