"""Pages that the ladder lends: their experts make way, whatever is on its way to them."""

import math
import threading
from typing import cast

import pytest
import torch

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.core.pages import PageShape
from steerpipe.transfer.paging import PageLender
from steerpipe.transfer.queue import Reason
from steerpipe.transfer.source import LadderSource, slot_bytes
from tests.transfer.packs import tiny_pack
from tests.transfer.test_source import GatedLink, open_with, read_all


def shape_of(slots: int) -> PageShape:
    size = slot_bytes(tiny_pack(), torch.float32)
    return PageShape(1, slots, slots * size + 128, size)


def lender_of(source: LadderSource) -> PageLender:
    assert source.lender is not None
    return source.lender


def test_those_that_move_keep_their_bits_and_those_that_went_come_again() -> None:
    with LadderSource.open(tiny_pack(), slots=6, dtype=torch.float32, shape=shape_of(2)) as source:
        for two in ([0, 1], [2, 3], [4, 5]):  # so few at a time that nothing is read ahead
            read_all(source, 0, two)
        read_all(source, 0, [0, 2, 4])  # one of each page is used again
        page, memory = lender_of(source).take()
        memory.fill_(255)  # it is the borrower's
        counts = lender_of(source).counts()
        assert (counts.experts, counts.kv, counts.moved) == (2, 1, 1)
        before = source.counters()
        read_all(source, 0, [0, 2, 4])  # one of them has moved
        assert (source.counters() - before).misses == 0
        read_all(source, 0, [1, 3, 5])
        assert (source.counters() - before).misses == 2
        lender_of(source).give_back(page)
        assert lender_of(source).counts().experts == 3
        source.check_integrity()


def test_a_page_is_had_although_guesses_are_on_their_way_to_every_page() -> None:
    held = [ExpertId(1, 0), ExpertId(1, 1)]
    source, gated = open_with(GatedLink, held, slots=4, shape=shape_of(2), transient_limit=4)
    link = cast(GatedLink, gated)
    with source:
        experts = [ExpertId(1, number) for number in range(4)]
        assert source.prefetch(experts, Reason.PREFETCH, math.inf) == 4  # all slots: the reader stands at the first
        assert link.reached[held[0]].wait(60)
        taken: list[int] = []
        borrower = threading.Thread(target=lambda: taken.append(lender_of(source).take()[0]))
        borrower.start()
        for gate in link.gates.values():
            gate.set()
        borrower.join(60)
        assert taken
        lender_of(source).give_back(taken[0])
        assert read_all(source, 1, range(4))
        source.check_integrity()


def test_a_closed_ladder_lends_nothing() -> None:
    source = LadderSource.open(tiny_pack(), slots=4, dtype=torch.float32, shape=shape_of(2))
    source.close()
    with pytest.raises(TransferError, match="closed"):
        lender_of(source).take()


def test_slots_in_pages_hold_what_the_pack_holds() -> None:
    with LadderSource.open(tiny_pack(), slots=6, dtype=torch.float32, shape=shape_of(3)) as source:
        for layer in range(3):
            assert sorted(read_all(source, layer, [1, 5, 7])) == [1, 5, 7]
        assert source.fast_bytes == 2 * shape_of(3).page_bytes
