"""A slot table that is asked by numbers, many at a time: a prompt uses most experts of a layer at once.

What is decided is what SlotTable decides one by one; tests hold the two against each other. A layer of 128 experts
takes a tenth of a millisecond per question here, and the host has about one millisecond for all of them.
"""

from collections.abc import Iterable, Sequence

from steerpipe.store.residency import SlotTable


class NumberedTable(SlotTable):
    """Numbers of one call are all different; each is in the state that SlotTable asks for."""

    def slots_of(self, numbers: Iterable[int]) -> list[int]:
        held, experts = self._held, self._experts
        return [held[experts[number]].slot for number in numbers]

    def begin_many(
        self, numbers: Sequence[int], *, transient: bool, now: float, speculative: bool = False
    ) -> tuple[list[int], list[int]]:
        """`begin` for one after the other, until one gets no slot: the slots of those that did, and who was evicted."""
        wanting = len(numbers) - len(self._free) - len(self._lingering)
        if wanting > len(self._nominees):
            self.nominate(wanting, now)  # all in one go
        slots: list[int] = []
        evicted: list[int] = []
        for number in numbers:
            place = self.begin(self._experts[number], transient=transient, now=now, speculative=speculative)
            if place is None:
                break
            slots.append(place.slot)
            if place.evicted is not None:
                evicted.append(self._numbers[place.evicted])
        return slots, evicted

    def finish_many(self, numbers: Iterable[int]) -> None:
        resting = []
        for number in numbers:
            held = self._held[self._experts[number]]
            assert not held.ready, f"{self._experts[number]} is not being loaded"
            held.ready = True
            if not held.pins:
                resting.append(number)
        self._rest_many(resting)

    def pin_many(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._held[self._experts[number]].pins += 1
            self._lingering.pop(number, None)
            self._nominees.pop(number, None)
            self._idle[number] = False

    def unpin_many(self, numbers: Iterable[int]) -> None:
        resting = []
        for number in numbers:
            held = self._held[self._experts[number]]
            assert held.pins > 0, f"{self._experts[number]} is unpinned more often than pinned"
            held.pins -= 1
            if held.pins or not held.ready:
                continue
            if held.transient and not self._lingers:
                self._release(self._experts[number])
            else:
                resting.append(number)
        self._rest_many(resting)

    def promote_many(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self._passing[number]:
                self.promote(self._experts[number])

    def _rest_many(self, numbers: Sequence[int]) -> None:
        for number in numbers:  # one by one is as quick as an array of them
            self._idle[number] = True
            if self._lingers and self._passing[number]:
                self._lingering[number] = None  # goes before the nominees anyway
            else:
                self._nominees.clear()
