"""Serving a step that runs already: what is missing comes into the table while kernels wait for it there.

The order that makes it safe is in docs/adr/0008-cuda.md. The host has about 75 us per layer, most of it for others.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from steerpipe.store.residency import Residency
from steerpipe.transfer.cuda.shelf import Shelf
from steerpipe.transfer.queue import Reason

NOMINEES = 2  # more victims are chosen ahead than a layer has experts, when its copies are queued: the host has time


class Server:
    """Serves layers in the model's order. Engine thread only."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._last_layer = list(shelf.base)[-1]
        self._before: list[int] = []  # of the layer that was served last: it may run still

    def serve(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None,
        meanwhile: Callable[[], None] | None = None, *, ahead: bool = False,
    ) -> None:  # fmt: skip
        """Copies first, then guesses; what is touched, counted and prepared comes when they are queued."""
        shelf, table, tally = self._shelf, self._shelf.table, self._shelf.tally
        shelf.served = shelf.busy = True
        base, here = shelf.base[layer], shelf.here
        numbers = [base + index for index in routed]
        if not base:
            shelf.judge_last()
        missing = {number: None for number in numbers if not here[number]}
        kept = numbers if keep is None else [base + index for index in routed if index in keep]
        waiting = self._bring(missing, numbers, kept, ahead) if missing else None
        hits = len(numbers) - len(missing)
        if shelf.guessed or table.lingering:
            hits -= self._claim((number for number in numbers if number not in missing), kept)
        self._before = numbers
        shelf.passed = base  # its router has posted: earlier layers have run
        shelf.settle_guesses(base, numbers)
        if meanwhile is not None:
            meanwhile()
        tally.leases += 1
        tally.leased += len(numbers)
        tally.of[Reason.DEMAND].hits += hits
        table.touch_many(kept, shelf.now)
        if waiting:
            self._await(waiting)
        if table.nominees < len(numbers) and table.free_slots + len(table.lingering) < len(numbers):
            table.nominate(NOMINEES + len(numbers), shelf.now)
        shelf.pump()
        shelf.busy = layer != self._last_layer

    def end(self) -> None:
        """Before the device is waited for at the end of everything: nobody may wait for us then."""
        if self._shelf.busy:
            self.release()

    def release(self) -> None:
        """Nobody waits any more: every entry has an address until the device has finished, then the table is true.

        The shelf is busy until the caller has done all that he has to.
        """
        shelf = self._shelf
        shelf.busy = True
        for number, here in enumerate(shelf.here):
            if not here:
                shelf.copier.write(shelf.memory.entries[number], shelf.memory.zeros)
        shelf.copier.drain()
        for number, here in enumerate(shelf.here):
            if not here:
                shelf.copier.write(shelf.memory.entries[number], shelf.memory.absent[number])
        shelf.mend()
        shelf.copier.drain()

    def check_table(self) -> None:
        """When the device has finished: its table is what the slots say, and so is the host's own."""
        shelf, found = self._shelf, self._shelf.memory.table.cpu()
        rows = {layer: row for row, layer in enumerate(shelf.base)}
        for number, expert in enumerate(shelf.experts):
            ready = shelf.table.state(expert) is Residency.READY
            assert bool(shelf.here[number]) == ready, f"{expert} is wrongly marked as there or not"
            said = shelf.memory.addresses[shelf.table.slot(expert)] if ready else shelf.memory.absent[number]
            entry = int(found[rows[expert.layer], expert.expert])
            assert entry == said, f"the table has {entry:#x} for {expert} instead of {said:#x}"

    def _bring(
        self, missing: Collection[int], numbers: Sequence[int], kept: Collection[int], ahead: bool
    ) -> list[int]:  # fmt: skip
        """Queues the copies of what lies in pinned memory; returns what the ring has to bring."""
        shelf, table = self._shelf, self._shelf.table
        waiting: list[int] = []
        absent = missing
        if shelf.moving and (guessed := [number for number in missing if number in shelf.moving]):
            shelf.hasten(guessed)
            for number in guessed:
                shelf.tally.of[shelf.use(number, transient=number not in kept)].late += 1
            absent = missing = [number for number in missing if number not in guessed]
        if shelf.loading:
            absent = [number for number in missing if number not in shelf.loading]
            for number in set(missing) - set(absent):
                shelf.tally.of[shelf.use(number, transient=number not in kept)].late += 1
                waiting.append(number)
        group: list[int] = []
        spared = {*numbers, *self._before, *shelf.expected}
        # Who is waited for begins at once; then there is time, and fewer words between blocks cost the link less.
        size = len(absent) if ahead else 1
        for number in absent:
            begun = number not in kept and shelf.demand(number, transient=True, sparing=spared)
            begun = begun or shelf.demand(number, transient=False, sparing=spared)
            begun = begun or shelf.demand(number, transient=False, sparing=numbers)  # a layer has to be there together
            assert begun, f"{table.slots} slots cannot hold a layer's {len(numbers)} experts: `serves` said so"
            group.append(number)
            if len(group) == size:
                shelf.fetch(group, Reason.DEMAND)
                group, size = [], 2 * size
        if group:
            shelf.fetch(group, Reason.DEMAND)
        shelf.settle()
        shelf.tally.misses += len(absent)
        if shelf.loading:
            waiting += [number for number in absent if number in shelf.loading]
        return waiting

    def _await(self, waiting: Sequence[int]) -> None:
        """Until the ring has brought them. After an error `release` gives the pins up."""
        shelf, table = self._shelf, self._shelf.table
        for number in waiting:
            table.pin(shelf.experts[number])  # so that an error finds us
        while any(number in shelf.loading for number in waiting):
            shelf.land(wait=True)
            for number in waiting:
                if number in shelf.broken:
                    raise shelf.broken[number]
        for number in waiting:
            shelf.let_go(number)

    def _claim(self, numbers: Iterable[int], kept: Collection[int]) -> int:
        """Experts that were guessed, or lay there from a prompt, are the cache's from now on; how many were guessed."""
        shelf, claimed = self._shelf, 0
        for number in numbers:
            if number in shelf.guessed or number in shelf.table.lingering:
                reason = shelf.use(number, transient=number not in kept)
                if reason is not Reason.DEMAND:
                    shelf.tally.of[reason].hits += 1
                    claimed += 1
        return claimed
