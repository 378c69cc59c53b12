"""Where the blocks lie that are not in a slot: pinned memory that the GPU copies from, and what is read into it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from steerpipe.core.blocks import BlockForm
from steerpipe.core.errors import SteerpipeError
from steerpipe.core.ids import ExpertId
from steerpipe.transfer.cuda.copier import Copier
from steerpipe.transfer.cuda.pinned import PinnedArena
from steerpipe.transfer.cuda.ring import Ring
from steerpipe.transfer.link import LinkRate

_NOTHING = LinkRate()


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The experts of one layer, all of one form."""

    experts: int
    form: BlockForm
    block_bytes: int


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """What came from below pinned memory."""

    disk: LinkRate = _NOTHING
    retries: int = 0
    rereads: int = 0


def number_experts(layers: Mapping[int, LayerBlocks]) -> tuple[ExpertId, ...]:
    """Every expert, by layer and then expert: its position is its number everywhere in this folder."""
    return tuple(ExpertId(layer, index) for layer, blocks in layers.items() for index in range(blocks.experts))


class Backing(Protocol):
    """Blocks in host memory, by the experts' numbers."""

    @property
    def pinned_bytes(self) -> int:
        """All memory that is pinned for it, the ring's slabs too."""
        ...

    @property
    def ring(self) -> Ring | None:
        """What brings the blocks that have no place of their own; None where all have one."""
        ...

    def locate(self, number: int) -> int:
        """The address of its block in pinned memory, always the same; 0: the ring has to bring it."""
        ...

    def view(self, number: int) -> int:
        """Where kernels can read its block in pinned memory, always the same; 0: nowhere."""
        ...

    def reads(self) -> ReadCounts: ...

    def held(self) -> frozenset[ExpertId]:
        """Whose blocks lie in RAM below the ring."""
        ...

    def close(self) -> None:
        """After the last copy. Twice is once."""
        ...


def shut(copier: Copier, backing: Backing, endings: Iterable[Callable[[], None]]) -> None:
    """The end of a source: nobody waits for us (`endings`), all that is queued is done, and memory goes back."""
    with suppress(SteerpipeError, RuntimeError):  # a GPU that has failed: memory goes back all the same
        for end in endings:
            end()
        copier.drain()
    backing.close()
    copier.close()


class PinnedBacking:
    """Blocks in one arena, at equal distances; the ring, where there is one, brings the others."""

    def __init__(
        self, arena: PinnedArena | None, numbers: Sequence[int], stride: int, *, ring: Ring | None = None,
        slabs: PinnedArena | None = None, reads: Callable[[], ReadCounts] = ReadCounts,
        held: Callable[[], frozenset[ExpertId]] = frozenset, close_link: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """`numbers`: whose block lies at position 0, 1, ... of the arena. Takes everything over."""
        self.ring = ring
        self.reads = reads
        self.held = held
        self._arenas = [each for each in (arena, slabs) if each is not None]
        self._close_link = close_link
        base = arena.address if arena is not None else 0
        self._places = {number: base + position * stride for position, number in enumerate(numbers)}
        seen = arena.device_address if arena is not None else 0
        self._shift = seen - base if seen else None  # from the host's address to the kernels'

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.size_bytes for arena in self._arenas if arena.pinned)

    def locate(self, number: int) -> int:
        return self._places.get(number, 0)

    def view(self, number: int) -> int:
        place = self.locate(number)
        return place + self._shift if place and self._shift is not None else 0

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()
        if self._close_link is not None:
            self._close_link()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()  # the memory goes with the last view of it
        self._places.clear()
