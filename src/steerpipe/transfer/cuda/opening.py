"""From a pack to blocks in pinned memory: as many as the budget holds, a ring over RAM and disk for the others."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from steerpipe.core.geometry import SMALLEST_SLOTS
from steerpipe.store.progress import Progress
from steerpipe.store.reader import Pack
from steerpipe.transfer.counters import Tally
from steerpipe.transfer.cuda.backing import LayerBlocks, PinnedBacking, ReadCounts, number_experts
from steerpipe.transfer.cuda.copier import Copier
from steerpipe.transfer.cuda.driver import Driver
from steerpipe.transfer.cuda.memory import slot_bytes
from steerpipe.transfer.cuda.pinned import PinnedArena
from steerpipe.transfer.cuda.ring import Ring
from steerpipe.transfer.disk import DiskLink
from steerpipe.transfer.fetch import Fetcher
from steerpipe.transfer.link import BlockAddress, Link
from steerpipe.transfer.places import held_in_ram
from steerpipe.transfer.ram import RamTier
from steerpipe.transfer.slabs import Slab

SLABS_PER_READER = 3  # one is read into, one has landed, one is copied from


class ReadTally:
    """Retries of all readers of one pack."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tally = Tally()


def layer_blocks(pack: Pack) -> dict[int, LayerBlocks]:
    """The layers with experts, in the model's order."""
    return {
        layer: LayerBlocks(pack.spec.moe(layer).experts, pack.layout(layer).form, pack.layout(layer).block_bytes)
        for layer in pack.spec.moe_layers
    }


def default_transient_limit(slots: int, layers: Mapping[int, LayerBlocks]) -> int:
    """How many slots a prompt may pass through: two layers of experts, at most half of the slots."""
    return max(SMALLEST_SLOTS, min(slots // 2, 2 * max(each.experts for each in layers.values())))


def open_backing(
    pack: Pack, copier: Copier, driver: Driver | None, *, pinned_bytes: int, ram_bytes: int, readers: int,
    progress: Progress, wrap: Callable[[Link], Link] | None,
) -> PinnedBacking:  # fmt: skip
    """Fills the pinned memory now, in the order on disk; takes as long as disk and driver do.

    CapacityError if the memory cannot be had, TransferError if a block cannot.
    """
    layers = layer_blocks(pack)
    addresses = {
        number: BlockAddress(expert, pack.place(*expert).offset, layers[expert.layer].block_bytes)
        for number, expert in enumerate(number_experts(layers))
    }
    in_order = sorted(addresses, key=lambda number: addresses[number].offset)
    stride = slot_bytes(layers)
    count = min(pinned_bytes // stride, len(in_order))
    pinned, others = in_order[:count], in_order[count:]
    disk = DiskLink(pack.expert_file)
    below = wrap(disk) if wrap else disk
    link, counted = below, ReadTally()
    fetcher = Fetcher(pack, below, counted)
    with ExitStack() as undo:
        undo.callback(lambda: link.close())  # whichever it is by then
        arena = slabs = None
        if pinned:
            arena = _fill(fetcher, [addresses[each] for each in pinned], stride, driver, readers, progress)
            undo.callback(arena.close)
        if min(ram_bytes // stride, len(others)) >= SMALLEST_SLOTS:
            link = _ram_tier(fetcher, [addresses[each] for each in others], ram_bytes)
            fetcher = Fetcher(pack, link, counted)
        if others:
            slabs = PinnedArena(readers * SLABS_PER_READER * stride, driver)
            slabs.pin()
        undo.pop_all()

    def fetch(number: int, slab: Slab) -> None:
        fetcher.fetch(addresses[number], slab)
        fetcher.link.keep(addresses[number], slab.view)

    def reads() -> ReadCounts:
        with counted.lock:
            return ReadCounts(below.disk.snapshot(), counted.tally.retries, counted.tally.rereads)

    ring = None
    if slabs is not None:
        ring = Ring(fetch, slabs.slabs(stride), copier, readers)
    return PinnedBacking(
        arena, pinned, stride, ring=ring, slabs=slabs, reads=reads, held=lambda: held_in_ram(link),
        close_link=link.close,
    )  # fmt: skip


def _ram_tier(fetcher: Fetcher, addresses: Sequence[BlockAddress], ram_bytes: int) -> RamTier:
    tier = RamTier(fetcher.link, addresses, ram_bytes)
    if tier.holds_everything:
        tier.fill(fetcher.fetch)
    return tier


def _fill(
    fetcher: Fetcher, addresses: Sequence[BlockAddress], stride: int, driver: Driver | None, readers: int,
    progress: Progress,
) -> PinnedArena:  # fmt: skip
    """Reads and checks every block into its place, on several threads, then pins the whole."""
    arena = PinnedArena(len(addresses) * stride, driver)

    def read(position: int) -> None:
        fetcher.fetch(addresses[position], arena.slab(position * stride, stride))

    with ThreadPoolExecutor(readers) as pool:
        try:
            for done, _ in enumerate(pool.map(read, range(len(addresses))), start=1):
                progress(done * stride, arena.size_bytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    arena.pin()
    return arena
