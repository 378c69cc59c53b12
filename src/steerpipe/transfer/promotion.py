"""Blocks that may be wanted soon, from the disk into RAM and no further: when readers have nothing else to do."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.store.reader import Pack
from steerpipe.transfer.fetch import Fetcher
from steerpipe.transfer.ladder import Ladder
from steerpipe.transfer.link import BlockAddress
from steerpipe.transfer.ram import RamTier
from steerpipe.transfer.slabs import Slab


class Promotion:
    """Takes no slot and delays nobody by more than the block that is being read."""

    def __init__(self, pack: Pack, tier: RamTier, ladder: Ladder, addresses: Mapping[ExpertId, BlockAddress]) -> None:
        self.tier = tier
        self._fetcher = Fetcher(pack, tier.below, ladder)
        self._ladder = ladder
        self._addresses = addresses
        self._wanted: deque[ExpertId] = deque()
        self._bringing = 0  # blocks that are being read
        self.promoted = 0  # blocks so far

    @property
    def pending(self) -> bool:
        """A reader could begin another. Holding the ladder's lock."""
        return bool(self._wanted)

    @property
    def moving(self) -> bool:
        """Pending, or being read. Holding the ladder's lock."""
        return bool(self._wanted or self._bringing)

    def expect(self, experts: Sequence[ExpertId], keep: Collection[ExpertId] = ()) -> None:
        """In place of what was expected before, the likeliest first. `keep`: they give no place to others, once in RAM.
        Never waits for a read."""
        self.tier.protect(keep)
        with self._ladder.lock:
            self._wanted = deque(experts)
            self._ladder.work.notify()

    def bring_next(self) -> None:
        """One block. A reader's thread; blocks. What cannot be read is left to whoever needs it."""
        with self._ladder.lock:
            if not self._wanted:
                return
            address = self._addresses[self._wanted.popleft()]
            self._bringing += 1
        came = False
        try:
            came = self._bring(address)
        finally:
            with self._ladder.lock:
                self._bringing -= 1
                self.promoted += came
                self._ladder.changed.notify_all()

    def _bring(self, address: BlockAddress) -> bool:
        """Whether it came."""
        if address.expert in self.tier.held():
            return False
        slab = Slab.allocate(address.size_bytes)
        try:
            self._fetcher.fetch(address, slab)
        except TransferError:
            return False
        self.tier.expect(address, slab.view)
        return True
