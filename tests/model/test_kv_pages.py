"""Keys and values in borrowed pages: taken when needed, back when empty, clean whatever lay there."""

import pytest
import torch
from torch import Tensor

from steerpipe.core.errors import CapacityError
from steerpipe.engine.prefixes import PrefixStore, as_bytes
from steerpipe.model.kv_cache import BLOCK
from steerpipe.model.kv_pages import PagedKvPool
from tests.model.test_kv_cache import SPEC, extend, marks_of, numbered

CPU = torch.device("cpu")


class Shelf:
    """Pages full of numbers that are none."""

    def __init__(self, page_bytes: int, pages: int) -> None:
        self._memory = [torch.full((page_bytes,), 255, dtype=torch.uint8) for _ in range(pages)]
        self.here = list(range(pages))

    def take(self) -> tuple[int, Tensor]:
        page = self.here.pop()
        return page, self._memory[page]

    def give_back(self, page: int) -> None:
        self._memory[page].fill_(255)
        self.here.append(page)


def pool_of(blocks: int, page_blocks: int = 2) -> tuple[PagedKvPool, Shelf]:
    size = PagedKvPool(SPEC, torch.float32, CPU, 1, pages=Shelf(0, 0), page_blocks=1).block_bytes
    shelf = Shelf(page_blocks * size + 64, -(-blocks // page_blocks))
    return PagedKvPool(SPEC, torch.float32, CPU, blocks, pages=shelf, page_blocks=page_blocks), shelf


def test_a_page_is_taken_when_the_last_is_full_and_is_back_when_all_of_it_is_idle() -> None:
    pool, shelf = pool_of(6)
    first, second = pool.sequence(), pool.sequence()
    extend(first, numbered(BLOCK))
    extend(second, numbered(BLOCK, 1000))
    assert len(shelf.here) == 2  # both in one page
    extend(second, numbered(BLOCK, 2000))
    assert len(shelf.here) == 1
    second.truncate(BLOCK)
    assert len(shelf.here) == 2
    first.free()
    assert len(shelf.here) == 2  # the other half is in use
    pool.check_integrity()
    second.free()
    assert len(shelf.here) == 3
    pool.check_integrity()


def test_whatever_lay_in_a_page_a_block_begins_with_zeros() -> None:
    pool, _ = pool_of(2)
    kv = pool.sequence()
    kv.append(1)
    for layer in range(2):
        for _, keys, values in kv.read(layer, 0, 0):
            assert not keys.any() and not values.any()


def test_neighbours_in_a_page_do_not_touch_each_other() -> None:
    pool, _ = pool_of(4)
    both = [pool.sequence(), pool.sequence()]
    for number, kv in enumerate(both):
        extend(kv, numbered(BLOCK + 7, 1000 * number))
    assert [marks_of(kv) for kv in both] == [numbered(BLOCK + 7), numbered(BLOCK + 7, 1000)]


def test_the_fullest_page_is_filled_first_so_that_others_empty() -> None:
    pool, shelf = pool_of(6, page_blocks=3)
    kvs = [pool.sequence() for _ in range(6)]
    for kv in kvs:
        kv.append(1)
    for kv in (kvs[0], kvs[3], kvs[4]):
        kv.free()
    kvs[0].append(1)
    kvs[5].free()
    assert len(shelf.here) == 1


def test_more_than_the_capacity_is_refused_and_nothing_leaks() -> None:
    pool, shelf = pool_of(2)
    kv = pool.sequence()
    with pytest.raises(CapacityError):
        kv.append(3 * BLOCK)
    assert len(shelf.here) == 1
    pool.check_integrity()


def test_kept_prompts_hold_a_quarter_of_the_blocks_or_the_last_prompt() -> None:
    pool, _ = pool_of(8)
    prefixes = PrefixStore(pool)
    for start in range(4):
        kv = pool.sequence()
        kv.append(BLOCK)
        prefixes.keep("a", numbered(BLOCK, start), kv)
    assert pool.live_blocks == 2
    kv = pool.sequence()
    kv.append(4 * BLOCK)
    prefixes.keep("a", numbered(4 * BLOCK, 77), kv)
    assert pool.live_blocks == 4 and prefixes.shared("a", numbered(4 * BLOCK, 77)) == 4 * BLOCK


def test_prompts_that_are_being_typed_stay_beside_the_quarter_and_go_last() -> None:
    pool, _ = pool_of(8)
    prefixes = PrefixStore(pool)
    typed = [numbered(BLOCK, 1000 * number) for number in range(3)]
    prefixes.typed = lambda: [("a", as_bytes(ids[:16])) for ids in typed]
    for ids in (*typed, *(numbered(BLOCK, 50_000 + 1000 * number) for number in range(4))):
        kv = pool.sequence()
        kv.append(BLOCK)
        prefixes.keep("a", ids, kv)
    assert [prefixes.shared("a", ids) for ids in typed] == [BLOCK] * 3
    assert pool.live_blocks == 3 + 2
    assert prefixes.make_room(5, promised=0)
    assert [prefixes.shared("a", ids) for ids in typed] == [BLOCK] * 3
    assert prefixes.make_room(6, promised=0)
    assert [prefixes.shared("a", ids) for ids in typed] == [0, BLOCK, BLOCK]


def test_a_page_that_cannot_be_lent_costs_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, shelf = pool_of(4)
    kv, take = pool.sequence(), shelf.take

    def second_fails() -> tuple[int, Tensor]:
        if len(shelf.here) < 2:
            raise KeyboardInterrupt
        return take()

    monkeypatch.setattr(shelf, "take", second_fails)
    with pytest.raises(KeyboardInterrupt):
        kv.append(3 * BLOCK)
    assert pool.live_blocks == 0 and kv.length == 0 and len(shelf.here) == 2
    pool.check_integrity()
