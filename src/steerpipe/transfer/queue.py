"""What moves next: transfers of expert blocks by priority, chunk by chunk. Pure; the caller holds a lock.

Demand before prefetch before draft. Within a reason what has begun goes on, then the earlier deadline, then the order
of arrival. A transfer that is added again goes on where it stands, so no byte is moved twice; one that is cancelled
is cut at the next chunk. Any number of chunks may be in flight at once, of one transfer or of several.
"""

import heapq
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from steerpipe.core.ids import ExpertId


class Reason(IntEnum):
    """Why an expert moves; the smaller goes first."""

    DEMAND = 0  # the router has chosen it, compute waits
    PREFETCH = 1  # a predictor expects it within this answer
    DRAFT = 2  # a prompt that is still being typed may need it


class Outcome(Enum):
    """What became of a transfer."""

    MOVING = "moving"  # there is more to move, or a chunk in flight
    DONE = "done"  # every byte has arrived; it has left the queue
    CUT = "cut"  # it was cancelled, expired or failed, and nothing of it is in flight: its slot may be freed


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block on its way up. `deadline` is on the caller's clock; `done_bytes` lie in the slot already."""

    expert: ExpertId
    reason: Reason
    deadline: float
    size_bytes: int
    done_bytes: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.done_bytes < self.size_bytes, f"{self.done_bytes} of {self.size_bytes} bytes are done"


class Chunk(NamedTuple):
    """Bytes to move now: [offset, offset + length) of the expert's block."""

    expert: ExpertId
    offset: int
    length: int


_Rank = tuple[int, bool, float, int]  # reason, not yet begun, deadline, arrival


@dataclass(slots=True)
class _Entry:
    reason: Reason
    deadline: float
    size_bytes: int
    issued_bytes: int  # handed out: in flight or done
    done_bytes: int
    arrival: int
    cut: bool = False  # hands out nothing more, and leaves when nothing of it is in flight
    failed: bool = False  # has a hole: can only be begun anew
    again: Transfer | None = None  # it failed, and was added again before it had left

    @property
    def rank(self) -> _Rank:
        return (self.reason, self.issued_bytes == 0, self.deadline, self.arrival)

    @property
    def in_flight(self) -> bool:
        return self.issued_bytes > self.done_bytes

    @property
    def waits(self) -> bool:
        """Whether it has bytes to hand out."""
        return not self.cut and self.issued_bytes < self.size_bytes


