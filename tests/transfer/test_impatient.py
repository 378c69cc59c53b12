"""Whoever does not wait takes what is there, and what it goes without is kept when it comes."""

import numpy as np
import pytest
import torch

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.model.moe import expert_ffn
from steerpipe.transfer.faulty import Faults, FaultyLink
from steerpipe.transfer.plan import Plan
from steerpipe.transfer.source import LadderSource
from tests.transfer.packs import EXPERTS, same, tiny_pack, true_weights

LAYER = 0
ROUTED = np.array([[0, 1], [1, 5]])


def source(slots: int = 8, seconds: float = 0.0) -> LadderSource:
    pack = tiny_pack()
    slow = Faults(delay_seconds=seconds)
    return LadderSource.open(
        pack, slots=slots, dtype=torch.float32, policy="lru", wrap=lambda below: FaultyLink(below, slow, seed=1)
    )


def settle(ladder: LadderSource) -> None:
    ladder.check_integrity()  # waits until nothing moves


def test_what_is_missing_is_sent_for_and_kept() -> None:
    with source() as ladder:
        shelf = ladder.impatient()
        assert shelf.missing(LAYER, ROUTED).all()
        assert shelf.send_for(LAYER, {0: 0, 5: 0}) == 2
        settle(ladder)
        assert shelf.missing(LAYER, ROUTED).tolist() == [[False, True], [True, False]]
        with ladder.lease(LAYER, [0]) as lease:
            (wave,) = lease.waves()
            assert same(wave.table[0], ExpertId(LAYER, 0))
        assert ladder.counters().hits == 1 and ladder.waited_seconds == 0.0


def test_the_policy_hears_of_what_a_token_went_without() -> None:
    with source(slots=4) as ladder:
        shelf = ladder.impatient()
        for layer in (0, 1):  # layer 0 is a token's first: the clock goes on with it
            with ladder.lease(layer, [0, 1]) as lease:
                list(lease.waves())
        with ladder.lease(0, [0]) as lease:
            list(lease.waves())
        shelf.send_for(0, {1: 0})  # used now, though it is there: not the oldest any more
        shelf.send_for(0, {2: 0, 3: 0})
        settle(ladder)
        assert set(ladder.residents) == {ExpertId(0, e) for e in (0, 1, 2, 3)}


def test_no_forecast_cuts_what_a_token_went_without() -> None:
    with source(seconds=0.002) as ladder:
        shelf = ladder.impatient()
        shelf.send_for(LAYER, {3: 0, 4: 0})
        ladder.steer(Plan((), ()))
        settle(ladder)
        assert not shelf.missing(LAYER, np.array([[3, 4]])).any()


def test_only_so_many_are_on_their_way_at_once() -> None:
    with source(slots=24, seconds=0.005) as ladder:
        shelf = ladder.impatient()
        assert shelf.send_for(0, dict.fromkeys(range(EXPERTS), 1)) == 1  # half of the transient limit of 24 slots
        assert shelf.send_for(1, dict.fromkeys(range(EXPERTS), 0)) == 2  # the other half is for first choices
        settle(ladder)


def test_first_choices_overtake_and_the_newest_goes_first() -> None:
    with source(slots=24) as ladder, ladder._ladder.lock:  # nothing is read meanwhile
        shelf = ladder.impatient()
        shelf.send_for(0, {1: 3})
        shelf.send_for(0, {2: 0})
        shelf.send_for(1, {3: 0})
        order = [ladder._ladder.queue.take(1 << 30) for _ in range(3)]
        assert [chunk and chunk.expert for chunk in order] == [ExpertId(1, 3), ExpertId(0, 2), ExpertId(0, 1)]
        for chunk in order:
            assert chunk is not None and ladder._ladder.queue.failed(chunk.expert, chunk.length)
            ladder._ladder.table.abandon(chunk.expert)
            ladder._ladder._journeys.clear()


def test_an_expert_is_borrowed_only_where_it_is_and_stays_meanwhile() -> None:
    with source(slots=2) as ladder:
        shelf = ladder.impatient()
        x = torch.randn(3, true_weights(ExpertId(LAYER, 2)).down.shape[0])
        assert shelf.compute(ExpertId(LAYER, 2), x) is None
        shelf.send_for(LAYER, {2: 0})
        settle(ladder)
        leased = ladder.counters().leased
        found = shelf.compute(ExpertId(LAYER, 2), x)
        assert found is not None and torch.equal(found, expert_ffn(x, true_weights(ExpertId(LAYER, 2))))
        settle(ladder)  # nothing is pinned any more
        assert ladder.counters().leased == leased  # it is no use


def test_no_guess_takes_the_slot_of_what_was_found_there() -> None:
    with source(slots=2) as ladder:
        shelf = ladder.impatient()
        shelf.send_for(LAYER, {0: 0, 1: 0})
        settle(ladder)
        assert not shelf.missing(LAYER, np.array([[0, 1]])).any()
        assert shelf.send_for(1, {4: 0}) == 0  # both slots are wanted now
        assert set(ladder.residents) == {ExpertId(LAYER, 0), ExpertId(LAYER, 1)}


def test_a_closed_model_says_so() -> None:
    ladder = source()
    shelf = ladder.impatient()
    ladder.close()
    with pytest.raises(TransferError, match="closed"):
        shelf.send_for(LAYER, {0: 0})
