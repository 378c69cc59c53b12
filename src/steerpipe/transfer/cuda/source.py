"""Experts on a GPU, within a budget of slots: a BlockSource over pinned memory, RAM and disk.

On a CPU (`device` cpu, HostCopier) it is the same with everything done at once: for tests and Triton's interpreter.
"""

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from steerpipe.core.blocks import BlockForm
from steerpipe.core.errors import ConfigError, SteerpipeError, TransferError
from steerpipe.core.geometry import SMALLEST_SLOTS
from steerpipe.core.ids import ExpertId
from steerpipe.store.lending import LendingTable
from steerpipe.store.policies import Policy, make_policy
from steerpipe.store.progress import Progress, silent
from steerpipe.store.reader import Pack
from steerpipe.store.residency import Residency
from steerpipe.transfer.counters import LadderCounters
from steerpipe.transfer.cuda.ahead import LayerAhead
from steerpipe.transfer.cuda.backing import Backing, LayerBlocks, number_experts
from steerpipe.transfer.cuda.copier import Copier, PacedCopier
from steerpipe.transfer.cuda.landing import LEAST_SLOTS, SlotRing, supply_of
from steerpipe.transfer.cuda.lease import CudaLease
from steerpipe.transfer.cuda.loading import load_all
from steerpipe.transfer.cuda.memory import BlockMemory
from steerpipe.transfer.cuda.opening import layer_blocks, open_backing
from steerpipe.transfer.cuda.serving import Server
from steerpipe.transfer.cuda.shelf import Shelf
from steerpipe.transfer.cuda.stream import CudaCopier, copier_for
from steerpipe.transfer.link import Link, LinkRate


