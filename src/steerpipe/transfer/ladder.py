"""The state that leases and readers share: who lies where, what moves, who waits. One lock guards all of it.

Every method wants the lock to be held by the caller, keeps it to its end, does no input or output, and takes
microseconds. `work` wakes readers, `changed` wakes leases.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.core.timeline import Timeline
from steerpipe.store.residency import Residency, SlotTable
from steerpipe.transfer.counters import Tally
from steerpipe.transfer.journey import Journey
from steerpipe.transfer.link import BlockAddress, Piece
from steerpipe.transfer.queue import Outcome, Reason, Transfer, TransferQueue
from steerpipe.transfer.slabs import Slab, SlabPool
from steerpipe.transfer.visit import CHUNK_BYTES, take_visit


class Ladder:
    """See above. `table` and `queue` are the decisions; what is here joins them."""

    def __init__(
        self, addresses: Mapping[ExpertId, BlockAddress], table: SlotTable, transient_limit: int,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:  # fmt: skip
        lock = threading.RLock()  # a collected source closes itself, perhaps inside one of these methods
        self.work = threading.Condition(lock)
        self.changed = threading.Condition(lock)
        self.lock = lock
        self.addresses = addresses
        self.table = table
        self.queue = TransferQueue()
        self.slabs = SlabPool(max(address.size_bytes for address in addresses.values()))
        self.tally = Tally()
        self.now = 0  # tokens
        self.transient_limit = transient_limit
        self.ahead: set[ExpertId] = set()  # transient guesses of layer streaming that nobody has used
        self.broken: dict[ExpertId, TransferError] = {}  # LOADING, given up, and still pinned by who waits for them
        self.wishes = deque[tuple[ExpertId, float]]()  # guesses and deadlines, for when the link has nothing to do
        self.hungry = 0  # leases that wait for slots: until they have them, nobody guesses
        self.timeline: Timeline | None = None  # where reads, decodes and waits are noted
        self.closed = False
        self.crash: BaseException | None = None  # of a reader: a mistake of ours
        self._chunk_bytes = chunk_bytes
        self._journeys: dict[ExpertId, Journey] = {}
        self._guessed: dict[ExpertId, Reason] = {}  # brought by a guess and not used yet

    # --- what leases and predictors ask for

    def check_usable(self) -> None:
        if self.crash is not None:
            raise RuntimeError("a reader thread has stopped: this is a mistake of ours") from self.crash
        if self.closed:
            raise TransferError("the model has been closed", fix="open it again, and close it after the last answer")

    def demand(self, expert: ExpertId, *, transient: bool) -> bool:
        """Pins an expert and sends for it, at the cost of guesses where no slot is to be had. False: not yet."""
        if self.table.state(expert) is not Residency.ABSENT:  # another lease or a guess brought it meanwhile
            self.pin(expert, transient=transient)
            return True
        transient = transient and not self.has_room
        while not (begun := self._begin(expert, Reason.DEMAND, 0.0, transient=transient)):
            if not self._withdraw():
                break
        if begun:
            self.table.pin(expert)
        return begun

    @property
    def has_room(self) -> bool:
        """More free slots than a prompt passes through: then nothing that comes is worth dropping."""
        return self.table.free_slots > self.transient_limit

    def pin(self, expert: ExpertId, *, transient: bool) -> Reason:
        """Takes what is READY or LOADING; a guess on its way goes on as demand. Says who brought it: a guess once,
        demand ever after.
        """
        self.table.pin(expert)
        if not transient or self.has_room:
            self.table.promote(expert)
        if expert in self.queue and self._journeys[expert].error is None:
            self._enqueue(expert, Reason.DEMAND, 0.0)
        self.ahead.discard(expert)
        return self._guessed.pop(expert, Reason.DEMAND)

    def guess(self, expert: ExpertId, reason: Reason, deadline: float, *, transient: bool) -> bool:
        """Sends for an expert if a slot can be had that nobody protects. False: it is there, or cannot be sent for."""
        assert reason is not Reason.DEMAND, "a demand is made by a lease"
        if expert in self.queue and self._journeys[expert].error is None:
            self._enqueue(expert, reason, deadline)  # perhaps sooner than before, or cancelled and wanted again
            return True
        if self.hungry or self.table.state(expert) is not Residency.ABSENT:
            return False
        begun = self._begin(expert, reason, deadline, transient=transient)
        if begun:
            self._guessed[expert] = reason
        return begun

    def follow(self, expert: ExpertId, deadline: float, most: int) -> bool:
        """Sends for an expert that a token went without, to be kept, unless `most` are on their way already. It is no
        guess: no forecast cuts it."""
        free = not self.hungry and len(self.queue) < most and self.table.state(expert) is Residency.ABSENT
        return free and self._begin(expert, Reason.PREFETCH, deadline, transient=False)

    def wish(self, wanted: Iterable[tuple[ExpertId, float]]) -> None:
        """(expert, deadline): all that is expected now. Each gets a slot only when the link has nothing else to do, in
        this order; guesses on their way that are not among them are cut.
        """
        self.wishes = deque(wanted)
        expected = {expert for expert, _ in self.wishes}
        stale = [e for e, reason in self._guessed.items() if reason is Reason.PREFETCH and e not in expected]
        self.withdraw([expert for expert in stale if expert not in self.ahead], Reason.PREFETCH)
        if self.wishes:
            self.work.notify()

    def withdraw(self, experts: Collection[ExpertId], reason: Reason) -> None:
        """Cuts guesses of that reason or a lesser one; those that have landed stay, unless they are transient."""
        for expert in experts:
            if self.table.state(expert) is Residency.LOADING:
                self._cancel(expert, reason)
            elif expert in self.ahead and self.table.state(expert) is Residency.READY and not self.table.pins(expert):
                self.table.pin(expert)
                self.table.unpin(expert)  # the last unpin of a transient expert frees its slot
            self.ahead.discard(expert)

    def expire(self, now_seconds: float) -> None:
        """Cuts guesses whose deadline has passed."""
        if self._guessed:
            for expert in self.queue.expire(now_seconds):
                self._cut(expert)

    def let_go(self, expert: ExpertId) -> None:
        """Takes one pin away. What nobody waits for any more is cut, or buried if it had failed."""
        self.table.unpin(expert)
        if self.table.pins(expert) or self.table.state(expert) is not Residency.LOADING:
            return
        if self.broken.pop(expert, None) is not None:
            self._bury(expert)
        else:
            self._cancel(expert, Reason.DEMAND)

    def evicted(self, expert: ExpertId) -> None:
        """The table has given its slot to somebody else."""
        self.tally.evictions += 1
        self._guessed.pop(expert, None)
        self.ahead.discard(expert)

    @property
    def moving(self) -> bool:
        """Whether any expert is on its way."""
        return bool(self._journeys)

    @property
    def idle(self) -> bool:
        return not self._journeys and not self.wishes

    # --- what readers do

    def next_visit(self) -> list[Piece]:
        """Takes chunks from the queue, each with memory to go to; with nothing in it, begins what was wished for."""
        pieces = []
        while self.wishes and self.queue.next_reason() is None:
            expert, deadline = self.wishes.popleft()
            if not self.guess(expert, Reason.PREFETCH, deadline, transient=True):
                self.changed.notify_all()  # perhaps the last that was to be done
        for expert, offset, length in take_visit(self.queue, self.addresses, self._chunk_bytes):
            journey = self._journeys[expert]
            journey.slab = journey.slab or self.slabs.take()
            pieces.append(Piece(self.addresses[expert], offset, journey.slab.view[offset : offset + length]))
        return pieces

    def arrived(self, piece: Piece) -> Slab | None:
        """A piece has been read. The block if it is whole: the reader decodes it, then calls `ready` or `spoiled`."""
        expert, journey = piece.address.expert, self._journeys[piece.address.expert]
        journey.moved_bytes += len(piece.into)
        self.tally.of[self.queue.reason(expert) or Reason.DEMAND].read_bytes += len(piece.into)
        outcome = self.queue.advance(expert, len(piece.into))
        if outcome is Outcome.CUT:
            self._cut(expert)
        return journey.slab if outcome is Outcome.DONE else None

    def failed(self, piece: Piece, error: TransferError) -> None:
        """A piece cannot be had: the transfer is given up as soon as nothing of it is in flight."""
        expert = piece.address.expert
        self._journeys[expert].error = error
        if self.queue.failed(expert, len(piece.into)) is Outcome.CUT:
            self._cut(expert)

    def ready(self, expert: ExpertId) -> None:
        """Decoded into its slot."""
        self.table.finish(expert)
        self.tally.of[self._end(expert).began_as].transfers += 1

    def spoiled(self, expert: ExpertId, error: TransferError) -> None:
        """All of it was read, and it is not what was packed."""
        self._journeys[expert].error = error
        self._cut(expert)

    # --- inside

    def _begin(self, expert: ExpertId, reason: Reason, deadline: float, *, transient: bool) -> bool:
        speculative = reason is not Reason.DEMAND
        placement = self.table.begin(expert, transient=transient, now=self.now, speculative=speculative)
        if placement is None:
            return False
        if placement.evicted is not None:
            self.evicted(placement.evicted)
        self._journeys[expert] = Journey(reason)
        self._enqueue(expert, reason, deadline)
        return True

    def _enqueue(self, expert: ExpertId, reason: Reason, deadline: float) -> None:
        self.queue.add(Transfer(expert, reason, deadline, self.addresses[expert].size_bytes))
        self.work.notify()

    def _withdraw(self) -> bool:
        """Cuts the least urgent guess that has not landed. True: a slot has come free at once."""
        for reason in (Reason.DRAFT, Reason.PREFETCH):
            for expert in reversed(self.queue.waiting(reason)):
                return self._cancel(expert, reason) is Outcome.CUT
        return False

    def _cancel(self, expert: ExpertId, reason: Reason) -> Outcome | None:
        outcome = self.queue.cancel(expert, reason)
        if outcome is Outcome.CUT:
            self._cut(expert)
        return outcome

    def _cut(self, expert: ExpertId) -> None:
        """Nothing of it is in flight and nothing more will come: cancelled, or failed for good."""
        journey = self._journeys[expert]
        if journey.error is not None:
            self.tally.failures += 1
        else:
            self.tally.of[journey.began_as].cancelled += 1
            self.tally.of[journey.began_as].cancelled_bytes += journey.moved_bytes
        if self.table.pins(expert):
            assert journey.error is not None, f"{expert} was cancelled while a lease waits for it"
            self.broken[expert] = journey.error  # buried by the last one who lets go
            self.changed.notify_all()
        else:
            self._bury(expert)

    def _bury(self, expert: ExpertId) -> None:
        self.table.abandon(expert)
        self._guessed.pop(expert, None)
        self.ahead.discard(expert)
        self._end(expert)

    def _end(self, expert: ExpertId) -> Journey:
        journey = self._journeys.pop(expert)
        if journey.slab is not None:
            self.slabs.give_back(journey.slab)
        self.changed.notify_all()  # something landed, or a slot came free
        return journey