class TransferQueue:
    """At most one transfer per expert. Every call but `expire` and `waiting` is O(log n), amortised."""

    def __init__(self) -> None:
        self._entries: dict[ExpertId, _Entry] = {}
        self._heap: list[tuple[_Rank, ExpertId]] = []  # may hold ranks that are no longer true: dropped when met
        self._arrivals = 0

    def __len__(self) -> int:
        """Transfers that wait or have a chunk in flight."""
        return len(self._entries)

    def __contains__(self, expert: ExpertId) -> bool:
        return expert in self._entries

    def reason(self, expert: ExpertId) -> Reason | None:
        """Why it moves; None for an expert that is not in the queue."""
        entry = self._entries.get(expert)
        return None if entry is None else entry.reason

    def done_bytes(self, expert: ExpertId) -> int:
        """What has arrived of a transfer in the queue."""
        return self._entries[expert].done_bytes

    def waiting(self, reason: Reason) -> list[ExpertId]:
        """Transfers of that reason with bytes to hand out, first come first."""
        return [expert for expert, entry in self._entries.items() if entry.reason is reason and entry.waits]

    def add(self, transfer: Transfer) -> None:
        """A new transfer; or one in the queue takes the better reason and the earlier deadline and goes on.

        One that was cancelled and has a chunk in flight is revived; one that failed begins anew when that has landed.
        """
        entry = self._entries.get(transfer.expert)
        if entry is not None and entry.failed:
            entry.again = transfer
            return
        if entry is None:
            self._arrivals += 1
            entry = self._entries[transfer.expert] = _Entry(
                transfer.reason, transfer.deadline, transfer.size_bytes,
                transfer.done_bytes, transfer.done_bytes, self._arrivals,
            )  # fmt: skip
        else:
            assert entry.size_bytes == transfer.size_bytes, f"{transfer.expert} has changed its size"
            revived, entry.cut = entry.cut, False  # what a cancelled guess had as its reason counts no more
            entry.reason = transfer.reason if revived else min(entry.reason, transfer.reason)
            entry.deadline = transfer.deadline if revived else min(entry.deadline, transfer.deadline)
        self._offer(transfer.expert, entry)

    def take(self, chunk_bytes: int) -> Chunk | None:
        """The next chunk, at most `chunk_bytes` of the transfer that ranks first; None when there is nothing to do.

        It is in flight until `advance` or `failed` was called for it.
        """
        assert chunk_bytes > 0, f"a chunk of {chunk_bytes} bytes"
        expert = self._first()
        if expert is None:
            return None
        entry = self._entries[expert]
        rank = entry.rank
        chunk = Chunk(expert, entry.issued_bytes, min(chunk_bytes, entry.size_bytes - entry.issued_bytes))
        entry.issued_bytes += chunk.length
        if entry.rank != rank:  # it has begun
            heapq.heappop(self._heap)
            self._offer(expert, entry)
        return chunk

    def next_reason(self) -> Reason | None:
        """The reason of what `take` would give; None when it would give nothing."""
        expert = self._first()
        return None if expert is None else self._entries[expert].reason

    def advance(self, expert: ExpertId, length: int) -> Outcome:
        """A chunk of that many bytes has arrived."""
        entry = self._entries[expert]
        assert 0 < length <= entry.issued_bytes - entry.done_bytes, f"{length} bytes of {expert} were not in flight"
        entry.done_bytes += length
        if entry.done_bytes == entry.size_bytes:  # though it was cancelled: it is here
            del self._entries[expert]
            return Outcome.DONE
        return self._settle(expert, entry)

    def cancel(self, expert: ExpertId, reason: Reason) -> Outcome | None:
        """Cuts a transfer whose reason is `reason` or a lesser one; None where there is none: a guess that is
        withdrawn never stops what is demanded. MOVING: a chunk is in flight; its `advance` will say what came of it.
        """
        entry = self._entries.get(expert)
        if entry is None or (entry.again or entry).reason < reason:
            return None
        entry.cut, entry.again = True, None
        return self._settle(expert, entry)

    def expire(self, now: float) -> list[ExpertId]:
        """Cancels prefetches and drafts whose deadline has passed; returns those that are CUT at once."""
        late = [expert for expert, entry in self._entries.items() if entry.deadline < now and entry.waits]
        return [expert for expert in late if self.cancel(expert, Reason.PREFETCH) is Outcome.CUT]

    def failed(self, expert: ExpertId, length: int) -> Outcome:
        """A chunk of that many bytes will not arrive, after all retries: the transfer is given up, whatever its reason.

        MOVING: another chunk is in flight; its `advance` or `failed` will say CUT.
        """
        entry = self._entries[expert]
        assert 0 < length <= entry.issued_bytes - entry.done_bytes, f"{length} bytes of {expert} were not in flight"
        entry.issued_bytes -= length
        entry.cut = entry.failed = True
        return self._settle(expert, entry)

    def check_integrity(self) -> None:
        """Asserts every invariant. O(n): for tests and idle times."""
        offered = set(self._heap)
        for expert, entry in self._entries.items():
            assert 0 <= entry.done_bytes <= entry.issued_bytes <= entry.size_bytes, f"{expert}: bytes are miscounted"
            assert entry.done_bytes < entry.size_bytes, f"{expert} is done and still in the queue"
            assert entry.in_flight or not entry.cut, f"{expert} was cut and still holds its place"
            assert not entry.waits or (entry.rank, expert) in offered, f"{expert} waits and is never taken"

    def _first(self) -> ExpertId | None:
        while self._heap:
            rank, expert = self._heap[0]
            entry = self._entries.get(expert)
            if entry is not None and entry.rank == rank and entry.waits:
                return expert
            heapq.heappop(self._heap)
        return None

    def _offer(self, expert: ExpertId, entry: _Entry) -> None:
        if entry.waits:
            heapq.heappush(self._heap, (entry.rank, expert))

    def _settle(self, expert: ExpertId, entry: _Entry) -> Outcome:
        if not entry.cut or entry.in_flight:
            return Outcome.MOVING
        del self._entries[expert]
        if entry.again is None:
            return Outcome.CUT
        self.add(entry.again)
        return Outcome.MOVING
