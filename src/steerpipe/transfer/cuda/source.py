"""Experts on a GPU, within a budget of slots: a BlockSource over pinned memory, RAM and disk.

On a CPU (`device` cpu, HostCopier) it is the same with everything done at once: for tests and Triton's interpreter.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from steerpipe.core.blocks import BlockForm
from steerpipe.core.errors import ConfigError
from steerpipe.core.geometry import SMALLEST_SLOTS
from steerpipe.core.ids import ExpertId
from steerpipe.core.pages import PagePlan
from steerpipe.store.policies import Policy, make_policy
from steerpipe.store.progress import Progress, silent
from steerpipe.store.reader import Pack
from steerpipe.store.residency import Residency
from steerpipe.transfer.cuda.ahead import LayerAhead
from steerpipe.transfer.cuda.anticipation import CudaAnticipation
from steerpipe.transfer.cuda.backing import Backing, LayerBlocks, number_experts, shut
from steerpipe.transfer.cuda.copier import Copier, PacedCopier
from steerpipe.transfer.cuda.guesses import CHUNK_BYTES, WINDOW
from steerpipe.transfer.cuda.landing import LEAST_SLOTS, SlotRing, can_land
from steerpipe.transfer.cuda.lease import CudaLease
from steerpipe.transfer.cuda.loading import load_all
from steerpipe.transfer.cuda.memory import BlockMemory
from steerpipe.transfer.cuda.nearby import PinnedExperts
from steerpipe.transfer.cuda.opening import default_transient_limit, layer_blocks, open_backing
from steerpipe.transfer.cuda.paging import CudaPages, make_table
from steerpipe.transfer.cuda.predicted import Predicted
from steerpipe.transfer.cuda.serving import Server
from steerpipe.transfer.cuda.shelf import Shelf
from steerpipe.transfer.cuda.stream import CudaCopier, copier_for
from steerpipe.transfer.link import Link

if TYPE_CHECKING:
    from steerpipe.transfer.cuda.impatient import CudaImpatient


def _stay(layer: int, used: int) -> None:
    """At the end of a lease behind which nothing is sent ahead."""


class CudaSource(Predicted):
    """A BlockSource. One thread. `close` it, or use it as a context manager; collection closes it too.

    Tokens (the policy's clock) are counted by the first MoE layer that is leased or served: one step of the engine is
    one token. What lies where is in the model's order: `experts` names the policy's numbers.
    """

    promotion = None  # what lies on a disk comes into RAM when it is wanted, not before

    def __init__(
        self, layers: Mapping[int, LayerBlocks], backing: Backing, *, slots: int, device: torch.device,
        policy: Policy | str = "lfru", transient_limit: int | None = None, copier: Copier | None = None,
        pace: float | None = None, pack: Pack | None = None, progress: Progress = silent, direct: bool | None = None,
        chunk_bytes: int = CHUNK_BYTES, window: int = WINDOW, plan: PagePlan | None = None,
    ) -> None:  # fmt: skip
        """Takes backing and copier over: they are closed with the source. `layers` in the model's order.

        A ring of the backing has to use the same `copier`. With a slot for every expert all are loaded now. `direct`:
        whether one row reads what is missing by itself; None: on a GPU, where that is possible and slots are not few.
        `plan`: instead of `slots` there are its pages, which can be lent (`lender`).
        """
        experts = number_experts(layers)
        assert experts, "a model without experts needs no source of them"
        slots = min(slots, len(experts)) if plan is None else plan.slots
        base = copier or copier_for(device)
        chosen = make_policy(policy, len(experts)) if isinstance(policy, str) else policy
        limit = transient_limit or default_transient_limit(slots if plan is None else plan.least_slots, layers)
        self.pack = pack
        self.experts = experts
        self.policy = chosen
        self.layers = layers
        endings: list[Callable[[], None]] = []  # before the device is waited for
        close = weakref.finalize(self, shut, base, backing, endings)  # also when the interpreter ends
        self._memory = BlockMemory(layers, slots, device, None if plan is None else plan.shape)
        base.drain()  # the zeros are written before anything is copied
        table = make_table(experts, slots, chosen, limit, plan)
        paced = PacedCopier(base, pace) if pace else base
        super().__init__(Shelf(layers, backing, self._memory, paced, table, limit), close)
        self._shelf.chunk_bytes, self._shelf.window = chunk_bytes, window
        self._ahead = LayerAhead(self._shelf, layers)
        self._server = Server(self._shelf)
        endings.append(self._server.end)
        self._first = next(iter(layers))
        self._resident = False
        self._patient = True
        self._landing: SlotRing | None = None
        self.lender: CudaPages | None = None  # of the pages, where the slots lie in such
        if slots == len(experts) and plan is None:
            self._load_all(progress)
        elif direct is not False:
            self._open_landing(device, must=bool(direct))
        if plan is not None:
            self.lender = CudaPages(self._shelf, plan.shape, self._ahead, self._server, self._landing, close)

    @classmethod
    def open(
        cls, pack: Pack, *, slots: int, device: torch.device, pinned_bytes: int = 0, ram_bytes: int = 0,
        policy: Policy | str = "lfru", pace: float | None = None, readers: int = 2, progress: Progress = silent,
        wrap: Callable[[Link], Link] | None = None, transient_limit: int | None = None, copier: Copier | None = None,
        direct: bool | None = None, plan: PagePlan | None = None,
    ) -> Self:  # fmt: skip
        """A pack: its first blocks in `pinned_bytes` of pinned memory, the others through a ring over RAM and disk.

        Reads what is pinned now, and everything where there is a slot for every expert (then nothing is pinned
        beside the ring's slabs, and those only meanwhile). `pace` slows copies to so many bytes per second.
        """
        layers = layer_blocks(pack)
        moving = copier or copier_for(device)
        driver = moving.driver if isinstance(moving, CudaCopier) else None
        if plan is None and slots >= sum(each.experts for each in layers.values()):
            pinned_bytes = ram_bytes = 0
        backing = open_backing(
            pack, moving, driver, pinned_bytes=pinned_bytes, ram_bytes=ram_bytes, readers=readers, progress=progress,
            wrap=wrap,
        )  # fmt: skip
        return cls(
            layers, backing, slots=slots, device=device, policy=policy, transient_limit=transient_limit, copier=moving,
            pace=pace, pack=pack, progress=progress, direct=direct, plan=plan,
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

    def impatient(self) -> "CudaImpatient":
        """The same experts for whoever does not wait for them. From now on decode streams no layers ahead, which would
        wait for their copies.
        """
        from steerpipe.transfer.cuda.impatient import CudaImpatient  # Triton: only where a GPU computes

        self._patient = False
        return CudaImpatient(self._shelf, self.layers, self._memory.table.device, self._enter)

    def anticipation(self) -> CudaAnticipation:
        """The same slots for prompts that are being typed."""
        return CudaAnticipation(self._shelf, self._enter)

    def nearby(self) -> PinnedExperts:
        """Experts that can be computed where they lie. ConfigError: nothing lies in pinned memory."""
        if not any(self._shelf.places):
            raise ConfigError("the policy cpu, and no expert lies in pinned memory", fix="give --pin, or leave it out")
        return PinnedExperts(self._shelf, self.layers, self._memory.table.device)

    def lease(self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None) -> CudaLease:
        """See BlockSource. Does not wait itself."""
        self._enter()
        self._shelf.busy = True  # until the lease ends
        self._shelf.forget_last()
        self._shelf.now += layer == self._first
        self._ahead.arrive(layer, routed)
        ahead = self._patient or keep is not None
        return CudaLease(self._shelf, layer, routed, keep, self._ahead.leave if ahead else _stay)

    def serves(self, experts_per_layer: int) -> bool:
        """A layer's experts have to be there together, with a slot or two to spare."""
        self._check_open()
        shelf = self._shelf
        enough = shelf.table.slots_here - len(shelf.table.reserved) >= experts_per_layer + SMALLEST_SLOTS
        return self._resident or (enough and shelf.copier.orders_words)

    def begin(self) -> None:
        """See BlockSource."""
        self._enter()
        self._shelf.busy = True  # until the last layer is served
        self._shelf.step_begins()
        if self._landing is not None:
            self._landing.pause()

    def serve(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None,
        meanwhile: Callable[[], None] | None = None, *, ahead: bool = False,
    ) -> None:  # fmt: skip
        """See BlockSource. Waits only for what is not in pinned memory. TransferError: then call `release`."""
        self._check_open()
        self._shelf.now += layer == self._first
        if self._resident:
            return
        if self._shelf.sent:
            self._ahead.drop(set())
        self._server.serve(layer, routed, keep, meanwhile, ahead=ahead)

    def release(self) -> None:
        """See BlockSource."""
        self._server.release()
        if self._landing is not None:
            self._landing.restore()
        self._shelf.busy = False

    def warm(self, experts: Iterable[ExpertId]) -> int:
        """Sends for experts that are worth a slot of their own, such as those of the last run; how many are coming.

        Waits for nothing; what has to be read first is copied when leases or serving pass by.
        """
        self._enter()
        shelf = self._shelf
        absent = [each for each in dict.fromkeys(experts) if shelf.table.state(each) is Residency.ABSENT]
        shelf.busy = True
        coming = shelf.send([shelf.base[each.layer] + each.expert for each in absent], transient=False)
        shelf.busy = False
        return len(coming)

    def check_integrity(self) -> None:
        """When no lease is open: waits until nothing moves, then asserts that nothing is held, lost or miscounted."""
        shelf = self._shelf
        if self._close.alive:
            self._enter()
        self._ahead.drop(set())
        while shelf.loading or shelf.moving:
            shelf.copier.drain()
            shelf.pump()
            shelf.land(wait=True)
        shelf.copier.drain()
        shelf.table.check_integrity()
        if shelf.backing.ring is not None and self._close.alive and not self._resident:
            shelf.backing.ring.check_integrity()
        self._server.check_table()
        if self._landing is not None:
            self._landing.check()
        self._check_counts()

    def close(self) -> None:
        """After all that is queued: ends threads, unpins, frees. Twice is once."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self) -> None:
        """Before anything begins: what an interrupt left half done is mended now, if it was not then."""
        self._check_open()
        if self._shelf.busy:
            self.release()

    def _open_landing(self, device: torch.device, *, must: bool) -> None:
        """Lends slots to the device, where it can read every block by itself."""
        able = can_land(self._shelf)
        if must and not able:
            self.close()
            raise ConfigError(
                "one row cannot read missing experts from pinned memory here",
                fix="pin all experts (--ram), give slots for four at least, do not slow the link; or serve them",
            )
        if able and (must or (device.type == "cuda" and self._shelf.table.least_slots >= LEAST_SLOTS)):
            self._landing = SlotRing(self._shelf, self._ahead, self._server, device, self._close)

    def _load_all(self, progress: Progress) -> None:
        """Brings every expert; TransferError if one cannot be had. What brought them is not needed any more."""
        try:
            load_all(self._shelf, progress)
        except BaseException:
            self.close()
            raise
        self._shelf.backing.close()
        self._resident = True
