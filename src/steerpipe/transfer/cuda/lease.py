"""One lease on a GPU: what is there first, then what is on its way, in the order of the copy stream."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Self

from steerpipe.transfer.cuda.copier import Mark
from steerpipe.transfer.cuda.shelf import GROUP, Shelf
from steerpipe.transfer.queue import Reason

Leave = Callable[[int, int], None]  # (layer, how many experts were used) at the end of a block without an error


class CudaLease:
    """A context manager and its own BlockLease. Leaving the block releases everything, also after an error.

    An expert is in one of four places, all but the first pinned: `wanted` (no slot yet), `loading` (the ring brings
    it), `groups` (its copy is queued), `wave` (being computed). It moves in that order, each at most once.
    """

    def __init__(
        self, shelf: Shelf, layer: int, routed: Sequence[int], keep: Collection[int] | None, leave: Leave
    ) -> None:  # fmt: skip
        assert len(set(routed)) == len(routed), f"experts leased twice at once: {sorted(routed)}"
        self._shelf = shelf
        self._layer = layer
        self._base = shelf.base[layer]
        self._routed = [self._base + index for index in sorted(routed)]
        self._kept = None if keep is None else {self._base + index for index in keep}
        self._leave = leave
        self._wanted: list[int] = []  # by place in pinned memory; those of the ring last, in their order on disk
        self._loading: list[int] = []
        self._groups: deque[tuple[list[int], Mark | None]] = deque()
        self._wave: list[int] = []
        self._size = 1  # of the next group: compute starts early, and launches stay few
        self._largest = max(1, min(GROUP, shelf.memory.slots // 4, shelf.transient_limit // 2))
        self._begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error all is mended; if that is interrupted too, the shelf stays busy, and who comes next mends."""
        try:
            if kind is None:
                self._end()
                if self._begun:
                    self._leave(self._layer, len(self._routed))
                self._shelf.pump()
            else:
                self._shelf.mend()
        except BaseException:  # an interrupt as well
            self._shelf.mend()
            self._shelf.busy = False
            raise
        self._shelf.busy = False

    def _end(self) -> None:
        shelf = self._shelf
        shelf.settle_marked()
        if self._groups or self._loading:  # cut short: whoever is served next finds the table as it will be
            shelf.copier.join(shelf.copier.copied())
        shelf.read(self._wave)
        for group, _ in self._groups:  # copied and never computed
            shelf.table.unpin_many(group)
        for number in self._loading:
            shelf.let_go(number)
        self._wave, self._loading, self._wanted = [], [], []
        self._groups.clear()

    def waves(self) -> Iterator[tuple[int, ...]]:
        """Once. The host waits only for what the ring brings; TransferError if an expert cannot be had."""
        assert not self._begun, "the waves of a lease come once"
        self._begun = True
        self._shelf.meet()
        self._shelf.passed = len(self._shelf.experts)  # marks stand for all that is read
        self._shelf.land(wait=False)
        self._classify()
        self._ask()
        if self._wave:
            yield self._as_wave()
        while self._wanted or self._loading or self._groups:
            self._next()
            yield self._as_wave()

    def _classify(self) -> None:
        """Every expert to its first place, counted."""
        shelf, table, tally = self._shelf, self._shelf.table, self._shelf.tally
        if shelf.moving:
            shelf.hasten([number for number in self._routed if number in shelf.moving])
            shelf.settle_marked()
        tally.leases += 1
        tally.leased += len(self._routed)
        kept = self._routed if self._kept is None else [number for number in self._routed if number in self._kept]
        table.touch_many(kept, shelf.now)
        ready = [number for number in self._routed if shelf.here[number]]
        self._loading = [number for number in self._routed if number in shelf.loading]
        found = {*ready, *self._loading}
        self._wanted = sorted((number for number in self._routed if number not in found), key=shelf.order)
        tally.misses += len(self._wanted)
        table.pin_many([*ready, *self._loading])
        for number in self._loading:
            tally.of[shelf.use(number, transient=self._transient(number))].late += 1
        coming: dict[int, tuple[list[int], Mark]] = {}  # by the mark's ordinal
        marks = shelf.there(table.slots_of(ready))
        for number, mark, reason in zip(ready, marks, shelf.use_many(ready, self._kept), strict=True):
            if mark is None:
                tally.of[reason].hits += 1
                self._wave.append(number)
            else:
                tally.of[reason].late += 1
                coming.setdefault(mark.ordinal, ([], mark))[0].append(number)
        self._groups.extend(coming[ordinal] for ordinal in sorted(coming))

    def _ask(self) -> None:
        """Sends for as many as can get slots. Where one transient (or kept) expert gets none, no other will."""
        shelf = self._shelf
        refused = False  # the transient ones
        waiting: list[int] = []
        group: list[int] = []
        for place, number in enumerate(self._wanted):
            transient = self._transient(number)
            if (transient and refused) or not shelf.demand(number, transient=transient):
                refused = True
                waiting.append(number)
                if transient:
                    continue
                waiting += self._wanted[place + 1 :]
                break
            group.append(number)
            if len(group) == self._size:
                self._fetch(group)
                group, self._size = [], min(2 * self._size, self._largest)
        self._fetch(group)
        self._wanted = waiting

    def _fetch(self, group: list[int]) -> None:
        """They have slots. The copies are queued, or the ring is asked."""
        shelf = self._shelf
        shelf.fetch(group, Reason.DEMAND)
        mark = shelf.settle_marked()
        shelf.table.pin_many(group)
        copied = [number for number in group if number not in shelf.loading]
        if copied:
            self._groups.append((copied, mark))
        if len(copied) < len(group):
            self._loading += [number for number in group if number in shelf.loading]

    def _next(self) -> None:
        """Frees the wave that has been computed, asks for more, and takes the next group."""
        shelf = self._shelf
        done, self._wave = self._wave, []
        shelf.read(done)
        if len(self._groups) < 2:  # before the link has nothing to do; sooner, groups would stay small
            self._ask()
        shelf.land(wait=False)
        self._gather()
        while not self._groups:
            assert self._loading, f"{len(self._wanted)} experts want slots, and nobody will give one back"
            shelf.land(wait=True)
            self._gather()
        self._wave, mark = self._groups.popleft()
        if mark is not None:
            shelf.copier.join(mark)

    def _gather(self) -> None:
        """What the ring has brought is a group."""
        shelf = self._shelf
        for number in self._loading:
            if number in shelf.broken:
                raise shelf.broken[number]
        ready = [number for number in self._loading if shelf.here[number]]
        if ready:
            self._loading = [number for number in self._loading if not shelf.here[number]]
            marks = [mark for mark in shelf.there(shelf.table.slots_of(ready)) if mark is not None]
            self._groups.append((ready, max(marks, key=lambda mark: mark.ordinal, default=None)))

    def _as_wave(self) -> tuple[int, ...]:
        return tuple(sorted(number - self._base for number in self._wave))

    def _transient(self, number: int) -> bool:
        return self._kept is not None and number not in self._kept