def default_transient_limit(slots: int, layers: Mapping[int, LayerBlocks]) -> int:
    """How many slots a prompt may pass through: two layers of experts, at most half of the slots."""
    return max(SMALLEST_SLOTS, min(slots // 2, 2 * max(each.experts for each in layers.values())))


class CudaSource:
    """A BlockSource. One thread. `close` it, or use it as a context manager; collection closes it too.

    Tokens (the policy's clock) are counted by the first MoE layer that is leased or served: one step of the engine is
    one token. What lies where is in the model's order: `experts` names the policy's numbers.
    """

    def __init__(
        self, layers: Mapping[int, LayerBlocks], backing: Backing, *, slots: int, device: torch.device,
        policy: Policy | str = "lfru", transient_limit: int | None = None, copier: Copier | None = None,
        pace: float | None = None, pack: Pack | None = None, progress: Progress = silent, direct: bool | None = None,
    ) -> None:  # fmt: skip
        """Takes backing and copier over: they are closed with the source. `layers` in the model's order.

        A ring of the backing has to use the same `copier`. With a slot for every expert all are loaded now. `direct`:
        whether one row reads what is missing by itself; None: on a GPU, where that is possible and slots are not few.
        """
        experts = number_experts(layers)
        assert experts, "a model without experts needs no source of them"
        slots = min(slots, len(experts))
        base = copier or copier_for(device)
        chosen = make_policy(policy, len(experts)) if isinstance(policy, str) else policy
        limit = transient_limit or default_transient_limit(slots, layers)
        self.pack = pack
        self.experts = experts
        self.policy = chosen
        self.layers = layers
        self._close = weakref.finalize(self, _shut, base, backing)  # also when the interpreter ends
        self._memory = BlockMemory(layers, slots, device)
        base.drain()  # the zeros are written before anything is copied
        table = LendingTable(experts, slots, chosen, limit, lingers=True)
        paced = PacedCopier(base, pace) if pace else base
        self._shelf = Shelf(layers, backing, self._memory, paced, table, limit)
        self._ahead = LayerAhead(self._shelf, layers)
        self._server = Server(self._shelf)
        self._first = next(iter(layers))
        self._begun = time.perf_counter()
        self._resident = False
        self._landing: SlotRing | None = None
        if slots == len(experts):
            self._load_all(progress)
        elif direct is not False:
            self._open_landing(device, must=bool(direct), paced=pace is not None)

    @classmethod
    def open(
        cls, pack: Pack, *, slots: int, device: torch.device, pinned_bytes: int = 0, ram_bytes: int = 0,
        policy: str = "lfru", pace: float | None = None, readers: int = 2, progress: Progress = silent,
        wrap: Callable[[Link], Link] | None = None, transient_limit: int | None = None, copier: Copier | None = None,
        direct: bool | None = None,
    ) -> Self:  # fmt: skip
        """A pack: its first blocks in `pinned_bytes` of pinned memory, the others through a ring over RAM and disk.

        Reads what is pinned now, and everything where there is a slot for every expert (then nothing is pinned
        beside the ring's slabs, and those only meanwhile). `pace` slows copies to so many bytes per second.
        """
        layers = layer_blocks(pack)
        moving = copier or copier_for(device)
        driver = moving.driver if isinstance(moving, CudaCopier) else None
        if slots >= sum(each.experts for each in layers.values()):
            pinned_bytes = ram_bytes = 0
        backing = open_backing(
            pack, moving, driver, pinned_bytes=pinned_bytes, ram_bytes=ram_bytes, readers=readers, progress=progress,
            wrap=wrap,
        )  # fmt: skip
        return cls(
            layers, backing, slots=slots, device=device, policy=policy, transient_limit=transient_limit, copier=moving,
            pace=pace, pack=pack, progress=progress, direct=direct,
        )  # fmt: skip

    @property
    def resident(self) -> bool:
        """Whether every expert is in the table and never leaves."""
        return self._resident

    def form(self, layer: int) -> BlockForm:
        return self.layers[layer].form

    def table(self, layer: int) -> Tensor:
        """[E] int64 on the device; always the same tensor."""
        return self._memory.row(layer)

    @property
    def landing(self) -> SlotRing | None:
        """See BlockSource."""
        return self._landing

    @property
    def direct(self) -> bool:
        """Whether one row of decode reads what is missing from pinned memory by itself."""
        return self._landing is not None

    def lease(self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None) -> CudaLease:
        """See BlockSource. Does not wait itself."""
        self._check_open()
        self._shelf.now += layer == self._first
        self._ahead.arrive(layer, routed)
        return CudaLease(self._shelf, layer, routed, keep, self._ahead.leave)

    def serves(self, experts_per_layer: int) -> bool:
        """A layer's experts have to be there together, with a slot or two to spare."""
        self._check_open()
        lent = len(self._shelf.table.reserved)
        return self._resident or self._memory.slots - lent >= experts_per_layer + SMALLEST_SLOTS

    def serve(self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None) -> None:
        """See BlockSource. Waits only for what is not in pinned memory. TransferError: then call `release`."""
        self._check_open()
        self._shelf.now += layer == self._first
        if self._resident:
            return
        if self._ahead.sent:
            self._ahead.drop(set())
        self._server.serve(layer, routed, keep)

    def release(self) -> None:
        """See BlockSource."""
        self._server.release()
        if self._landing is not None:
            self._landing.restore()

    def warm(self, experts: Iterable[ExpertId]) -> int:
        """Sends for experts that are worth a slot of their own, such as those of the last run; how many are coming.

        Waits for nothing; what has to be read first is copied when leases or serving pass by.
        """
        self._check_open()
        shelf = self._shelf
        absent = [each for each in experts if shelf.table.state(each) is Residency.ABSENT]
        return len(
            shelf.send([shelf.base[each.layer] + each.expert for each in dict.fromkeys(absent)], transient=False)
        )

    def counters(self) -> LadderCounters:
        """Since the start. The link is that from pinned memory to the device; it is counted, not timed.

        `link_seconds` stays 0, and `stall_seconds` holds only what the host waited for reads: the rest passes on the
        device, where a clock would cost as much as it measures. `bench` has it.
        """
        shelf = self._shelf
        reads = shelf.backing.reads()
        shelf.tally.retries, shelf.tally.rereads = reads.retries, reads.rereads
        copies = sum(counts.transfers for counts in shelf.tally.of.values())
        return shelf.tally.snapshot(LinkRate(reads=copies), reads.disk, time.perf_counter() - self._begun)

    @property
    def residents(self) -> list[ExpertId]:
        """Who is in a slot; `resident` says whether everybody is."""
        return self._shelf.table.resident()

    @property
    def tokens(self) -> float:
        """The policy's clock."""
        return self._shelf.now

    @property
    def fast_bytes(self) -> int:
        """What slots and table take on the device: all of it from the start."""
        return self._memory.total_bytes

    @property
    def pinned_bytes(self) -> int:
        return self._shelf.backing.pinned_bytes

    def check_integrity(self) -> None:
        """When no lease is open: waits until nothing moves, then asserts that nothing is held, lost or miscounted."""
        shelf = self._shelf
        self._ahead.drop(set())
        while shelf.loading:
            shelf.land(wait=True)
        shelf.copier.drain()
        shelf.table.check_integrity()
        if shelf.backing.ring is not None and self._close.alive and not self._resident:
            shelf.backing.ring.check_integrity()
        self._server.check_table()
        if self._landing is not None:
            self._landing.check()
        pinned = [expert for expert in self.experts if shelf.table.pins(expert)]
        assert not pinned, f"{pinned} are still pinned"
        assert not shelf.broken, f"{list(shelf.broken)} failed and were never cut"
        counts = self.counters()
        assert counts.hits + counts.late + counts.misses == counts.leased, f"the counters do not add up: {counts}"

    def close(self) -> None:
        """After all that is queued: ends threads, unpins, frees. Twice is once."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._close.alive:
            raise TransferError("the model has been closed", fix="open it again, and close it after the last answer")

    def _open_landing(self, device: torch.device, *, must: bool, paced: bool) -> None:
        """Lends slots to the device, where it can read every block by itself."""
        shelf = self._shelf
        views = [shelf.backing.view(number) for number in range(len(self.experts))]
        able = all(views) and not paced and supply_of(self._memory.slots) > 0
        if must and not able:
            self.close()
            raise ConfigError(
                "one row cannot read missing experts from pinned memory here",
                fix="pin all experts (--ram), give slots for four at least, do not slow the link; or serve them",
            )
        if able and (must or (device.type == "cuda" and self._memory.slots >= LEAST_SLOTS)):
            self._landing = SlotRing(shelf, self._ahead, views, device, self._close)

    def _load_all(self, progress: Progress) -> None:
        """Brings every expert; TransferError if one cannot be had. What brought them is not needed any more."""
        try:
            load_all(self._shelf, progress)
        except BaseException:
            self.close()
            raise
        self._shelf.backing.close()
        self._resident = True


def _shut(copier: Copier, backing: Backing) -> None:
    with suppress(SteerpipeError, RuntimeError):  # a GPU that has failed: memory goes back all the same
        copier.drain()
    backing.close()
    copier.close()
