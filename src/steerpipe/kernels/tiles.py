"""Which rows go through which expert together. Legend: R rows, k experts per row, P = R · k pairs, T tiles."""

import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 16


@triton.jit
def _make_tiles_kernel(
    experts, tile_expert, tile_pairs, PAIRS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Tile t is that of the t-th expert in use. Nothing is scattered: every program looks at all pairs."""
    tile = tl.program_id(0)
    pairs = tl.arange(0, BLOCK)
    expert = tl.load(experts + pairs, pairs < PAIRS, other=-1)  # [P]
    same_before = (expert[:, None] == expert[None, :]) & (pairs[:, None] < pairs[None, :])  # [P, P]
    first = (tl.sum(same_before.to(tl.int32), 0) == 0) & (expert >= 0)  # the first pair of its expert
    below = (expert[None, :] < expert[:, None]) & first[None, :]  # [P, P]
    mine = (tl.sum(below.to(tl.int32), 1) == tile) & (expert >= 0)
    rows = tl.arange(0, ROWS)
    places = mine[:, None] & ((pairs // TOP_K)[:, None] == rows[None, :])  # [P, 16]
    tl.store(tile_expert + tile, tl.max(tl.where(mine, expert, -1), 0))
    tl.store(tile_pairs + tile * ROWS + rows, tl.max(tl.where(places, pairs[:, None], -1), 0))


def make_tiles(experts: Tensor, *, tile_expert: Tensor, tile_pairs: Tensor) -> None:
    """experts [R <= 16, k] int32 (-1: none) → tile_expert [T] int32, tile_pairs [T, 16] int32.

    The experts in use come first, in ascending order, one tile each; the other tiles are -1. A pair stands in the
    place of its row. T must reach for all of them: min(E, R · k) always does.
    """
    rows, top_k = experts.shape
    assert rows <= TILE_ROWS, f"{rows} rows do not fit a tile of {TILE_ROWS}"
    assert tile_pairs.shape == (len(tile_expert), TILE_ROWS), f"tiles of {list(tile_pairs.shape)} pairs"
    _make_tiles_kernel[(len(tile_expert),)](
        experts, tile_expert, tile_pairs,
        PAIRS=rows * top_k, TOP_K=top_k, BLOCK=triton.next_power_of_2(rows * top_k), ROWS=TILE_ROWS, num_warps=4,
    )  # fmt: skip
