"""Likely experts come from the disk into RAM: into no slot, behind everything else, and read from there afterwards."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from steerpipe.core.ids import ExpertId
from steerpipe.runtime.draft_plan import PROMOTED_USES, plan_promotion
from steerpipe.runtime.models import EMBEDDED
from steerpipe.store.reader import open_pack
from steerpipe.transfer.link import Link, OverLink, Piece
from steerpipe.transfer.promotion import Promotion
from steerpipe.transfer.source import LadderSource

BLOCKS = 40


@pytest.fixture
def source() -> Iterator[LadderSource]:
    pack = open_pack(EMBEDDED)
    block = pack.layout(0).block_bytes
    with LadderSource.open(pack, slots=16, dtype=torch.float32, ram_bytes=BLOCKS * block) as found:
        yield found


def brought(source: LadderSource, experts: list[ExpertId]) -> Promotion:
    """When all of them have been looked at."""
    promotion = source.promotion
    assert promotion is not None
    promotion.expect(experts)
    with source._ladder.lock:
        while promotion.promoted < len(experts):
            source._ladder.changed.wait()
    return promotion


def test_what_was_promoted_lies_in_ram_and_in_no_slot(source: LadderSource) -> None:
    experts = [ExpertId(3, index) for index in (5, 9, 11)]
    promotion = brought(source, experts)
    assert promotion.tier.held() == set(experts) and source.residents == []
    assert not source.moving


def test_what_was_promoted_is_not_read_from_the_disk_again(source: LadderSource) -> None:
    brought(source, [ExpertId(3, 5)])
    before = source.counters().disk_bytes
    with source.lease(3, [5]) as lease:
        assert sum(len(wave.experts) for wave in lease.waves()) == 1
    assert source.counters().disk_bytes == before
    with source.lease(3, [6]) as lease:
        list(lease.waves())
    assert source.counters().disk_bytes > before


def test_what_is_expected_replaces_what_was_expected_before(source: LadderSource) -> None:
    promotion = source.promotion
    assert promotion is not None
    with source._ladder.lock:  # no reader looks meanwhile
        promotion.expect([ExpertId(3, index) for index in range(30)])
        promotion.expect([ExpertId(4, 1)])
        while promotion.pending or promotion.promoted < 1:
            source._ladder.changed.wait()
    assert promotion.tier.held() == {ExpertId(4, 1)}


def read(source: LadderSource, layer: int, experts: range) -> None:
    for index in experts:
        with source.lease(layer, [index]) as lease:
            list(lease.waves())


def test_what_was_promoted_is_not_the_first_to_go(source: LadderSource) -> None:
    read(source, 0, range(BLOCKS // 2))
    promoted = [ExpertId(1, index) for index in range(BLOCKS // 2)]
    promotion = brought(source, promoted)
    read(source, 2, range(5))  # five have to go
    assert len(promotion.tier.held()) == BLOCKS and set(promoted) <= promotion.tier.held()


def test_what_is_to_stay_gives_no_place_to_what_is_promoted(source: LadderSource) -> None:
    read(source, 0, range(BLOCKS))
    oldest = [ExpertId(0, index) for index in range(BLOCKS // 4)]
    promotion = source.promotion
    assert promotion is not None
    promotion.expect((), oldest)
    promoted = [ExpertId(1, index) for index in range(BLOCKS // 4)]
    with source._ladder.lock:
        promotion.expect(promoted, [*oldest, *promoted])
        while promotion.moving:
            source._ladder.changed.wait()
    assert {*oldest, *promoted} <= promotion.tier.held()


class Gate(OverLink):
    """Says when a read has begun, and lets it pass when told."""

    def __init__(self, below: Link) -> None:
        super().__init__(below)
        self.reached, self.opened = threading.Event(), threading.Event()

    def read(self, pieces: Sequence[Piece]) -> None:
        self.reached.set()
        self.opened.wait()
        self.below.read(pieces)


def test_the_last_block_is_on_its_way_until_it_is_there() -> None:
    pack = open_pack(EMBEDDED)
    gates: list[Gate] = []

    def gated(disk: Link) -> Link:
        gates.append(Gate(disk))
        return gates[0]

    ram_bytes = BLOCKS * pack.layout(0).block_bytes
    with LadderSource.open(pack, slots=16, dtype=torch.float32, ram_bytes=ram_bytes, wrap=gated) as source:
        promotion, (gate,) = source.promotion, gates
        assert promotion is not None and not source.moving
        promotion.expect([ExpertId(3, 5)])
        gate.reached.wait()
        on_its_way = source.moving, promotion.tier.held()
        gate.opened.set()
        with source._ladder.lock:
            while promotion.moving:
                source._ladder.changed.wait()
        assert on_its_way == (True, frozenset())
        assert promotion.tier.held() == {ExpertId(3, 5)} and not source.moving


def test_there_is_no_promotion_without_ram_that_is_short() -> None:
    pack = open_pack(EMBEDDED)
    with LadderSource.open(pack, slots=16, dtype=torch.float32) as bare:
        assert bare.promotion is None


def test_likely_experts_are_promoted_in_their_order_and_fill_half_of_ram_at_most() -> None:
    rates = np.array([0.5, PROMOTED_USES / 16, 0.9, PROMOTED_USES / 17, 0.7])
    assert plan_promotion(rates, 100).tolist() == [2, 4, 0, 1]
    assert plan_promotion(rates, 4).tolist() == [2, 4]
