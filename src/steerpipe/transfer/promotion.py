"""Blocks that may be wanted soon, from the disk into RAM and no further: when readers have nothing else to do."""

from collections import deque
from collections.abc import Mapping, Sequence

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
        self.promoted = 0  # blocks so far

    @property
    def pending(self) -> bool:
        """Holding the ladder's lock."""
        return bool(self._wanted)

    def expect(self, experts: Sequence[ExpertId]) -> None:
        """In place of what was expected before, the likeliest first. Never waits."""
        with self._ladder.lock:
            self._wanted = deque(experts)
            self._ladder.work.notify()

    def bring_next(self) -> None:
        """One block. A reader's thread; blocks. What cannot be read is left to whoever needs it."""
        with self._ladder.lock:
            if not self._wanted:
                return
            address = self._addresses[self._wanted.popleft()]
        if address.expert in self.tier.held():
            return
        slab = Slab.allocate(address.size_bytes)
        try:
            self._fetcher.fetch(address, slab)
        except TransferError:
            return
        self.tier.expect(address, slab.view)
        with self._ladder.lock:
            self.promoted += 1
            self._ladder.changed.notify_all()
