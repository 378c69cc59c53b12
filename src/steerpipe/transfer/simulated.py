"""The memory ladder on a virtual clock: the product's own table, policies and queue over links that only count time.

A link moves one chunk at a time. A guess takes a slot only when the link has nothing else to do, is cut at the next
chunk when it is withdrawn, and is transient until it is used: wrong guesses hold at most `transient_limit` slots.
A forecast is there some time after it was asked for; until then the last one stands, but for layers that have come.
Legend: an expert is *begun* when it has a slot; it *lands* when its last byte is there and it has been decoded.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence

from steerpipe.core.ids import ExpertId
from steerpipe.store.policies import Policy
from steerpipe.store.residency import Residency, SlotTable
from steerpipe.transfer.lane import Decoder, Lane
from steerpipe.transfer.machine import Machine
from steerpipe.transfer.queue import Outcome, Reason, Transfer


class SimulatedLadder:
    """Fast slots over one link, or over a link and a disk with a RAM cache between them. `time` is in seconds."""

    def __init__(
        self, machine: Machine, experts: Sequence[ExpertId], policy: Policy, ram_policy: Policy, transient_limit: int
    ) -> None:
        self.machine = machine
        self.time = 0.0
        self.now = 0.0  # in tokens: the table's clock
        self.evictions = self.guesses_sent = 0
        self.unused: set[ExpertId] = set()  # in a slot by a guess; who uses one takes it out
        self.sent: set[ExpertId] = set()  # guesses that were begun; who counts them takes them out
        self.step = -1.0  # the layer that has come last, as deadlines count
        self._stopped = False  # no guess moves before the next forecast
        self.table = SlotTable(experts, machine.slots, policy, transient_limit)
        self.link = Lane(
            machine.link_bytes_per_second, machine.latency_seconds, machine.chunk_bytes, machine.block_bytes,
            machine.looking.bytes_per_second,
        )  # fmt: skip
        self.decoder = Decoder(machine.decoding) if machine.decoding is not None else None
        self.lanes = [self.link]
        self.disk: Lane | None = None
        self.ram: SlotTable | None = None
        if machine.disk is not None:
            below = machine.disk
            self.disk = Lane(below.bytes_per_second, below.latency_seconds, machine.chunk_bytes, machine.block_bytes)
            self.ram = SlotTable(experts, below.ram_slots, ram_policy, below.ram_slots)
            self.lanes.append(self.disk)
        self._guesses: deque[tuple[ExpertId, float]] = deque()  # not begun, nearest first
        self._coming: deque[tuple[float, list[tuple[ExpertId, float]]]] = deque()  # forecasts, and when they are there
        self._fetching: dict[ExpertId, Transfer] = {}  # begun and not landed
        self._without_ram: list[ExpertId] = []  # of these: those that found no slot in RAM

    def demand(self, expert: ExpertId, *, transient: bool) -> bool:
        """Begins an ABSENT expert for compute, which waits, or hurries on one that is LOADING. False: no slot."""
        if self.table.state(expert) is Residency.ABSENT:
            return self._begin(expert, Reason.DEMAND, self.time, transient=transient)
        self._fetch(Transfer(expert, Reason.DEMAND, self.time, self.machine.block_bytes))
        return True

    def foretell(self, wanted: Iterable[tuple[ExpertId, float]], at: float) -> None:
        """What will be expected from `at` on. Guesses for layers that have come are cut now."""
        if at <= self.time:
            self.guess(wanted)
            return
        self._coming.append((at, list(wanted)))
        self._guesses = deque(each for each in self._guesses if each[1] > self.step)
        for expert, transfer in list(self._fetching.items()):
            if transfer.reason is not Reason.DEMAND and transfer.deadline <= self.step:
                self._withdraw(expert)

    def guess(self, wanted: Iterable[tuple[ExpertId, float]]) -> None:
        """(expert, deadline), nearest first: what is now expected. Guesses in flight that are not of it are cut."""
        to_come = [each for each in wanted if each[1] > self.step]
        there = [self.table.state(expert) is Residency.READY for expert, _ in to_come]
        self._guesses, self._stopped = deque(self.machine.looking.sends(to_come, there)), False
        expected = {expert for expert, _ in self._guesses}
        self.table.protect(expected)
        for expert, transfer in list(self._fetching.items()):
            if transfer.reason is not Reason.DEMAND and expert not in expected:
                self._withdraw(expert)

    def come(self, step: float) -> None:
        """A router decides. Where that stops guesses, none moves before the next forecast is there."""
        self.step, self._stopped = step, self.machine.looking.stops

    def stop(self) -> None:
        """No guess moves before the next forecast that is asked for after this. What has come of a block stays."""
        self._stopped = True
        self._coming.clear()

    def run_until(self, time: float, *, guesses: bool = True) -> None:
        """Lets links and readers work up to `time`. `guesses`: also on what nobody waits for."""
        while True:
            self._start(guesses=guesses and not self._stopped)
            ends, told = self._next_end(), self._coming[0][0] if self._coming else math.inf
            if min(ends, told) > time:
                self.time = time
                return
            self.time = min(ends, told)
            if ends <= told:
                self._end()
            else:
                self.guess(self._coming.popleft()[1])

    def run_until_landing(self) -> None:
        """Lets links and readers work up to the next end of a chunk or of a decoding, or to the next forecast."""
        self._start(guesses=not self._stopped)
        ends = min(self._next_end(), self._coming[0][0] if self._coming else math.inf)
        assert ends < math.inf, "compute waits for an expert that nothing moves"
        self.run_until(ends)

    def check_integrity(self) -> None:
        """Asserts every invariant of tables, queues and what lies between them. For tests and the end of a run."""
        for table in filter(None, (self.table, self.ram)):
            table.check_integrity()
        for lane in self.lanes:
            lane.queue.check_integrity()
        loading = {expert for expert in self.table.experts if self.table.state(expert) is Residency.LOADING}
        assert loading == self._fetching.keys(), "an expert is LOADING and not on its way, or the other way round"
        for expert in loading:
            places = sum(expert in lane.queue for lane in self.lanes) + (expert in self._without_ram)
            places += self.decodes(expert)
            assert places == 1, f"{expert} stands in {places} queues"
            assert self.ram is None or self.ram.pins(expert) == (expert in self.link.queue), f"{expert}: RAM pins"

    def _next_end(self) -> float:
        """When something ends next; inf: nothing moves."""
        ends = min(lane.ends for lane in self.lanes)
        return ends if self.decoder is None else min(ends, self.decoder.ends)

    def _end(self) -> None:
        """One thing that ends now: a chunk of the link, else of the disk, else a decoding."""
        for lane in self.lanes:
            if lane.ends <= self.time:
                self._land(lane)
                return
        assert self.decoder is not None, "nothing ends now"
        self._finish(self.decoder.land())

    def _start(self, *, guesses: bool) -> None:
        if self.disk is not None:
            for expert in self._without_ram[:]:
                self._through_ram(self._fetching[expert])
            if self.disk.idle:
                self.disk.start(self.time, guesses=guesses)
        while self._reader_is_free and not self.link.start(self.time, guesses=guesses) and guesses and self._guesses:
            if not self._send(*self._guesses[0]):
                return  # no slot for a guess: it stays the first
            self._guesses.popleft()

    @property
    def _reader_is_free(self) -> bool:
        return self.link.idle and (self.decoder is None or self.decoder.has_room)

    def decodes(self, expert: ExpertId) -> bool:
        """Whether all of it has moved, and it is being made compute-ready."""
        return self.decoder is not None and expert in self.decoder

    def _send(self, expert: ExpertId, deadline: float) -> bool:
        """Begins a guess, or revives one that was withdrawn and has not landed."""
        state = self.table.state(expert)
        if state is Residency.ABSENT:
            if not self._begin(expert, Reason.PREFETCH, deadline, transient=True):
                return False
            self.guesses_sent += 1
            self.unused.add(expert)
            self.sent.add(expert)
        elif state is Residency.LOADING and self._fetching[expert].reason is not Reason.DEMAND:
            self._fetch(Transfer(expert, Reason.PREFETCH, deadline, self.machine.block_bytes))
        return True

    def _begin(self, expert: ExpertId, reason: Reason, deadline: float, *, transient: bool) -> bool:
        speculative = reason is not Reason.DEMAND
        placement = self.table.begin(expert, transient=transient, now=self.now, speculative=speculative)
        if placement is None:
            return False
        if placement.evicted is not None:
            self.evictions += 1
            self.unused.discard(placement.evicted)
        self._fetch(Transfer(expert, reason, deadline, self.machine.block_bytes))
        return True

    def _fetch(self, transfer: Transfer) -> None:
        """Begins the way up of one that has a slot, or hurries it on."""
        expert = transfer.expert
        self._fetching[expert] = transfer
        if self.decodes(expert):
            return  # nothing of it is left to move
        if self.disk is not None and expert not in self.link.queue:
            self._through_ram(transfer)
        else:
            self.link.queue.add(transfer)

    def _through_ram(self, transfer: Transfer) -> None:
        """Reads from the disk what is not in RAM, and goes on over the link when it is."""
        assert self.ram is not None and self.disk is not None, "this machine has one tier"
        expert, state = transfer.expert, self.ram.state(transfer.expert)
        if expert in self._without_ram:
            self._without_ram.remove(expert)
        if state is Residency.READY:
            self.ram.touch(expert, self.now)
            self.ram.pin(expert)
            self.link.queue.add(transfer)
        elif state is Residency.LOADING or self.ram.begin(expert, transient=False, now=self.now) is not None:
            self.disk.queue.add(transfer)
        else:
            self._without_ram.append(expert)

    def _withdraw(self, expert: ExpertId) -> None:
        """A guess that is no longer expected: cut now, or when its chunk has landed."""
        if expert in self._without_ram:
            self._without_ram.remove(expert)
            self._drop(expert)
            return
        for lane in self.lanes:
            if lane.queue.cancel(expert, Reason.PREFETCH) is Outcome.CUT:
                self._cut(lane, expert)

    def _land(self, lane: Lane) -> None:
        expert, outcome = lane.land()
        if outcome is Outcome.CUT:
            self._cut(lane, expert)
        elif outcome is Outcome.DONE and lane is self.disk:
            assert self.ram is not None, "a disk lands in RAM"
            self.ram.finish(expert)
            self._through_ram(self._fetching[expert])
        elif outcome is Outcome.DONE:
            if self.ram is not None:
                self.ram.unpin(expert)
            if self.decoder is not None:
                self.decoder.begin(expert, self.time)
            else:
                self._finish(expert)

    def _finish(self, expert: ExpertId) -> None:
        del self._fetching[expert]
        self.table.finish(expert)

    def _cut(self, lane: Lane, expert: ExpertId) -> None:
        if self.ram is not None and lane is self.disk:
            self.ram.abandon(expert)
        elif self.ram is not None:
            self.ram.unpin(expert)
        self._drop(expert)

    def _drop(self, expert: ExpertId) -> None:
        del self._fetching[expert]
        self.unused.discard(expert)
        self.table.abandon(expert)
