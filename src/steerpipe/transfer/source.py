"""The ladder as the engine sees it: an ExpertSource over a pack, within a budget of slots."""

import math
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from steerpipe.core.errors import ConfigError
from steerpipe.core.ids import ExpertId
from steerpipe.core.pages import PageShape
from steerpipe.core.protocols import ExpertWeights
from steerpipe.core.timeline import Timeline
from steerpipe.store import slots as arena
from steerpipe.store.paging import PagedTable
from steerpipe.store.policies import Policy, make_policy
from steerpipe.store.reader import Pack
from steerpipe.store.residency import SlotTable
from steerpipe.store.slots import SlotArena
from steerpipe.transfer.anticipation import Anticipation
from steerpipe.transfer.counters import LadderCounters
from steerpipe.transfer.disk import DiskLink
from steerpipe.transfer.fetch import Fetcher
from steerpipe.transfer.impatient import Impatient
from steerpipe.transfer.ladder import Ladder
from steerpipe.transfer.lease import LadderLease
from steerpipe.transfer.link import BlockAddress, Link, LinkRate, PacedLink
from steerpipe.transfer.nearby import RamExperts
from steerpipe.transfer.paging import PageLender
from steerpipe.transfer.places import held_in_ram, places_of, ram_tier
from steerpipe.transfer.plan import Plan
from steerpipe.transfer.promotion import Promotion
from steerpipe.transfer.queue import Reason
from steerpipe.transfer.ram import RamTier
from steerpipe.transfer.stream import LayerStream
from steerpipe.transfer.visit import CHUNK_BYTES
from steerpipe.transfer.worker import Readers

CPU = torch.device("cpu")


def slot_bytes(pack: Pack, dtype: torch.dtype) -> int:
    """One slot: the largest expert of the pack, compute-ready."""
    return arena.slot_bytes([each.layout for each in pack.manifest.classes], dtype)


def block_addresses(pack: Pack) -> dict[ExpertId, BlockAddress]:
    """Where every expert of the pack lies, by layer and expert."""
    addresses = {}
    for layer in pack.spec.moe_layers:
        for index in range(pack.spec.moe(layer).experts):
            place, expert = pack.place(layer, index), ExpertId(layer, index)
            addresses[expert] = BlockAddress(expert, place.offset, place.layout.block_bytes)
    return addresses


