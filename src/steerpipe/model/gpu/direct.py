"""One row that reads what is missing by itself, straight from pinned memory: it waits for nobody (ADR 0008).

Legend: L MoE layers, k experts per row, E experts.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from steerpipe.core.blocks import BlockSource, GuessLanding, Landing
from steerpipe.core.errors import ConfigError
from steerpipe.kernels.configs import launch_for
from steerpipe.kernels.experts import Reads, down_row, expert_row, gate_up_row
from steerpipe.kernels.router import Tickets
from steerpipe.model.gpu.fetching import Fetching
from steerpipe.model.gpu.mailbox import Mailbox
from steerpipe.model.gpu.tap import Forecaster


def sends_by_itself(landing: Landing, forecaster: Forecaster) -> tuple[GuessLanding, Forecaster]:
    """Slots for the guesses of such a row, and who makes them: one layer ahead, for the link is not idle for longer
    than it takes to bring what that layer needs. ConfigError where they cannot be sent for.
    """
    if forecaster.commit:
        raise ConfigError(
            "this predictor needs the host, and here one row reads what it misses by itself",
            fix="let the host serve what is missing: --driver served",
        )
    if landing.guesses is None:
        raise ConfigError("there are too few slots to lend any for guesses", fix="give 8 or more, or --driver served")
    return landing.guesses, Forecaster(forecaster.ways[:1])


class ReadThrough:
    """An ExpertRun: blocks are read where the router found them, and kept in the slots that it took."""

    def __init__(
        self, source: BlockSource, landing: Landing, top_k: int, device: torch.device, fetching: Fetching | None = None
    ) -> None:  # fmt: skip
        """`fetching`: what was sent for before a router looks has a slot already, and perhaps a part of its block."""
        self._source, self._landing, self._fetching = source, landing, fetching
        padded = top_k + top_k % 2  # both are aligned to 16 bytes
        words = torch.zeros(2, padded, dtype=torch.int64, device=device)
        sent = (None, None, None) if fetching is None else (fetching.since, fetching.stamp, fetching.running)
        self._reads = Reads(words[0, :top_k], words[1, :top_k], *sent)  # of one layer after the other

    def tickets(self, layer: int, order: int) -> Tickets:
        ring, reads = self._landing, self._reads
        guessed = None if self._fetching is None else self._fetching.guessed(order)
        return Tickets(self._source.table(layer), ring.ring, ring.tail, ring.head, reads.origin, reads.target, guessed)

    def begin(self, layer: int, experts: Tensor) -> None:
        pass

    def run(self, layer: int, order: int, x: Tensor, experts: Tensor, *, act: Tensor, part: Tensor) -> None:
        table, form, pairs = self._source.table(layer), self._source.form(layer), experts.view(-1)
        if self._fetching is None:
            expert_row(x, pairs, table, form, act=act, part=part, reads=self._reads)
            return
        gate_up, down = launch_for("row_gate_up", form), launch_for("row_down", form)
        gate_up_row(
            x, pairs, table, form, act=act, launch=gate_up, followed=down.overlap, reads=self._reads, early=False
        )
        self._fetching.fetch(order)  # beside the rest of this layer's reads, of which there is little left
        down_row(act, pairs, table, form, part=part, launch=down, reads=self._reads)


class Follower:
    """The host's part of such a step: it comes behind the device, layer by layer, and may come late."""

    def __init__(self, source: BlockSource, landing: Landing, layers: Sequence[int], mailbox: Mailbox) -> None:
        self._source, self._landing, self._layers, self._mailbox = source, landing, layers, mailbox

    def run(
        self, step: Callable[[], None], stamp: int, finished: Callable[[], bool], wait: Callable[[], None],
        fetching: Fetching | None = None, words: Mailbox | None = None, *, rests: int = 0,
    ) -> None:  # fmt: skip
        """`step` queues it; `finished` and `wait` ask and wait for the device. `fetching`: of who ever predicts;
        `words`: of the tap that speaks; None: nobody does, and `rests` questions less are left until the next try.

        An error (an interrupt) comes after the step has run and the table is true again.
        """
        first = self._landing.begin()
        done = 0
        try:
            if fetching is not None and words is None:
                fetching.slots.rest(rests)
            elif fetching is not None:
                fetching.slots.begin()
            step()
            ticket = first
            for order, layer in enumerate(self._layers):
                reads = self._mailbox.take_reads(order, stamp, finished)
                ticket = self._landing.follow(layer, reads, ticket)
                done = order + 1
                if fetching is not None and words is not None:
                    fetching.settle(order, stamp, reads, words, finished)
            self._landing.end()
        except BaseException:
            wait()
            with suppress(Exception):  # where the interrupt left a table half way it is not followed, but made anew
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
