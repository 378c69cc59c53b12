"""Experts on a GPU for whoever does not wait: what is there is taken, what is not is sent for and done without.

As `transfer.impatient`, in stream order: there is what the computing stream finds without waiting for a copy. Legend:
V rows, k experts per row, n rows of one expert, H hidden.
"""

from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.ids import ExpertId
from steerpipe.model.cells import CELL
from steerpipe.model.gpu.experts import run_pairs
from steerpipe.transfer.cuda.backing import LayerBlocks
from steerpipe.transfer.cuda.copier import Mark
from steerpipe.transfer.cuda.shelf import Shelf
from steerpipe.transfer.queue import Reason

MOST = 16  # on their way at once: what is missed later is worth more than a long queue


class CudaImpatient:
    """Nothing here waits for a copy. The engine's thread, beside its leases."""

    def __init__(
        self, shelf: Shelf, layers: Mapping[int, LayerBlocks], device: torch.device, enter: Callable[[], None]
    ) -> None:
        """`enter`: before anything begins, as every other word to the source does."""
        self._shelf = shelf
        self._enter = enter
        self._layers = layers
        self._device = device
        self._coming: deque[tuple[Mark, int]] = deque()  # copies behind each mark

    def missing(self, layer: int, experts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[V, k] of `experts` [V, k]: those that the computing stream would not find. No guess takes the slot of one
        that it would, until this is asked again: a lease of them does not wait.
        """
        self._enter()
        shelf, base = self._shelf, self._shelf.base[layer]
        self._land()
        routed = [base + index for index in np.unique(experts).tolist()]
        ready = [number for number in routed if shelf.here[number]]
        found = {
            number
            for number, mark in zip(ready, shelf.there(shelf.table.slots_of(ready)), strict=True)
            if mark is None
        }  # fmt: skip
        shelf.table.protect(shelf.experts[number] for number in found)
        absent = np.ones(self._layers[layer].experts, dtype=np.bool_)
        absent[[number - base for number in found]] = False
        return absent[experts]

    def send_for(self, layer: int, ranks: Mapping[int, int]) -> int:
        """Routed experts that are not there, and the best rank that each has: the policy hears of the use, and as many
        are sent for as the link can soon bring; how many. They are kept when they come.

        First choices go first, and have half of the room for themselves: they weigh most.
        """
        self._enter()
        shelf, base = self._shelf, self._shelf.base[layer]
        shelf.table.touch_many([base + index for index in sorted(ranks)], shelf.now)
        group: list[int] = []
        under_way = self._under_way()
        shelf.busy = True
        for index, rank in sorted(ranks.items(), key=lambda each: (each[1], each[0])):
            number, most = base + index, MOST if rank == 0 else MOST // 2
            free = under_way + len(group) < most and not shelf.here[number] and number not in shelf.loading
            if free and number not in shelf.moving and shelf.begin(number, Reason.PREFETCH, transient=False):
                group.append(number)
        self._fetch(group)
        shelf.busy = False
        return len(group)

    def compute(self, expert: ExpertId, x: Tensor) -> Tensor | None:
        """Its output for x [n, H] on the host, fp32, there too; None: it has not come. Counts as no use."""
        self._enter()
        shelf, number = self._shelf, self._shelf.base[expert.layer] + expert.expert
        self._land()
        if not shelf.here[number] or shelf.there(shelf.table.slots_of([number])) != [None]:
            return None
        rows = 1 if len(x) == 1 else -(-len(x) // CELL) * CELL
        form = self._layers[expert.layer].form
        ids = torch.full((rows, 1), -1, dtype=torch.int32)
        ids[: len(x)] = expert.expert
        given = torch.cat([x, x.new_zeros(rows - len(x), x.shape[1])]).to(self._device)
        part = torch.zeros(rows, form.hidden, dtype=torch.float32, device=self._device)
        shelf.busy = True
        shelf.table.pin_many([number])
        run_pairs(
            given, ids.to(self._device), shelf.memory.row(expert.layer), form,
            act=given.new_empty(rows, form.width), part=part,
        )  # fmt: skip
        shelf.read([number])
        shelf.busy = False
        return part[: len(x)].cpu()

    def _fetch(self, group: list[int]) -> None:
        shelf = self._shelf
        if not group:
            return
        shelf.fetch(group, Reason.PREFETCH)
        shelf.cleared = shelf.copier.copied()  # a served step finds no victim in the table
        for number in group:
            shelf.guessed.pop(number)  # no guess: a token went without it
        copied = len(group) - sum(number in shelf.loading for number in group)
        if (mark := shelf.settle_marked()) is not None:
            self._coming.append((mark, copied))

    def _land(self) -> None:
        """Copies of blocks that the ring has brought are queued."""
        if self._shelf.loading:
            self._shelf.busy = True
            self._shelf.land(wait=False)
            self._shelf.busy = False

    def _under_way(self) -> int:
        while self._coming and self._shelf.copier.passed(self._coming[0][0]):
            self._coming.popleft()
        return sum(count for _, count in self._coming) + len(self._shelf.loading)
