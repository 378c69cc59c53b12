"""Slots for guesses that the device fetches by itself: a predictor in the graph takes them, and the host follows.

A guess is a part of a block. If its layer wants it, the kernels of that layer read the rest, and it stays; else its
slot is free again. No host waits for a guess, and no entry of the table names it before its layer has run.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from steerpipe.core.blocks import GUESSES, Near, SentBlock
from steerpipe.transfer.cuda.copier import Word
from steerpipe.transfer.cuda.lent import LentSlots
from steerpipe.transfer.cuda.shelf import Shelf
from steerpipe.transfer.queue import Reason
from steerpipe.transfer.throttle import Throttle

NOBODY = -1  # a tag of no step
MOST_SENT = 8  # slots: one or two guesses a layer, and words that the device sees some layers later


def guesses_of(slots: int) -> int:
    """How many slots are lent for guesses: an eighth at most."""
    return min(MOST_SENT, slots // 8)


class GuessSlots:
    """See `core.blocks.GuessLanding`. One thread, the copier's. Lends slots only while somebody predicts."""

    def __init__(self, shelf: Shelf, device: torch.device, most: int) -> None:
        self._shelf = shelf
        self.slots = LentSlots(shelf, device, most)
        self.ring, self.tail, self.head = self.slots.ring, self.slots.tail, self.slots.head
        self.tags = torch.full((len(shelf.base), GUESSES), NOBODY, dtype=torch.int64, device=device)
        # The layer, what was sent for, and the throttle of who did: another may speak in the next step.
        self._owed: tuple[int, Callable[[], Sequence[SentBlock]], Throttle] | None = None
        self._near: set[int] = set()  # who was in use or expected when slots were lent last
        found: dict[int, list[int]] = {layer: [] for layer in shelf.base}
        for number, expert in enumerate(shelf.experts):
            found[expert.layer].append(shelf.memory.absent[number])
        self._pinned = {layer: torch.tensor(absent, device=device) for layer, absent in found.items()}

    def pinned(self, layer: int) -> Tensor:
        return self._pinned[layer]

    def block_bytes(self, layer: int) -> int:
        return self._shelf.size_of(self._shelf.base[layer])

    @property
    def resting(self) -> bool:
        return self._shelf.throttle.closed

    @property
    def pending(self) -> bool:
        """Whether slots are lent, or something was sent for a step to come."""
        return self._owed is not None or not self.slots.empty

    def rest(self, layers: int) -> None:
        self.settle_owed((), None)
        if not self.slots.empty:
            self.slots.withdraw()
        for _ in range(layers):
            self._shelf.throttle.allows()

    def begin(self) -> None:
        if self.slots.empty:
            self.slots.supply_anew(self._near, strict=True)

    def settle(
        self, layer: int, sent: Sequence[SentBlock], wanted: Collection[int], near: Callable[[], Near]
    ) -> None:  # fmt: skip
        self._settle_all(layer, sent, wanted, near, self._shelf.throttle)

    def owe(self, layer: int, sent: Callable[[], Sequence[SentBlock]]) -> None:
        self._owed = layer, sent, self._shelf.throttle

    def collect(self) -> None:
        if self._owed is not None:
            layer, sent, throttle = self._owed[0], self._owed[1](), self._owed[2]
            self._owed = layer, lambda: sent, throttle

    def settle_owed(self, wanted: Collection[int], near: Callable[[], Near] | None) -> None:
        if self._owed is not None:
            (layer, sent, throttle), self._owed = self._owed, None
            self._settle_all(layer, sent(), wanted, near, throttle)

    def forget(self) -> list[int]:
        """After an interrupt, when the device is idle: nobody finds what was sent for. What is left in the ring."""
        self._owed = None
        self.tags.fill_(NOBODY)
        return self.slots.forget()

    def relocate(self, moves: Mapping[int, int]) -> None:
        """As `LentSlots` has it. What had come for the next step did not move along: nobody finds it."""
        self.tags.fill_(NOBODY)
        self.slots.relocate(moves)

    def check(self) -> None:
        """When the device has finished and every step was followed: both sides say the same."""
        self.slots.check(0 if self._owed is None else len(self._owed[1]()))

    def _settle_all(
        self, layer: int, sent: Sequence[SentBlock], wanted: Collection[int], near: Callable[[], Near] | None,
        throttle: Throttle,
    ) -> None:  # fmt: skip
        """`near`: None where nobody looks for them, and no slots are lent any more. `throttle`: of who has sent."""
        shelf, base = self._shelf, self._shelf.base[layer]
        words: list[Word] = []
        for each in sent:
            words += self._settle(base + each.expert, each.share, each.expert in wanted, self.slots.take())
            self.slots.taken += 1
        begun = [each.expert for each in sent if each.share]
        if begun and near is None:
            throttle.heard()
        elif begun:
            throttle.settle(len(begun), sum(each in wanted for each in begun))
        if near is not None and (sent or self.slots.empty):
            self._near = {shelf.base[each] + expert for each, experts in near().items() for expert in experts}
            self.slots.supply(self._near | shelf.guessed.keys(), strict=True, first=words)
        else:
            assert not words, "what was wanted was looked for"
        throttle.allows()

    def _settle(self, number: int, share: float, wanted: bool, slot: int) -> list[Word]:
        """Its slot has the whole block if it was wanted, or will have before any kernel looks for it in the table: the
        word that says so is to be written."""
        words: list[Word] = []
        shelf, counts = self._shelf, self._shelf.tally.of[Reason.PREFETCH]
        moved = round(share * shelf.size_of(number))
        counts.read_bytes += moved
        if wanted and not shelf.here[number]:
            if number in shelf.moving:
                shelf.cut(number)
            shelf.table.adopt(number, slot)
            words.append((shelf.memory.entries[number], shelf.memory.addresses[slot]))
            shelf.here[number] = 1
        else:  # as a landing that has come twice: the slot is the next to be lent
            shelf.table.give_back(slot)
        if wanted:
            counts.transfers += 1
            shelf.tally.of[Reason.DEMAND].read_bytes += shelf.size_of(number) - moved
            if share == 1.0:
                counts.hits += 1
            else:
                counts.late += 1
        else:
            counts.cancelled += 1
            counts.cancelled_bytes += moved
        return words
