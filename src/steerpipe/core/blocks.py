"""Experts as raw blocks in a device's memory: the seam between CUDA kernels, the decoder on a GPU and what feeds it.

On a CPU a slot holds the compute-ready form (`protocols.ExpertWeights`); on a GPU it holds the block as it was packed,
and kernels read codes and scales through a table of addresses (docs/adr/0008-cuda.md). Legend: H hidden, I width,
E experts.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Where a kernel finds the parts of a block; offsets are bytes from its start.

    gate_up is [2I, H] (gate rows, then up rows), down is [H, I], both row-major. Quantised forms have float16 scales
    [rows, columns / group]; an int8 group is a whole row. An int4 byte holds code + 8 of column j (low half) and of
    column j + group / 2 (high half) of one group.
    """

    format: str  # "float32", "bfloat16", "float16", "int8" or "int4"
    hidden: int
    width: int
    gate_up: int
    down: int
    gate_up_scale: int = 0  # 0 where there are no scales
    down_scale: int = 0
    gate_up_group: int = 0
    down_group: int = 0


@dataclass(frozen=True, slots=True)
class DirectReads:
    """What one row's router chose in one layer, and what became of it; experts, each list in the order of ranks."""

    routed: list[int]
    missed: list[int]  # were read from pinned memory
    landed: list[int]  # of the missed: are in the slots of the next tickets now
    sent: list[int] = field(default_factory=list)  # not among the missed: had been sent for, and are in their slots now


GUESSES = 2  # blocks that are sent for at a tap, at most: model/gpu/fetching.py says when one is enough


@dataclass(frozen=True, slots=True)
class SentBlock:
    """A guess that the device has sent for by itself, and which share of its block came before its layer looked."""

    expert: int
    share: float


Near = Mapping[int, Collection[int]]  # experts by layer


class GuessLanding(Protocol):
    """Slots for guesses of a predictor in a step that runs by itself: it takes tickets, the host follows.

    ring, tail and head are as Landing has them.
    """

    @property
    def ring(self) -> "Tensor": ...

    @property
    def tail(self) -> "Tensor": ...

    @property
    def head(self) -> "Tensor": ...

    def pinned(self, layer: int) -> "Tensor":
        """[E] int64 on the device: where the layer's blocks lie in pinned memory, sign bits set."""
        ...

    def block_bytes(self, layer: int) -> int: ...

    @property
    def resting(self) -> bool:
        """Whether too few of the last guesses were used: nobody should predict in the next step."""
        ...

    def rest(self, layers: int) -> None:
        """A step of so many layers has begun (`Landing.begin`), and nobody predicts in it. Before it is queued."""
        ...

    @property
    def tags(self) -> "Tensor":
        """[L, GUESSES] int64 on the device: whose block each ticket is for (kernels/fetch.py)."""
        ...

    def begin(self) -> None:
        """A step is about to be queued in which somebody predicts."""
        ...

    def owe(self, layer: int, sent: Callable[[], Sequence[SentBlock]]) -> None:
        """A step has ended that has sent for blocks of the next step's first layer; `sent` waits for what they are."""
        ...

    def collect(self) -> None:
        """Before anything of the next step is queued: waits for what is owed, if anything is."""
        ...

    def settle_owed(self, wanted: Collection[int], near: Callable[[], Near] | None) -> None:
        """`settle` for them, if there are any: the next step's first layer has been followed. `near` None: nobody looks
        for them in it, so they are neither right nor wrong."""
        ...

    def settle(
        self, layer: int, sent: Sequence[SentBlock], wanted: Collection[int], near: Callable[[], Near]
    ) -> None:  # fmt: skip
        """What was sent for a layer that has been followed, in the order of tickets, and who of them were wanted.

        `near` says who is in use, and who is known to be wanted in the next layer: none of them gives up a slot for a
        guess.
        Nobody writes to their slots any more but the kernels of that layer. What an interrupted step has not settled
        is lost with `BlockSource.release`.
        """
        ...


