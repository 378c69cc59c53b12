"""What can be asked of a source on a GPU at any time: counts, sizes, who is where, and whether all of it adds up."""

import time
import weakref
from typing import Any

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.transfer.counters import LadderCounters
from steerpipe.transfer.cuda.shelf import Shelf
from steerpipe.transfer.link import LinkRate
from steerpipe.transfer.places import places_of


class Observed:
    """Over a shelf; changes nothing."""

    def __init__(self, shelf: Shelf, close: "weakref.finalize[..., Any]") -> None:
        self._shelf, self._close = shelf, close
        self._begun = time.perf_counter()

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

    def places(self) -> bytes:
        """See `transfer.places.Placed`."""
        shelf, backing = self._shelf, self._shelf.backing
        pinned = {expert for number, expert in enumerate(shelf.experts) if backing.locate(number)}
        return places_of(shelf.experts, shelf.table, pinned | backing.held())

    @property
    def tokens(self) -> float:
        """The policy's clock."""
        return self._shelf.now

    @property
    def slots(self) -> int:
        return self._shelf.table.slots

    @property
    def fast_bytes(self) -> int:
        """What slots and table take on the device: all of it from the start."""
        return self._shelf.memory.total_bytes

    @property
    def pinned_bytes(self) -> int:
        return self._shelf.backing.pinned_bytes

    def _check_open(self) -> None:
        if not self._close.alive:
            raise TransferError("the model has been closed", fix="open it again, and close it after the last answer")

    def _check_counts(self) -> None:
        """When nothing moves and no lease is open: nothing is held, lost or miscounted."""
        shelf = self._shelf
        pinned = [expert for expert in shelf.experts if shelf.table.pins(expert)]
        assert not pinned, f"{pinned} are still pinned"
        assert not shelf.broken, f"{list(shelf.broken)} failed and were never cut"
        counts = self.counters()
        assert counts.hits + counts.late + counts.misses == counts.leased, f"the counters do not add up: {counts}"
