"""Experts of one layer from raw blocks: at once, where the table holds them or soon will, or by lease in waves.

Legend: R rows, H hidden, E experts, k experts per row, P = R · k pairs, T tiles of 16 pairs.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.blocks import BlockForm, BlockLease, BlockSource
from steerpipe.kernels.experts import expert_row, expert_tiles, make_tiles
from steerpipe.kernels.hold import hold
from steerpipe.kernels.tiles import align_tiles, tiles_for
from steerpipe.model.cells import CELL
from steerpipe.model.gpu.tiles import Tiles, TileStaging


def run_pairs(
    x: Tensor, experts: Tensor, table: Tensor, form: BlockForm, *, act: Tensor, part: Tensor
) -> None:  # fmt: skip
    """All pairs whose expert is not -1. Kernels wait for absent entries of the table; nothing waits for the host."""
    if x.shape[0] == 1:
        expert_row(x, experts.view(-1), table, form, act=act, part=part)
        return
    cell = x.shape[0] <= CELL
    count = min(table.shape[0], experts.numel()) if cell else tiles_for(x.shape[0], experts.shape[1], table.shape[0])
    tile_expert = torch.empty(count, dtype=torch.int32, device=x.device)
    tile_pairs = torch.empty(count, CELL, dtype=torch.int32, device=x.device)
    if cell:
        make_tiles(experts, tile_expert=tile_expert, tile_pairs=tile_pairs)
    else:
        counts = torch.empty(table.shape[0], dtype=torch.int32, device=x.device)
        align_tiles(experts, counts=counts, tile_expert=tile_expert, tile_pairs=tile_pairs)
    expert_tiles(x, tile_expert, tile_pairs, table, form, top_k=experts.shape[1], act=act, part=part)


class Direct:
    """Experts through the table, whatever it holds: kernels wait for what is missing. For a pass of any size.

    A prompt goes this way where everything is resident: more of it would wait than there is place for on the device.
    """

    def __init__(self, source: BlockSource) -> None:
        self._source = source

    def tickets(self, layer: int, order: int) -> None:
        return None

    def begin(self, layer: int, experts: Tensor) -> None:
        pass

    def run(self, layer: int, order: int, x: Tensor, experts: Tensor, *, act: Tensor, part: Tensor) -> None:
        table = self._source.table(layer)
        run_pairs(x, experts, table, self._source.form(layer), act=act, part=part)


class Held(Direct):
    """As Direct, for one row beside which somebody predicts: its experts start when all of them are here.

    Kernels of experts that wait fill the device, and predictors found no place there until the blocks had come.
    """

    def __init__(self, source: BlockSource, top_k: int, device: torch.device) -> None:
        super().__init__(source)
        self._seen = torch.zeros(top_k, dtype=torch.int64, device=device)

    def run(self, layer: int, order: int, x: Tensor, experts: Tensor, *, act: Tensor, part: Tensor) -> None:
        hold(experts.view(-1), self._source.table(layer), seen=self._seen)
        super().run(layer, order, x, experts, act=act, part=part)


class Leased:
    """Experts by lease: the choice is read back, and each wave is queued as it comes. For one pass of any size."""

    def __init__(self, source: BlockSource, valid: NDArray[np.int64], keep_rows: int, device: torch.device) -> None:
        """`valid` [V] are the real rows; the experts of the last `keep_rows` of them are worth keeping."""
        self._source = source
        self._valid = valid
        self._keep_rows = keep_rows
        self._cuda = device.type == "cuda"
        self._staging = TileStaging(device)
        self._chosen: Tensor | None = None  # [R, k] int32 on the host, under way
        self._ready = torch.cuda.Event() if self._cuda else None

    def tickets(self, layer: int, order: int) -> None:
        return None

    def begin(self, layer: int, experts: Tensor) -> None:
        if self._chosen is None:
            self._chosen = torch.empty(experts.shape, dtype=torch.int32, pin_memory=self._cuda)
        self._chosen.copy_(experts, non_blocking=True)
        if self._ready is not None:
            self._ready.record()

    def run(self, layer: int, order: int, x: Tensor, experts: Tensor, *, act: Tensor, part: Tensor) -> None:
        self.run_chosen(layer, x, experts, self._read(), act=act, part=part)

    def run_chosen(
        self, layer: int, x: Tensor, experts: Tensor | None, chosen: NDArray[np.int32], *, act: Tensor, part: Tensor
    ) -> None:
        """`chosen` [R, k] was read back, so everything queued before has run; -1: left out. `experts`: the same on the
        device, where it is there.
        """
        self._staging.reset()
        routed = np.unique(chosen[self._valid])
        routed = routed[routed >= 0]
        keep = None
        if self._keep_rows < len(self._valid):
            keep = set(chosen[self._valid[len(self._valid) - self._keep_rows :]].flatten().tolist()) - {-1}
        table, form = self._source.table(layer), self._source.form(layer)
        tiles = Tiles(chosen.reshape(-1), table.shape[0]) if x.shape[0] > CELL else None
        with self._source.lease(layer, routed.tolist(), keep) as lease:
            for wave in lease.waves():
                if tiles is not None:
                    tile_expert, tile_pairs = self._staging.send(*tiles.of(wave))
                    expert_tiles(
                        x, tile_expert, tile_pairs, table, form, top_k=chosen.shape[1], act=act, part=part
                    )  # fmt: skip
                else:
                    own = experts if len(wave) == len(routed) else None
                    own = self._staging.send_ids(_only(chosen, wave)) if own is None else own
                    run_pairs(x, own, table, form, act=act, part=part)

    def _read(self) -> NDArray[np.int32]:
        assert self._chosen is not None, "run comes after begin"
        if self._ready is not None:
            self._ready.synchronize()
        return self._chosen.numpy()


def _only(chosen: NDArray[np.int32], wave: Collection[int]) -> NDArray[np.int32]:
    """[R, k]: the experts of this wave, -1 elsewhere."""
    return np.where(np.isin(chosen, list(wave)), chosen, np.int32(-1))


class NoBlocks:
    """A BlockSource for models without experts."""

    resident = True
    landing = None

    def form(self, layer: int) -> NoReturn:
        raise AssertionError(f"layer {layer} has no experts")

    table = form

    def lease(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None
    ) -> AbstractContextManager[BlockLease]:
        self.form(layer)

    def serves(self, experts_per_layer: int) -> bool:
        return True

    def begin(self) -> None:
        pass

    def serve(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None,
        meanwhile: Callable[[], None] | None = None, *, ahead: bool = False,
    ) -> None:  # fmt: skip
        self.form(layer)

    def release(self) -> None:
        pass