class Landing(Protocol):
    """Slots that the device may fill by itself, with blocks that it reads from pinned memory (docs/adr/0008-cuda.md).

    A router takes the next tickets for what is missing; the host follows, makes what has landed part of the table, and
    supplies more slots. Nobody waits for it. ring [a power of two], tail [1] (how many slots were ever supplied) and
    head [1] (how many were taken) are int64 on the device, always the same tensors.
    """

    @property
    def ring(self) -> "Tensor": ...

    @property
    def tail(self) -> "Tensor": ...

    @property
    def head(self) -> "Tensor": ...

    @property
    def guesses(self) -> GuessLanding | None:
        """Where a predictor takes slots; None: there are too few."""
        ...

    def begin(self) -> int:
        """A step that runs by itself is about to be queued: the ticket that it takes first."""
        ...

    def follow(self, layer: int, reads: DirectReads, ticket: int) -> int:
        """One layer of it, whose first ticket is `ticket`; returns the next layer's. In the model's order, all of them.

        What was followed before (the caller was interrupted) is not done twice. Waits for nothing.
        """
        ...

    def end(self) -> None:
        """All of them were followed, and what was sent for is settled. Where this is never said somebody was
        interrupted, and whoever comes next makes the table true again first."""
        ...


class BlockLease(Protocol):
    """The right to use some experts of one layer. Every leased expert comes in exactly one wave."""

    def waves(self) -> Iterator[tuple[int, ...]]:
        """Experts whose address stands in the layer's table for work that is queued on the current stream now.

        Valid for what is queued before the next wave is asked for, or the lease ends. What is resident comes first.
        """
        ...


class BlockSource(Protocol):
    """Hands out experts as blocks in device memory. One thread."""

    @property
    def resident(self) -> bool:
        """Every expert is in the table and never leaves: a step needs nobody to serve it."""
        ...

    def form(self, layer: int) -> BlockForm: ...

    def table(self, layer: int) -> "Tensor":
        """[E] int64, on the device: where each expert's block begins. Always the same tensor.

        0: it is not there. Negative: neither, but the device can read it in pinned memory, at the entry without its
        sign bit; only where `landing` is not None.
        """
        ...

    @property
    def landing(self) -> Landing | None:
        """Where one row may read what is missing by itself; None: it has to be served."""
        ...

    def lease(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None
    ) -> AbstractContextManager[BlockLease]:
        """As `ExpertSource.lease`, in stream order: it waits on the host only for what is not in pinned memory."""
        ...

    def serves(self, experts_per_layer: int) -> bool:
        """Whether a step whose layers use at most so many experts can be served: else it takes leases."""
        ...

    def begin(self) -> None:
        """A step is about to be queued whose layers are served, all of them, unless `release` ends it."""
        ...

    def serve(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None,
        meanwhile: Callable[[], None] | None = None, *, ahead: bool = False,
    ) -> None:  # fmt: skip
        """Brings what is missing of `routed` into the table while kernels already wait for it there.

        `meanwhile` is called as soon as all of it is on its way: what else is to be done can wait. `ahead`: the layer
        before may not have run yet, so nothing has to begin at once.

        Layers come in the order of the model. What a step has leased or been served for a layer may leave the table
        when a later layer is served: kernels of earlier layers have run by then. With slots for three layers it stays
        for one layer more: then a layer may be served while the one before it runs.
        """
        ...

    def release(self) -> None:
        """Ends a served step that went wrong: whatever kernels may wait for gets an address (of zeros), in every layer.

        Also after a step that ran by itself and was not followed to its end without an interrupt. Returns when the
        device has finished; the table is true again afterwards.
        """
        ...


@runtime_checkable
class Guessing(Protocol):
    """A BlockSource that moves experts before they are asked for, while the link has nothing else to do."""

    def expect(self, experts: Sequence[tuple[int, int]]) -> None:
        """(layer, expert) in the order of sending: all that is expected now. What was expected before is given up."""
        ...

    def attend(self, predictor: int) -> None:
        """That one speaks from now on: `throttled` goes by its own guesses, and not by those of others."""
        ...

    @property
    def idle(self) -> bool:
        """Whether nothing is left to send of what was expected."""
        ...

    @property
    def throttled(self) -> bool:
        """Whether what is expected is not sent: too few of the last guesses were used. It ends after many `expect`."""
        ...

    def pump(self) -> None:
        """Sends more of it, as far as the link is idle. Often, while a step runs; waits for nothing."""
        ...

    def send_last(self) -> None:
        """A step's last layer has been served, and all is expected that was said: sends what comes before the next
        step asks for anything. Waits for nothing.
        """
        ...
