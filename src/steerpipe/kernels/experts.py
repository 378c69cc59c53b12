"""Experts straight from their raw blocks, found through a table of addresses (docs/adr/0008-cuda.md).

Blocks begin at multiples of 16 bytes, tensors are contiguous. Kernels wait for entries of the table that are 0 or
negative (absent), but where they are given what the router read: then a block may lie in pinned memory (`Reads`).
Legend: R rows, k experts per row, P = R · k pairs (pair p is of row p // k), H hidden, I width, E experts, T tiles.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from steerpipe.core.blocks import BlockForm
from steerpipe.kernels.configs import Launch, launch_for
from steerpipe.kernels.dense_configs import overlapped
from steerpipe.kernels.experts_launch import row_constants, tile_constants
from steerpipe.kernels.experts_row import down_row_kernel, gate_up_row_kernel
from steerpipe.kernels.experts_tile import down_tile_kernel, gate_up_tile_kernel
from steerpipe.kernels.tiles import TILE_ROWS, make_tiles

__all__ = ["Reads", "expert_row", "expert_tiles", "make_tiles"]


@dataclass(frozen=True, slots=True)
class Reads:
    """Where a row's blocks are read and kept, as its router found them (kernels/router.py writes both).

    origin [k] int64: an entry of the table; a negative one is an address in pinned memory with its sign bit set, 0
    waits on the table. target [k] int64: where all that is loaded is stored too, at the same offsets; 0: nowhere.
    since [k] int64, of the step `stamp` [1]: where it says how much of a block is in its target already; 0: nothing.
    running [MULTIPROCESSORS] int32: programs of `fetch` that are running, by multiprocessor.
    """

    origin: Tensor
    target: Tensor
    since: Tensor | None = None
    stamp: Tensor | None = None
    running: Tensor | None = None


def expert_row(
    x: Tensor, experts: Tensor, table: Tensor, form: BlockForm,
    *, act: Tensor, part: Tensor, reads: Reads | None = None,
) -> None:  # fmt: skip
    """One row through its experts: x [1, H], experts [k] int32 (-1: the pair is skipped), table [E] int64.

    act [k, I] in x's dtype is scratch, part [k, H] float32 receives the outputs without their gates. With `reads`
    blocks are found there and not in the table: same arithmetic, same bits.
    """
    gate_up, down = launch_for("row_gate_up", form), launch_for("row_down", form)
    gate_up_row(x, experts, table, form, act=act, launch=gate_up, followed=down.overlap, reads=reads)
    down_row(act, experts, table, form, part=part, launch=down, reads=reads)


def gate_up_row(
    x: Tensor, experts: Tensor, table: Tensor, form: BlockForm,
    *, act: Tensor, launch: Launch, followed: bool, reads: Reads | None = None, early: bool = True,
) -> None:  # fmt: skip
    """The first half of `expert_row`. `followed`: what comes next on the stream is a `down_row` that overlaps.

    `early`: it starts with this one; else, where a block comes from pinned memory (`reads`), when every program of this
    one has asked for its first weights: until then there is room on the device for others.
    """
    assert x.shape == (1, form.hidden), f"one row of {form.hidden} is expected, not {list(x.shape)}"
    constants = row_constants(form, launch, down=False, native=x.is_cuda)
    grid = triton.cdiv(form.width, constants["ROWS"]), len(experts)
    found = _found(reads)
    gate_up_row_kernel[grid](
        x, experts, table, act, *found, None if reads is None else reads.running,
        FOLLOWED=followed and overlapped(x), EARLY=early, PAIRS=_pairs(experts, reads), **constants,
    )  # fmt: skip


def down_row(
    act: Tensor, experts: Tensor, table: Tensor, form: BlockForm,
    *, part: Tensor, launch: Launch, reads: Reads | None = None,
) -> None:  # fmt: skip
    """The second half of `expert_row`."""
    constants = row_constants(form, launch, down=True, native=act.is_cuda)
    grid = triton.cdiv(form.hidden, constants["ROWS"]), len(experts)
    found = _found(reads)
    down_row_kernel[grid](act, experts, table, part, *found, PAIRS=_pairs(experts, reads), **constants)


def _pairs(experts: Tensor, reads: Reads | None) -> int:
    """A constant of kernels that read by themselves; others are compiled once for any number."""
    return 0 if reads is None else len(experts)


def _found(reads: Reads | None) -> tuple[Tensor | None, ...]:
    return (None,) * 4 if reads is None else (reads.origin, reads.target, reads.since, reads.stamp)


def expert_tiles(
    x: Tensor, tile_expert: Tensor, tile_pairs: Tensor, table: Tensor, form: BlockForm,
    *, top_k: int, act: Tensor, part: Tensor,
) -> None:  # fmt: skip
    """Tiles of 16 rows through one expert each: x [R, H], tile_expert [T] int32 (-1: unused), table [E] int64.

    tile_pairs [T, 16] int32 names the pairs of a tile, -1 where a place is free. act [P, I] in x's dtype is scratch,
    part [P, H] float32 receives the outputs without their gates. A row's bits do not depend on its neighbours.
    """
    gate_up, down = launch_for("tile_gate_up", form), launch_for("tile_down", form)
    gate_up_tiles(x, tile_expert, tile_pairs, table, form, top_k=top_k, act=act, launch=gate_up)
    down_tiles(act, tile_expert, tile_pairs, table, form, part=part, launch=down)


def gate_up_tiles(
    x: Tensor, tile_expert: Tensor, tile_pairs: Tensor, table: Tensor, form: BlockForm,
    *, top_k: int, act: Tensor, launch: Launch,
) -> None:  # fmt: skip
    """The first half of `expert_tiles`."""
    assert tile_pairs.shape == (len(tile_expert), TILE_ROWS), f"tiles of {list(tile_pairs.shape)} pairs"
    constants = tile_constants(form, launch, down=False, native=x.is_cuda, wide=x.dtype == torch.float32)
    grid = len(tile_expert), triton.cdiv(form.width, constants["ROWS"])
    tiles = tile_expert, tile_pairs
    gate_up_tile_kernel[grid](x, *tiles, table, act, TOP_K=top_k, **constants)


def down_tiles(
    act: Tensor, tile_expert: Tensor, tile_pairs: Tensor, table: Tensor, form: BlockForm,
    *, part: Tensor, launch: Launch,
) -> None:  # fmt: skip
    """The second half of `expert_tiles`."""
    constants = tile_constants(form, launch, down=True, native=act.is_cuda, wide=act.dtype == torch.float32)
    grid = len(tile_expert), triton.cdiv(form.hidden, constants["ROWS"])
    down_tile_kernel[grid](act, tile_expert, tile_pairs, table, part, **constants)
