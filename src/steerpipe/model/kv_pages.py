"""Keys and values in pages of the experts' memory: taken when they are needed, returned when all of a page is idle."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from steerpipe.core.pages import PageCounts, PageShape
from steerpipe.model.kv_cache import KvPool, _Block


class Pages(Protocol):
    """Who lends the pages. `take` may wait for a moment, but does not fail while the pool keeps to its capacity."""

    def take(self) -> tuple[int, Tensor]:
        """A page's number and its memory, uint8."""
        ...

    def give_back(self, page: int) -> None: ...


class Lender(Pages, Protocol):
    """Who lends the pages, and says what has become of them."""

    @property
    def shape(self) -> PageShape: ...

    def counts(self) -> PageCounts: ...


@dataclass(slots=True)
class PagedKvPool(KvPool):
    """`capacity_blocks` in pages of `page_blocks`."""

    pages: Pages = field(kw_only=True)
    page_blocks: int = field(kw_only=True)
    _idle_of: dict[int, list[_Block]] = field(default_factory=dict)  # by page, of every page that is held
    _page_of: dict[_Block, int] = field(default_factory=dict)

    @property
    def keepable_blocks(self) -> int:
        """A quarter: what waits to be asked for again is worth less than experts that are used now."""
        return self.capacity_blocks // 4

    def check_integrity(self) -> None:
        idle = sum(len(blocks) for blocks in self._idle_of.values())
        assert len(self._page_of) == len(self._idle_of) * self.page_blocks, "a page is held in part"
        assert len(self._page_of) - idle == self._live, f"{self._live} blocks are live, and {idle} idle"
        assert all(len(blocks) < self.page_blocks for blocks in self._idle_of.values()), "a page is held for nothing"

    def _spare(self) -> _Block:
        """From the page that is nearest to full, so that others empty."""
        open_pages = [page for page, idle in self._idle_of.items() if idle]
        if open_pages:
            return self._idle_of[min(open_pages, key=lambda page: len(self._idle_of[page]))].pop()
        page, memory = self.pages.take()
        size = self.block_bytes
        parts = [memory[place * size : (place + 1) * size].view(self.dtype) for place in range(self.page_blocks)]
        blocks = [self._cut(part) for part in parts]
        self._page_of.update(dict.fromkeys(blocks, page))
        self._idle_of[page] = blocks
        return blocks.pop()

    def _rest(self, block: _Block) -> None:
        page = self._page_of[block]
        idle = self._idle_of[page]
        idle.append(block)
        if len(idle) == self.page_blocks:
            for each in idle:
                del self._page_of[each]
            del self._idle_of[page]
            self.pages.give_back(page)
