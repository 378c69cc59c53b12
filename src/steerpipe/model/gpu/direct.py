"""One row that reads what is missing by itself, straight from pinned memory: it waits for nobody (ADR 0008).

Legend: L MoE layers, k experts per row, E experts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from steerpipe.core.blocks import BlockSource, Landing
from steerpipe.kernels.experts import Reads, expert_row
from steerpipe.kernels.router import Tickets
from steerpipe.model.gpu.mailbox import Mailbox


class ReadThrough:
    """An ExpertRun: blocks are read where the router found them, and kept in the slots that it took."""

    def __init__(self, source: BlockSource, landing: Landing, top_k: int, device: torch.device) -> None:
        self._source, self._landing = source, landing
        padded = top_k + top_k % 2  # both are aligned to 16 bytes
        words = torch.zeros(2, padded, dtype=torch.int64, device=device)
        self._reads = Reads(words[0, :top_k], words[1, :top_k])  # of one layer after the other

    def tickets(self, layer: int) -> Tickets:
        ring, reads = self._landing, self._reads
        return Tickets(self._source.table(layer), ring.ring, ring.tail, ring.head, reads.origin, reads.target)

    def begin(self, layer: int, experts: Tensor) -> None:
        pass

    def run(self, layer: int, x: Tensor, experts: Tensor, *, act: Tensor, part: Tensor) -> None:
        table, form = self._source.table(layer), self._source.form(layer)
        expert_row(x, experts.view(-1), table, form, act=act, part=part, reads=self._reads)


class Follower:
    """The host's part of such a step: it comes behind the device, layer by layer, and may come late."""

    def __init__(self, source: BlockSource, landing: Landing, layers: Sequence[int], mailbox: Mailbox) -> None:
        self._source, self._landing, self._layers, self._mailbox = source, landing, layers, mailbox

    def run(
        self, step: Callable[[], None], stamp: int, finished: Callable[[], bool], wait: Callable[[], None]
    ) -> None:  # fmt: skip
        """`step` queues it; `finished` and `wait` ask and wait for the device.

        An error (an interrupt) comes after the step has run and the table is true again.
        """
        first = self._landing.begin()
        done = 0
        try:
            step()
            ticket = first
            for order, layer in enumerate(self._layers):
                ticket = self._landing.follow(layer, self._mailbox.take_reads(order, stamp, finished), ticket)
                done = order + 1
        except BaseException:
            wait()
            self._catch_up(first, done, stamp)
            self._source.release()
            raise

    def _catch_up(self, first: int, done: int, stamp: int) -> None:
        """The device has finished: all that it posted is there. The layer of the interrupt is followed once more."""
        ticket = first
        for order, layer in enumerate(self._layers):
            if not self._mailbox.posted(order, stamp):
                return  # the step was never queued
            reads = self._mailbox.take_reads(order, stamp, lambda: True)
            if order < done:
                ticket += len(reads.landed)
            else:
                ticket = self._landing.follow(layer, reads, ticket)
