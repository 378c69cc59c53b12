"""Which rows go through which expert together.

Legend: R rows, k experts per row, P = R · k pairs (pair p is of row p // k), E experts, T tiles.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 16
_SCANNED = 2048  # pairs that a program looks at in one go


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


@triton.jit
def _count_kernel(experts, counts, pairs, BLOCK: tl.constexpr):
    """How many pairs each expert has: one program per expert, which looks at all of them."""
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found += (tl.load(experts + at, at < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit
def _fill(tile_expert, tile_pairs, first, last, expert, used, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Tiles `first` to `last` are the expert's; their places are free from `used` on."""
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(tile_expert + at, tl.zeros((BLOCK,), tl.int32) + expert, at < last)
    for start in range(first * ROWS + used, last * ROWS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(tile_pairs + at, tl.zeros((BLOCK,), tl.int32) - 1, at < last * ROWS)


@triton.jit
def _place_kernel(
    experts, counts, tile_expert, tile_pairs, pairs, tiles,
    EXPERTS: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program per expert, and one for the tiles that nobody needs."""
    expert = tl.program_id(0)
    everyone = tl.arange(0, ALL)
    needed = (tl.load(counts + everyone, everyone < EXPERTS, other=0) + ROWS - 1) // ROWS  # [E] tiles
    first = tl.sum(tl.where(everyone < expert, needed, 0), 0)
    if expert == EXPERTS:
        _fill(tile_expert, tile_pairs, first, tiles, -1, 0, 64, ROWS)
    else:
        used = 0
        for start in range(0, pairs, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mine = tl.load(experts + at, at < pairs, other=-1) == expert
            place = used + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(tile_pairs + first * ROWS + place, at, mine)
            used += tl.sum(mine.to(tl.int32), 0)
        _fill(tile_expert, tile_pairs, first, first + (used + ROWS - 1) // ROWS, expert, used, 64, ROWS)


def tiles_for(rows: int, top_k: int, experts: int) -> int:
    """As many tiles as `align_tiles` may need: every expert may have one that is not full."""
    return experts + triton.cdiv(rows * top_k, TILE_ROWS)


def align_tiles(experts: Tensor, *, counts: Tensor, tile_expert: Tensor, tile_pairs: Tensor) -> None:
    """experts [R, k] int32 (-1: none) → tile_expert [T] int32, tile_pairs [T, 16] int32, for any R.

    In ascending order of experts; an expert's tiles hold its pairs in ascending order and are full but for the last.
    The tiles behind are -1. T is `tiles_for` at least. counts [E] int32 receives the pairs of each expert.
    """
    rows, top_k = experts.shape
    count, tiles = len(counts), len(tile_expert)
    assert tile_pairs.shape == (tiles, TILE_ROWS), f"tiles of {list(tile_pairs.shape)} pairs"
    assert tiles >= tiles_for(rows, top_k, count), f"{tiles} tiles may be too few for {rows} rows"
    block = min(_SCANNED, triton.next_power_of_2(rows * top_k))
    _count_kernel[(count,)](experts, counts, rows * top_k, BLOCK=block, num_warps=4)
    _place_kernel[(count + 1,)](
        experts, counts, tile_expert, tile_pairs, rows * top_k, tiles,
        EXPERTS=count, ALL=triton.next_power_of_2(count), BLOCK=block, ROWS=TILE_ROWS, num_warps=4,
    )  # fmt: skip
