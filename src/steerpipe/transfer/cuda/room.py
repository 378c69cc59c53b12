"""Slots for guesses, taken while kernels may be running whose experts nobody has pinned.

So victims are of layers that this step has passed (`passed`), and the next step waits until their entries are out of
the table (`cleared`): then it finds none of them (docs/adr/0008-cuda.md).
"""

from collections.abc import Mapping

from steerpipe.store.lending import LendingTable
from steerpipe.transfer.cuda.backing import Backing, LayerBlocks
from steerpipe.transfer.cuda.copier import Copier, Mark
from steerpipe.transfer.cuda.memory import BlockMemory
from steerpipe.transfer.cuda.stock import Stock

SPARE_SLOTS = 8  # kept empty while guesses are made: a layer's four, and as many guesses


class Room(Stock):
    """What is `expected` (see `Guesses`) is never a victim here."""

    def __init__(
        self, layers: Mapping[int, LayerBlocks], backing: Backing, memory: BlockMemory, copier: Copier,
        table: LendingTable, transient_limit: int,
    ) -> None:  # fmt: skip
        super().__init__(layers, backing, memory, copier, table, transient_limit)
        self.spare_slots = min(SPARE_SLOTS, table.slots // 16)  # see `make_room`
        self.passed = 0  # kernels of experts with smaller numbers have run in this step
        self.cleared: Mark | None = None  # after which the victims' entries are out of the table
        self.expected: frozenset[int] = frozenset()
        self._clears = False  # some are on their way out, and no mark stands behind them yet
        self._stuck = False  # no slot was to be had; a layer or a forecast later there may be one
        self._roomy = False  # room was made since the last layer came

    def step_begins(self) -> None:
        """What is queued on the current stream from now on finds no victim of a guess in the table."""
        self.passed = 0
        if self.cleared is not None:
            self.copier.join(self.cleared)
            self.cleared = None

    def make_room(self) -> None:
        """Empties slots of layers that have passed, when the host has time: who comes next need not choose a victim."""
        table = self.table
        if self._roomy or not self.expected or 2 * table.free_slots >= self.spare_slots:
            return
        self._roomy = True
        for place in table.vacate(self.spare_slots, self.now, self.passed, self.expected):
            self._given.append(place.slot)
            assert place.evicted is not None, "a slot is emptied of somebody"
            self._evicted.append(self.base[place.evicted.layer] + place.evicted.expert)
        if self._evicted:
            self.clear()
            self.cleared, self._stuck = self.copier.copied(), False
