"""Where every expert lies at one moment, for people who look on."""

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Protocol, runtime_checkable

from steerpipe.core.ids import ExpertId
from steerpipe.store.residency import Residency, SlotTable
from steerpipe.transfer.link import Link, OverLink
from steerpipe.transfer.ram import RamTier


class Place(IntEnum):
    """The best place that holds an expert; MOVING: on its way to the fast memory."""

    DISK = 0
    RAM = 1
    MOVING = 2
    FAST = 3


@runtime_checkable
class Placed(Protocol):
    """A source that can say where its experts lie."""

    def places(self) -> bytes:
        """A Place for every expert, by layer and then by expert."""
        ...


def places_of(experts: Sequence[ExpertId], table: SlotTable, in_ram: Collection[ExpertId]) -> bytes:
    """Of a slot table and what lies below it."""
    of_slot = {Residency.READY: Place.FAST, Residency.LOADING: Place.MOVING}
    return bytes(of_slot.get(table.state(each), Place.RAM if each in in_ram else Place.DISK) for each in experts)


def ram_tier(link: Link) -> RamTier | None:
    """The RAM tier among a link and those below it."""
    at: Link | None = link
    while isinstance(at, OverLink):
        if isinstance(at, RamTier):
            return at
        at = at.below
    return None


def held_in_ram(link: Link) -> frozenset[ExpertId]:
    """What the RAM tier among a link and those below it holds."""
    tier = ram_tier(link)
    return frozenset() if tier is None else tier.held()
