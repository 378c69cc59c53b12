"""Fixed pages of fast memory that hold KV blocks or experts, whichever is needed. Pure: no torch.

A page is taken and returned whole. It holds whole KV blocks and whole slots, so its size follows from the model.
"""

from dataclasses import dataclass

from steerpipe.core.errors import CapacityError
from steerpipe.core.geometry import SMALLEST_SLOTS
from steerpipe.core.units import format_bytes

_MOST_WASTE = 0.05  # of a page, whatever it holds
_MOST_OF_EITHER = 20  # within so many multiples of the larger there is always a page that wastes so little


@dataclass(frozen=True, slots=True)
class PageShape:
    """One page: so many KV blocks, or so many slots."""

    blocks: int
    slots: int
    block_bytes: int
    slot_bytes: int

    @property
    def page_bytes(self) -> int:
        return max(self.blocks * self.block_bytes, self.slots * self.slot_bytes)


@dataclass(frozen=True, slots=True)
class PagePlan:
    """How many pages there are, and how many of them keys and values may hold at once."""

    shape: PageShape
    pages: int
    kv_pages: int

    @property
    def total_bytes(self) -> int:
        return self.pages * self.shape.page_bytes

    @property
    def slots(self) -> int:
        """While no page holds keys and values."""
        return self.pages * self.shape.slots

    @property
    def least_slots(self) -> int:
        """While keys and values hold all that they may."""
        return (self.pages - self.kv_pages) * self.shape.slots


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Who holds the pages at one moment, and what has happened to them since the start."""

    experts: int
    kv: int
    taken: int  # by keys and values
    returned: int
    moved: int  # experts that made way and stayed in fast memory


def page_shape(block_bytes: int, slot_bytes: int) -> PageShape:
    """The smallest page that wastes at most a twentieth, whatever it holds."""
    small, large = sorted((block_bytes, slot_bytes))
    for count in range(1, _MOST_OF_EITHER + 1):
        for others in (count * large // small, -(-count * large // small)):
            held = (others * small, count * large)
            if min(held) >= (1 - _MOST_WASTE) * max(held):
                blocks, slots = (others, count) if block_bytes <= slot_bytes else (count, others)
                return PageShape(blocks, slots, block_bytes, slot_bytes)
    raise AssertionError(f"no page for blocks of {block_bytes} and slots of {slot_bytes} bytes")


def plan_pages(fast_bytes: int, shape: PageShape, kv_blocks: int, experts: int) -> PagePlan:
    """No more than all `experts`, and keys and values at their most, can fill.

    Raises CapacityError where keys and values, at their most, would leave too few slots to compute a layer with.
    """
    kv_pages = -(-kv_blocks // shape.blocks)
    least, most = (kv_pages + -(-slots // shape.slots) for slots in (SMALLEST_SLOTS, max(SMALLEST_SLOTS, experts)))
    pages = min(fast_bytes // shape.page_bytes, most)
    if pages < least:
        raise CapacityError(
            f"fast_memory holds {pages} pages of {format_bytes(shape.page_bytes)}; keys and values may take "
            f"{kv_pages}, and experts need {least - kv_pages}",
            fix=f"give fast_memory at least {format_bytes(least * shape.page_bytes)}, lower max_context or max_batch, "
            "or give keys and values memory of their own: kv_memory",
        )
    return PagePlan(shape, pages, kv_pages)
