"""The rows of one pass, from the engine's StepRows to tensors that kernels and captured graphs read.

All integers of a pass travel in one buffer: stamp, tokens, positions, places in the rotary table, block addresses. A
pass is a prompt chunk, one row of decode, or a cell of 16. Legend: R rows, V valid rows, L MoE layers, k experts per
row, B KV blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.kernels.attention import splits_for
from steerpipe.model.cells import CELL
from steerpipe.model.kv_cache import BLOCK, KvSequence
from steerpipe.model.step import StepRows

if TYPE_CHECKING:
    from steerpipe.model.gpu.clock import Clock
    from steerpipe.model.gpu.lossy import Watched
    from steerpipe.model.gpu.reuse import ReuseBranch
    from steerpipe.model.gpu.tap import Tap

SMALLEST_ROOM = 1024  # keys; attention that ends early costs next to nothing, and a graph less is a pause less
_FIRST_ROW = np.zeros(1, dtype=np.int64)
_STAMP_WORDS = 2  # one is used; what follows stays aligned to 16 bytes, which kernels are compiled for


@dataclass(frozen=True, slots=True)
class Pass:
    """What is computed together, on the host."""

    tokens: NDArray[np.int64]  # [R]; 0 in padding
    positions: NDArray[np.int64]  # [R]; -1 in padding
    valid: NDArray[np.int64]  # [V]: which rows are real
    kvs: tuple[KvSequence, ...]  # of each valid row; of a prompt chunk the one that all rows belong to
    base: int | None  # the position of row 0 of a prompt chunk; None: decode
    keep_rows: int  # see StepRows

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def keys(self) -> int:
        """Of the longest row."""
        return int(self.positions.max()) + 1


def room_for(keys: int) -> int:
    """Rounded up to a power of two, so that a growing context meets few graphs. No bit depends on it."""
    return max(SMALLEST_ROOM, 1 << (keys - 1).bit_length())


def passes(rows: StepRows) -> Iterator[Pass]:
    """A prompt chunk is one pass; decode takes its cells one after the other."""
    if rows.cell == 1:  # between two tokens the device waits for this
        yield Pass(np.array(rows.ids), np.array(rows.at), _FIRST_ROW, (rows.units[0].kv,), None, 1)
        return
    tokens, valid = np.array(rows.ids), np.array(rows.real)
    positions = np.full_like(tokens, -1)
    positions[valid] = np.array(rows.at)[valid]
    if rows.units[0].rows == rows.cell == CELL:
        yield Pass(tokens, positions, valid, (rows.units[0].kv,), rows.units[0].position, rows.keep_rows)
        return
    for first in range(0, len(tokens), rows.cell):
        own = slice(first, first + rows.cell)
        units = rows.units[own]
        place = np.arange(len(units))
        yield Pass(tokens[own], positions[own], place, tuple(unit.kv for unit in units), None, len(units))


@dataclass(frozen=True, slots=True)
class Step:
    """What a pass computes with, on the device. Buffers that belong to a captured graph are always the same."""

    stamp: Tensor  # [1] int64
    tokens: Tensor  # [R] int64
    positions: Tensor  # [R] int64; -1 in padding
    turns: Tensor  # [R] int64: rows of the rotary table
    blocks: Tensor  # [R or 1, B] int64: addresses
    experts: Tensor  # [L, R, k] int32: what the routers choose
    gates: Tensor  # [L, R, k] fp32
    base: int | None
    room: int  # keys that decode attention is launched for
    mailbox: Tensor | None = None  # [L, R · k] int64, pinned
    forced: Tensor | None = None  # [L, R, k] int32
    side: torch.cuda.Stream | None = None  # where the shared expert runs, beside routed ones; None: before them
    tap: "Tap | None" = None  # who predicts at every router; for one row
    clock: "Clock | None" = None  # who writes down when the parts of the step ran
    watch: "Watched | None" = None  # who answers for missing experts, or looks on; never in a graph
    reuse: "ReuseBranch | None" = None  # who says how soon experts are used again; for one row

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def splits(self) -> int:
        return splits_for(self.room)


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the integers of a pass lie in its buffer."""

    rows: int
    lanes: int  # block lists: one per row, or one for all
    columns: int  # blocks of a list

    @classmethod
    def of(cls, rows: Pass) -> "Packing":
        return cls.of_size(rows.rows, rows.keys, lanes=1 if rows.base is not None else rows.rows)

    @classmethod
    def of_size(cls, rows: int, keys: int, lanes: int) -> "Packing":
        return cls(rows, lanes, -(-keys // BLOCK // 16) * 16)  # Triton compiles another kernel for other strides

    @property
    def words(self) -> int:
        return self._list_start + self.lanes * self.columns

    @property
    def _stride(self) -> int:
        return self.rows + self.rows % 2

    @property
    def _list_start(self) -> int:
        return _STAMP_WORDS + 3 * self._stride

    def write(self, rows: Pass, stamp: int, out: NDArray[np.int64]) -> None:
        out[0] = stamp
        for part, values in enumerate((rows.tokens, rows.positions, np.maximum(rows.positions, 0))):
            start = _STAMP_WORDS + part * self._stride
            out[start : start + self.rows] = values
        lists = out[self._list_start : self.words].reshape(self.lanes, self.columns)
        for lane, kv in enumerate(rows.kvs):
            addresses = kv.addresses
            lists[lane, : len(addresses)] = addresses

    def views(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """stamp, tokens, positions, turns, blocks."""
        parts = [_STAMP_WORDS + part * self._stride for part in range(3)]
        tokens, positions, turns = (memory[start : start + self.rows] for start in parts)
        lists = memory[self._list_start : self.words].view(self.lanes, self.columns)
        return memory[:1], tokens, positions, turns, lists


class Picked:
    """A copy of some rows of what is computed later. Made before that is queued: afterwards nothing is allocated and
    nothing waits."""

    def __init__(self, x: Tensor, places: NDArray[np.int64]) -> None:
        first, count = int(places[0]) if len(places) else 0, len(places)
        self._source, self._index = x, None
        if count == len(x) == 1:
            self.rows = torch.empty_like(x)
            return
        self.rows = x.new_empty(count, *x.shape[1:])
        if np.array_equal(places, np.arange(first, first + count)):
            self._source = x[first : first + count]
        else:
            self._index = torch.from_numpy(places).to(x.device)  # waits for the device

    def queue(self) -> None:
        """`rows` hold them for what is queued behind it."""
        if self._index is None:
            self.rows.copy_(self._source, non_blocking=True)
        else:
            torch.index_select(self._source, 0, self._index, out=self.rows)


def routing_buffer(layers: int, rows: int, top_k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[L, R, k], each layer's part aligned to 16 bytes: kernels are compiled once, not once per alignment."""
    pairs = rows * top_k
    padded = pairs + -pairs % 4
    memory = torch.full((layers, padded), -1, dtype=dtype, device=device)
    return memory.as_strided((layers, rows, top_k), (padded, top_k, 1))
