"""One lease: what is here first, then whatever has landed, a wave at a time, with as few as two slots."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Self

from steerpipe.core.ids import ExpertId
from steerpipe.core.protocols import ExpertWeights, Wave
from steerpipe.store.residency import Residency
from steerpipe.transfer.ladder import Ladder

Weights = Callable[[ExpertId], ExpertWeights]  # of an expert that has a slot


class LadderLease:
    """A context manager and its own Lease, for one thread. Leaving the block releases everything, also after an error.

    An expert is in one of three places: `wanted` (no slot yet), `loading` (pinned, on its way), `wave` (pinned, being
    computed). It moves in that order, and each at most once, so it is loaded at most once.
    """

    def __init__(
        self, ladder: Ladder, weights: Weights, of_layer: Sequence[ExpertId], routed: Sequence[int],
        keep: Collection[int] | None, leave: Callable[[int, frozenset[int]], None],
    ) -> None:  # fmt: skip
        """`of_layer`: all experts of the layer. `leave` is called at the end of a block without an error, locked."""
        self.routed = frozenset(routed)
        assert len(self.routed) == len(routed), f"experts leased twice at once: {sorted(routed)}"
        self._of_layer = of_layer
        self._ladder = ladder
        self._weights = weights
        self._keep = None if keep is None else frozenset(keep)
        self._leave = leave
        self._wanted: list[ExpertId] = []  # by place on disk
        self._loading: dict[ExpertId, bool] = {}  # → whether it was on its way before: late rather than missed
        self._wave: list[ExpertId] = []
        self._begun = False

    def __enter__(self) -> Self:
        """Sends for what is missing; does not wait."""
        with self._ladder.lock:
            try:
                self._classify()
                self._ask()
            except BaseException:  # an interrupt, say: nothing may stay pinned
                self._let_go()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ladder.lock:
            self._let_go()
            if kind is None:
                self._leave(self._of_layer[0].layer, self.routed)

    def _let_go(self) -> None:
        for expert in (*self._wave, *self._loading):
            self._ladder.let_go(expert)
        self._wave, self._loading, self._wanted = [], {}, []
        self._ladder.changed.notify_all()

    def waves(self) -> Iterator[Wave]:
        """Once. Waits between waves; raises TransferError if an expert cannot be had."""
        assert not self._begun, "the waves of a lease come once"
        self._begun = True
        if self._wave:
            yield self._as_wave()
        while self._wanted or self._loading:
            with self._ladder.lock:
                self._next()
            yield self._as_wave()

    def _classify(self) -> None:
        """Every expert to its first place, counted."""
        ladder, table, tally = self._ladder, self._ladder.table, self._ladder.tally
        ladder.check_usable()
        tally.leases += 1
        tally.leased += len(self.routed)
        for index in sorted(self.routed):
            expert = self._of_layer[index]
            transient = self._transient(expert)
            if not transient:
                table.touch(expert, ladder.now)
            state = table.state(expert)
            if state is Residency.ABSENT:
                tally.misses += 1
                self._wanted.append(expert)
                continue
            brought_by = tally.of[ladder.pin(expert, transient=transient)]
            if state is Residency.READY:
                brought_by.hits += 1
                self._wave.append(expert)
            else:
                brought_by.late += 1
                self._loading[expert] = True
        self._wanted.sort(key=lambda expert: ladder.addresses[expert].offset)

    def _ask(self) -> None:
        """Sends for as many as can get slots. Where one transient (or kept) expert gets none, no other will."""
        table = self._ladder.table
        if table.free_slots < len(self._wanted):
            table.nominate(len(self._wanted), self._ladder.now)  # one look at all experts instead of one for each
        refused: set[bool] = set()
        waiting = []
        for expert in self._wanted:
            transient = self._transient(expert)
            if transient in refused or False in refused or not self._ladder.demand(expert, transient=transient):
                refused.add(transient)
                waiting.append(expert)
            else:
                self._loading[expert] = False
        self._wanted = waiting

    def _next(self) -> None:
        """Frees the wave that has been computed and waits until another can be."""
        ladder = self._ladder
        for expert in self._wave:
            ladder.let_go(expert)
        self._wave = []
        ladder.changed.notify_all()  # to other leases: slots came free
        self._ask()
        self._wave = ladder.table.ready(self._loading)
        if not self._wave:
            self._wait()
        for expert in self._wave:
            del self._loading[expert]

    def _wait(self) -> None:
        ladder, begin = self._ladder, time.perf_counter()
        all_late = not self._wanted and all(self._loading.values())
        while not self._wave:
            for expert in self._loading:
                if expert in ladder.broken:
                    raise ladder.broken[expert]
            ladder.check_usable()
            hungry = bool(self._wanted)
            ladder.hungry += hungry
            try:
                ladder.changed.wait()
            finally:  # an interrupt as well
                ladder.hungry -= hungry
            self._ask()
            self._wave = ladder.table.ready(self._loading)
        now = time.perf_counter()
        seconds = now - begin
        if ladder.timeline is not None:
            ladder.timeline.span("stream 0: waits", f"layer {self._of_layer[0].layer}", begin, now)
        if all_late:
            ladder.tally.late_seconds += seconds
        else:
            ladder.tally.stall_seconds += seconds

    def _as_wave(self) -> Wave:
        experts = sorted(self._wave)
        return Wave(
            tuple(expert.expert for expert in experts), {expert.expert: self._weights(expert) for expert in experts}
        )

    def _transient(self, expert: ExpertId) -> bool:
        return self._keep is not None and expert.expert not in self._keep