def default_transient_limit(slots: int) -> int:
    """How many slots a prompt may pass through."""
    return max(2, min(16, slots // 8))


class LadderSource:
    """An ExpertSource whose experts come and go. `close` it, or use it as a context manager; collection closes it too.

    Leases may be taken on any thread, several at once, but not one inside another. Tokens (the policy's clock) are
    counted by leases of the first MoE layer: one step of the engine is one token, however many rows it has.
    """

    def __init__(
        self, pack: Pack, link: Link, *, slots: int, dtype: torch.dtype, device: torch.device = CPU,
        policy: Policy | str = "lfru", transient_limit: int | None = None, readers: int = 1,
        chunk_bytes: int = CHUNK_BYTES, shape: PageShape | None = None,
    ) -> None:  # fmt: skip
        """Takes the link over: it is closed with the source. `core.budget` says how many slots there are.

        `shape`: the slots lie in such pages, which can be lent (`lender`).
        """
        addresses = block_addresses(pack)
        assert addresses, "a model without experts needs no ladder"
        limit = transient_limit or default_transient_limit(slots)
        chosen = make_policy(policy, len(addresses)) if isinstance(policy, str) else policy
        self.pack = pack
        self.link = link
        self.policy = chosen  # with `experts`, what a profile keeps
        self.experts = tuple(addresses)  # in the policy's numbering
        self._arena = SlotArena([each.layout for each in pack.manifest.classes], slots, dtype, device, shape)
        self.lender: PageLender | None = None  # of the pages, where the slots lie in such
        table = SlotTable(list(addresses), slots, chosen, limit)
        if shape is not None:
            table = PagedTable(list(addresses), slots // shape.slots, shape.slots, chosen, limit)
        self._ladder = Ladder(addresses, table, limit, chunk_bytes)
        if shape is not None and isinstance(table, PagedTable):
            self.lender = PageLender(self._ladder, table, self._arena, shape)
        self._of_layer = {layer: [e for e in addresses if e.layer == layer] for layer in pack.spec.moe_layers}
        self._by_index = {layer: sorted(own) for layer, own in self._of_layer.items()}
        self._stream = LayerStream(self._ladder, self._of_layer)
        self._fetcher = Fetcher(pack, link, self._ladder)
        self._first_layer = pack.spec.moe_layers[0]
        self._begun = time.perf_counter()
        tier = ram_tier(link)
        partly = tier is not None and not tier.holds_everything
        self.promotion = Promotion(pack, tier, self._ladder, addresses) if tier is not None and partly else None
        reading = Readers(self._ladder, self._fetcher, pack, self._arena, dtype, device, readers, self.promotion)
        self._close = weakref.finalize(self, reading.close)  # also when the interpreter ends

    @classmethod
    def open(
        cls, pack: Pack, *, slots: int, dtype: torch.dtype, device: torch.device = CPU, ram_bytes: int = 0,
        policy: str = "lfru", pace: float | None = None, readers: int = 1,
        wrap: Callable[[Link], Link] | None = None, shape: PageShape | None = None,
    ) -> Self:  # fmt: skip
        """The pack's file, behind it RAM for `ram_bytes` of raw blocks (0: none), slowed to `pace` bytes per second.

        `wrap` puts something between the disk and everything above it, a FaultyLink for instance. Where RAM holds the
        whole pack it is read now, once; this then takes as long as the disk does.
        """
        disk = DiskLink(pack.expert_file)
        below = wrap(disk) if wrap else disk
        tier = RamTier(below, block_addresses(pack).values(), ram_bytes) if ram_bytes else None
        link = tier or below
        paced = PacedLink(link, pace) if pace else link
        source = cls(pack, paced, slots=slots, dtype=dtype, device=device, policy=policy, readers=readers, shape=shape)
        if tier is not None and tier.holds_everything:
            tier.fill(Fetcher(pack, below, source._ladder).fetch)
        return source

    def lease(self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None) -> LadderLease:
        """See ExpertSource. Does not wait itself; its waves do."""
        lease = LadderLease(self._ladder, self._weights, self._of_layer[layer], routed, keep, self._stream.leave)
        with self._ladder.lock:
            if layer == self._first_layer:
                self._ladder.now += 1
            self._ladder.expire(time.perf_counter())
            self._stream.arrive(layer, lease.routed)
        return lease

    def prefetch(self, experts: Iterable[ExpertId], reason: Reason, deadline: float) -> int:
        """Sends for experts that may be needed; how many are on their way. Never waits, never evicts what is leased.

        A guess is transient until it is used, so wrong ones never hold more slots than the transient limit.
        `deadline` is on `time.perf_counter`: what has not arrived by then is cut. Order is that of arrival.
        """
        with self._ladder.lock:
            self._ladder.check_usable()
            return sum(self._ladder.guess(expert, reason, deadline, transient=True) for expert in experts)

    def steer(self, plan: Plan) -> None:
        """What is expected now, in place of what was expected before. Never waits; costs idle link time only."""
        wanted = sorted(plan.send, key=lambda guess: guess.deadline)  # the link moves what is due sooner first
        with self._ladder.lock:
            self._ladder.check_usable()
            self._ladder.wish((guess.expert, guess.deadline) for guess in wanted)
            self._ladder.table.protect(plan.protect)

    def ready(self, layer: int) -> NDArray[np.bool_]:
        """Which experts of `layer` are in a slot, ready."""
        with self._ladder.lock:
            return self._ladder.table.which_ready(self._by_index[layer])

    def nearby(self) -> RamExperts:
        """Experts that can be computed where they lie. ConfigError: nothing lies in RAM."""
        tier = ram_tier(self.link)
        if tier is None:
            raise ConfigError("the policy cpu, and no expert lies in RAM", fix="give --ram, more than the slots take")
        return RamExperts(self.pack, tier, self._ladder.addresses, self._arena.dtype, lambda: self.block_seconds)

    def impatient(self) -> Impatient:
        """The same experts for whoever does not wait for them."""
        return Impatient(self._ladder, self._of_layer, self._weights)

    def warm(self, experts: Iterable[ExpertId]) -> int:
        """Sends for experts that are worth a slot of their own, such as those of the last run. Never waits."""
        with self._ladder.lock:
            self._ladder.check_usable()
            return sum(self._ladder.guess(e, Reason.PREFETCH, math.inf, transient=False) for e in experts)

    def anticipation(self) -> Anticipation:
        """The same slots for prompts that are being typed."""
        return Anticipation(self._ladder)

    def cancel_prefetches(self, experts: Collection[ExpertId], reason: Reason = Reason.PREFETCH) -> None:
        """Cuts what is still on its way for that reason or a lesser one. What a lease waits for goes on."""
        with self._ladder.lock:
            self._ladder.withdraw(experts, reason)

    def protect(self, experts: Iterable[ExpertId]) -> None:
        """What is wanted soon: prefetches never evict it, demand only in need. Replaces what was said before."""
        with self._ladder.lock:
            self._ladder.table.protect(experts)

    def record(self, timeline: Timeline | None) -> None:
        """Notes reads, decodes and waits there from now on; None: nowhere."""
        self._ladder.timeline = timeline

    def counters(self) -> LadderCounters:
        """Since the start; subtract an earlier snapshot for an interval."""
        with self._ladder.lock:
            link, disk = self._fetcher.meter.snapshot(), self.link.disk.snapshot()
            return self._ladder.tally.snapshot(link, disk, time.perf_counter() - self._begun)

    @property
    def rate(self) -> LinkRate:
        """Of the link, as measured."""
        return self._fetcher.meter.snapshot()

    @property
    def block_seconds(self) -> float:
        """One block from the link into its slot, as measured so far; 0 before the first."""
        rate, tally = self._fetcher.meter.snapshot(), self._ladder.tally
        moved = sum(each.transfers for each in tally.of.values())
        return (rate.busy_seconds + tally.decode_seconds) / moved if moved else 0.0

    @property
    def waited_seconds(self) -> float:
        """Leases have waited so long in all."""
        return self._ladder.tally.stall_seconds + self._ladder.tally.late_seconds

    @property
    def moving(self) -> bool:
        """Whether anything is on its way, into a slot or into RAM."""
        with self._ladder.lock:
            return not self._ladder.idle or (self.promotion is not None and self.promotion.moving)

    @property
    def slots(self) -> int:
        return self._ladder.table.slots

    @property
    def fast_bytes(self) -> int:
        """What the slots take: all of it from the start."""
        return self._arena.total_bytes

    @property
    def slab_bytes(self) -> int:
        """What reads take beside the slots, so far."""
        return self._ladder.slabs.total_bytes

    @property
    def tokens(self) -> float:
        """The policy's clock."""
        with self._ladder.lock:
            return self._ladder.now

    @property
    def residents(self) -> list[ExpertId]:
        """Who is in a slot, ready."""
        with self._ladder.lock:
            return self._ladder.table.resident()

    def places(self) -> bytes:
        """See `transfer.places.Placed`."""
        with self._ladder.lock:
            return places_of(self.experts, self._ladder.table, held_in_ram(self.link))

    def check_integrity(self) -> None:
        """When no lease is open: waits until nothing moves, then asserts that nothing is held or miscounted."""
        ladder = self._ladder
        with ladder.lock:
            while not ladder.idle:
                ladder.check_usable()
                ladder.changed.wait()
            ladder.table.check_integrity()
            ladder.queue.check_integrity()
            assert not len(ladder.queue), f"{len(ladder.queue)} transfers are in the queue though nothing moves"
            assert not ladder.broken, f"{list(ladder.broken)} failed and were never buried"
            pinned = [expert for expert in ladder.addresses if ladder.table.pins(expert)]
            assert not pinned, f"{pinned} are still pinned"
            assert ladder.slabs.idle, "a slab was never given back"
            assert not ladder.hungry, f"{ladder.hungry} leases wait for slots"
        counts = self.counters()
        assert counts.hits + counts.late + counts.misses == counts.leased, f"the counters do not add up: {counts}"

    def close(self) -> None:
        """Ends the reader threads (after the read that they are in) and frees the link. Twice is once."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _weights(self, expert: ExpertId) -> ExpertWeights:
        return self._arena.weights(self._ladder.table.slot(expert), self.pack.layout(expert.layer))
