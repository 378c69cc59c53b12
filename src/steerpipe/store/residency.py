"""Who lies in which slot: the table of one size class. Pure; not thread-safe, the caller holds a lock.

    ABSENT --begin--> LOADING --finish--> READY --(victim of another begin)--> ABSENT
                         +----abandon---> ABSENT

A pin keeps an expert where it is; only what is READY and unpinned is ever evicted. A *transient* expert is not worth
keeping (most of a prompt's): its slot is free at its last unpin, and only `transient_limit` of them hold slots at once.
Where transients *linger* they stay READY instead, and their slots are the first to be given to others, oldest first.
`now` counts tokens, not seconds: what is worth keeping does not depend on how quick the machine is.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.geometry import SMALLEST_SLOTS
from steerpipe.core.ids import ExpertId
from steerpipe.store.policies import Policy


class Residency(Enum):
    """Where an expert of the table stands."""

    ABSENT = "absent"
    LOADING = "loading"  # has a slot, whose bytes are not all there
    READY = "ready"


class Placement(NamedTuple):
    """The slot that `begin` gave, and whom it was taken from."""

    slot: int
    evicted: ExpertId | None


@dataclass(slots=True)
class _Held:
    """An expert that has a slot."""

    number: int  # its position in the table's list of experts: the policy's name for it
    slot: int
    transient: bool
    ready: bool = False
    pins: int = 0


class SlotTable:
    """The slots of one size class, shared by every expert whose block fits them."""

    def __init__(
        self, experts: Sequence[ExpertId], slots: int, policy: Policy, transient_limit: int, *, lingers: bool = False
    ) -> None:  # fmt: skip
        assert slots >= SMALLEST_SLOTS, f"{slots} slots: a layer cannot be computed with fewer than {SMALLEST_SLOTS}"
        assert transient_limit >= 1, f"a transient limit of {transient_limit} would stop every prompt"
        self._experts = tuple(experts)
        self._numbers = {expert: number for number, expert in enumerate(self._experts)}
        assert len(self._numbers) == len(self._experts), "an expert stands twice in the table's list"
        self._policy = policy
        self._slots = slots
        self._transient_limit = transient_limit
        self._held: dict[ExpertId, _Held] = {}
        self._free = list(range(slots))[::-1]  # slot 0 is given first
        self._reserved: set[int] = set()  # lent (store.lending): neither owned nor free
        self._transients = 0
        self._lingers = lingers
        self._lingering: dict[int, None] = {}  # transient, READY and unpinned, the oldest first
        self._nominees: dict[int, None] = {}  # the policy's next victims, as long as nothing else became evictable
        # Per expert number, so that a victim is found by a few array operations:
        self._idle: NDArray[np.bool_] = np.zeros(len(self._experts), dtype=np.bool_)  # READY and unpinned
        self._exposed: NDArray[np.bool_] = np.ones(len(self._experts), dtype=np.bool_)  # not protected
        self._passing: NDArray[np.bool_] = np.zeros(len(self._experts), dtype=np.bool_)  # transient with a slot

    @property
    def experts(self) -> tuple[ExpertId, ...]:
        """Everything that the slots are shared by; an expert's position is its number for the policy."""
        return self._experts

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def transients(self) -> int:
        """Transient experts that hold slots: never more than the limit."""
        return self._transients

    @property
    def lingering(self) -> Collection[int]:
        """Numbers of transient experts that are first to go, the oldest first. A view."""
        return self._lingering

    def state(self, expert: ExpertId) -> Residency:
        held = self._held.get(expert)
        if held is None:
            assert expert in self._numbers, f"{expert} is not of this table"
            return Residency.ABSENT
        return Residency.READY if held.ready else Residency.LOADING

    def slot(self, expert: ExpertId) -> int:
        """Where a LOADING or READY expert lies."""
        return self._holder(expert).slot

    def pins(self, expert: ExpertId) -> int:
        """How many pins hold it; 0 for one that is ABSENT."""
        held = self._held.get(expert)
        return 0 if held is None else held.pins

    def ready(self, experts: Iterable[ExpertId]) -> list[ExpertId]:
        """Those of `experts` that are READY, in their order."""
        held = self._held
        return [expert for expert in experts if (each := held.get(expert)) is not None and each.ready]

    def which_ready(self, experts: Iterable[ExpertId]) -> NDArray[np.bool_]:
        """Whether each of `experts` is READY."""
        return np.array([held is not None and held.ready for held in map(self._held.get, experts)], dtype=np.bool_)

    def resident(self) -> list[ExpertId]:
        """Every READY expert, ascending by number: the warm set of a profile."""
        return [expert for expert in self._experts if self.state(expert) is Residency.READY]

    def begin(
        self, expert: ExpertId, *, transient: bool, now: float, speculative: bool = False, sparing: Collection[int] = ()
    ) -> Placement | None:
        """ABSENT → LOADING in a free slot, else in that of the policy's victim. None: no slot may be had now.

        A demanded expert takes a protected one's slot where there is no other; a `speculative` one never does.
        At the transient limit a transient expert can only replace a transient one that is READY and unpinned.
        `sparing`: numbers that are not evicted by this call, as if they were pinned.
        """
        assert self.state(expert) is Residency.ABSENT, f"{expert} has a slot already"
        evicted: ExpertId | None = None
        full = transient and self._transients >= self._transient_limit
        if full or not self._free:
            evicted = self._choose(now, sparing, only_transient=full, strict=speculative)
            if evicted is None:
                return None
            self._release(evicted)
        number = self._numbers[expert]
        held = self._held[expert] = _Held(number, self._free.pop(), transient)
        self._transients += transient
        self._passing[number] = transient
        return Placement(held.slot, evicted)

    def finish(self, expert: ExpertId) -> None:
        """LOADING → READY: every byte is there."""
        held = self._loading(expert)
        held.ready = True
        if not held.pins:
            self._rest(held)

    def abandon(self, expert: ExpertId) -> None:
        """LOADING → ABSENT: the load failed or was cut, the slot is free. Whoever pinned it has to unpin it first."""
        held = self._loading(expert)
        assert held.pins == 0, f"{expert} is abandoned while {held.pins} pins hold it"
        self._release(expert)

    def pin(self, expert: ExpertId) -> None:
        """Keeps a LOADING or READY expert in its slot until `unpin` was called as often."""
        held = self._holder(expert)
        held.pins += 1
        self._idle[held.number] = False
        self._lingering.pop(held.number, None)
        self._nominees.pop(held.number, None)

    def unpin(self, expert: ExpertId) -> None:
        """The last one makes a READY expert evictable, and a READY transient one ABSENT at once, unless they linger."""
        held = self._holder(expert)
        assert held.pins > 0, f"{expert} is unpinned more often than pinned"
        held.pins -= 1
        if held.pins or not held.ready:
            return
        if held.transient and not self._lingers:
            self._release(expert)
        else:
            self._rest(held)

    def promote(self, expert: ExpertId) -> None:
        """A transient expert (LOADING or READY) turns out to be worth keeping. Nothing happens to a kept one."""
        held = self._holder(expert)
        self._transients -= held.transient
        held.transient = False
        self._passing[held.number] = False
        if held.number in self._lingering:  # evictable like any other from now on
            del self._lingering[held.number]
            self._nominees.clear()

    def touch(self, expert: ExpertId, now: float) -> None:
        """Tells the policy of a use. Any state: what was evicted keeps its past."""
        number = self._numbers[expert]
        self._ask_behind(number)
        self._policy.touch(number, now)

    def touch_many(self, numbers: Sequence[int], now: float) -> None:
        """As `touch`, by numbers, all different."""
        for number in numbers:
            self._ask_behind(number)
        self._policy.touch_many(numbers, now)

    def nominate(self, count: int, now: float) -> None:
        """Asks the policy for its next `count` victims now, when there is time, so that `begin` need not."""
        among = self._idle & ~self._passing if self._lingers else self._idle  # those that linger go before them
        candidates = np.flatnonzero(among & self._exposed)
        self._nominees = dict.fromkeys(self._policy.victims(candidates, count, now)) if candidates.size else {}

    @property
    def nominees(self) -> int:
        """How many victims `begin` can have without asking."""
        return len(self._nominees)

    def protect(self, experts: Iterable[ExpertId]) -> None:
        """What is wanted within the next layers, in any state. Replaces what was said before."""
        self._exposed[:] = True
        numbers = [self._numbers[expert] for expert in experts]
        self._exposed[numbers] = False
        self._nominees.clear()

    def check_integrity(self) -> None:
        """Asserts every invariant. O(experts): for tests, and for when nothing else is to be done."""
        owned = [held.slot for held in self._held.values()]
        assert len(set(owned)) == len(owned), "a slot has two owners"
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert not set(owned) & set(self._free), "a slot is owned and free"
        assert not self._reserved & {*owned, *self._free}, "a slot is lent, and owned or free"
        assert {*owned, *self._free, *self._reserved} == set(range(self._slots)), "a slot is neither owned nor free"
        transient = {expert for expert, held in self._held.items() if held.transient}
        assert len(transient) == self._transients <= self._transient_limit, "transient experts are miscounted"
        for number, expert in enumerate(self._experts):
            held = self._held.get(expert)
            assert held is None or held.number == number, f"{expert} has another's number"
            assert held is None or held.pins >= 0, f"{expert} has {held.pins} pins"
            idle = held is not None and held.ready and held.pins == 0
            assert bool(self._idle[number]) == idle, f"{expert} is wrongly marked as evictable or not"
            assert bool(self._passing[number]) == (expert in transient), f"{expert} is wrongly marked as transient"
            lingers = self._lingers and idle and expert in transient
            assert (number in self._lingering) == lingers, f"{expert} is wrongly marked as lingering"
        evictable = np.flatnonzero(self._idle)
        assert set(self._nominees) <= set(evictable.tolist()), "a nominee cannot be evicted"

    def _choose(
        self, now: float, sparing: Collection[int], *, only_transient: bool, strict: bool
    ) -> ExpertId | None:  # fmt: skip
        """Who goes: one that lingers, else a nominee, else whom the policy names."""
        for number in self._lingering:
            if self._exposed[number] and number not in sparing:
                return self._experts[number]
        for number in () if only_transient else tuple(self._nominees):
            if number not in sparing:
                del self._nominees[number]
                if self._idle[number]:
                    return self._experts[number]
        among = self._idle & self._passing if only_transient else self._idle
        if sparing:
            among = among.copy()
            among[slice(sparing.start, sparing.stop) if isinstance(sparing, range) else list(sparing)] = False
        return self._victim(now, among, strict=strict)

    def _ask_behind(self, number: int) -> None:
        """A nominee was used: it may be the next to go all the same, or go behind others. Those before it stay."""
        if number in self._nominees:
            while self._nominees.popitem()[0] != number:
                pass

    def _rest(self, held: _Held) -> None:
        """READY and unpinned from now on."""
        self._idle[held.number] = True
        if held.transient and self._lingers:
            self._lingering[held.number] = None  # goes before the nominees anyway
        else:
            self._nominees.clear()

    def _victim(self, now: float, among: NDArray[np.bool_], *, strict: bool) -> ExpertId | None:
        candidates = np.flatnonzero(among & self._exposed)
        if not candidates.size and not strict:
            candidates = np.flatnonzero(among)
        if not candidates.size:
            return None
        return self._experts[self._policy.victim(candidates, now)]

    def _release(self, expert: ExpertId) -> None:
        held = self._held.pop(expert)
        self._free.append(held.slot)
        self._transients -= held.transient
        self._idle[held.number] = False
        self._passing[held.number] = False
        self._lingering.pop(held.number, None)
        self._nominees.pop(held.number, None)

    def _holder(self, expert: ExpertId) -> _Held:
        held = self._held.get(expert)
        assert held is not None, f"{expert} has no slot"
        return held

    def _loading(self, expert: ExpertId) -> _Held:
        held = self._holder(expert)
        assert not held.ready, f"{expert} is not being loaded"
        return held
