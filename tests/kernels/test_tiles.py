"""Tiles of a prompt, built by kernels: every pair once, in order. Legend: R rows, k experts per row, T tiles."""

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe.kernels import reference_experts as reference
from steerpipe.kernels.experts import expert_tiles
from steerpipe.kernels.tiles import align_tiles, tiles_for
from steerpipe.model.gpu.tiles import Tiles
from tests.kernels.expert_slots import distance, fill_slots, poisoned

POISON = 77


def aligned(chosen: Tensor, experts: int, spare: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    tiles = tiles_for(*chosen.shape, experts) + spare
    counts = torch.full((experts,), POISON, dtype=torch.int32)
    tile_expert = torch.full((tiles,), POISON, dtype=torch.int32)
    tile_pairs = torch.full((tiles, 16), POISON, dtype=torch.int32)
    align_tiles(chosen, counts=counts, tile_expert=tile_expert, tile_pairs=tile_pairs)
    return counts, tile_expert, tile_pairs


def drawn(rows: int, top_k: int, experts: int) -> Tensor:
    """[R, k] int32, with rows of padding and pairs that are left out."""
    chosen = torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)]).int()
    chosen[rows // 2] = -1
    chosen[torch.rand(rows, top_k) < 0.1] = -1
    return chosen


@pytest.mark.parametrize(
    ("rows", "top_k", "experts"), [(17, 2, 5), (48, 4, 10), (33, 3, 60), (1, 1, 1), (70, 1, 2), (300, 8, 9)]
)
def test_tiles_are_those_that_the_host_would_build(rows: int, top_k: int, experts: int) -> None:
    chosen = drawn(rows, top_k, experts)
    counts, tile_expert, tile_pairs = aligned(chosen, experts, spare=3)
    wanted_expert, wanted_pairs = Tiles(chosen.numpy().reshape(-1), experts).of(range(experts))
    used = len(wanted_expert)
    assert torch.equal(tile_expert[:used], torch.from_numpy(wanted_expert))
    assert torch.equal(tile_pairs[:used], torch.from_numpy(wanted_pairs))
    assert (tile_expert[used:] == -1).all() and (tile_pairs[used:] == -1).all(), "the other tiles are unused"
    assert counts.tolist() == np.bincount(chosen[chosen >= 0].numpy(), minlength=experts).tolist()


@pytest.mark.parametrize("alone", [0, 4, 6])
def test_all_pairs_of_one_expert(alone: int) -> None:
    """Of 7 experts; 2064 pairs are more than a program looks at in one go."""
    chosen = torch.full((2064, 1), alone, dtype=torch.int32)
    counts, tile_expert, tile_pairs = aligned(chosen, 7)
    assert counts.tolist() == [2064 * (expert == alone) for expert in range(7)]
    assert tile_expert.tolist() == [alone] * 129 + [-1] * 7
    assert torch.equal(tile_pairs[:129].flatten(), torch.arange(2064, dtype=torch.int32))


def test_nothing_to_compute_is_no_tile() -> None:
    counts, tile_expert, tile_pairs = aligned(torch.full((20, 2), -1, dtype=torch.int32), 4)
    assert not counts.any() and (tile_expert == -1).all() and (tile_pairs == -1).all()


def test_every_expert_may_have_a_tile_that_is_not_full() -> None:
    """17 pairs each: two tiles, the most that `tiles_for` allows for."""
    chosen = torch.arange(5, dtype=torch.int32).repeat(17).view(-1, 1)
    _, tile_expert, tile_pairs = aligned(chosen, 5)
    assert tile_expert[:10].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert ((tile_pairs >= 0).sum(1)[:10] == torch.tensor([16, 1] * 5)).all()


def test_too_few_tiles_are_refused() -> None:
    tiles = torch.empty(6, dtype=torch.int32), torch.empty(6, 16, dtype=torch.int32)
    with pytest.raises(AssertionError, match="too few"):
        align_tiles(
            torch.zeros(33, 1, dtype=torch.int32), counts=torch.empty(4, dtype=torch.int32), tile_expert=tiles[0],
            tile_pairs=tiles[1],
        )  # fmt: skip


def test_a_prompt_through_all_tiles_equals_the_reference() -> None:
    slots = fill_slots("int4", 64, 32, 5)
    x, chosen = torch.randn(20, 64), drawn(20, 2, 5)
    _, *tiles = aligned(chosen, 5)
    act, part = poisoned(40, 32), poisoned(40, 64)
    expert_tiles(x, *tiles, slots.table, slots.form, top_k=2, act=act, part=part)
    real = chosen.flatten() >= 0
    assert distance(part[real], reference.expert_pairs(x, chosen, slots.blocks, slots.form)[1][real]) < 1e-6
    assert part[~real].isnan().all()
