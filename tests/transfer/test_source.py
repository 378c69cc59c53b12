"""Leases over a pack: every expert once, with the right bits, in as few as two slots; and the counters add up."""

import gc
import math
import threading
from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.core.errors import TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.transfer.disk import DiskLink
from steerpipe.transfer.faulty import ALWAYS, Faults, FaultyLink
from steerpipe.transfer.link import BlockAddress, Link, OverLink, Piece
from steerpipe.transfer.plan import Guess, Plan
from steerpipe.transfer.queue import Reason
from steerpipe.transfer.source import LadderSource, default_transient_limit
from tests.transfer.packs import EXPERTS, LAYERS, same, tiny_pack

ALL = list(range(EXPERTS))


def read_all(source: LadderSource, layer: int, routed: Sequence[int], keep: Sequence[int] | None = None) -> list[int]:
    """Leases, checks every bit, and returns the experts in the order in which they came."""
    came: list[int] = []
    with source.lease(layer, routed, keep) as lease:
        for wave in lease.waves():
            assert list(wave.experts) == sorted(wave.table)
            for expert in wave.experts:
                assert same(wave.table[expert], ExpertId(layer, expert)), f"expert {expert} of layer {layer}"
            came += wave.experts
    return came


class CountingLink(OverLink):
    """How often each block was read from its start, and in how many calls."""

    def __init__(self, below: Link) -> None:
        super().__init__(below)
        self.blocks: Counter[ExpertId] = Counter()
        self.calls: list[list[ExpertId]] = []

    def read(self, pieces: Sequence[Piece]) -> None:
        self.calls.append([piece.address.expert for piece in pieces])
        self.blocks.update(piece.address.expert for piece in pieces if piece.start == 0)
        super().read(pieces)


class GatedLink(OverLink):
    """Reads of some experts wait until the test lets them."""

    def __init__(self, below: Link, held: Sequence[ExpertId]) -> None:
        super().__init__(below)
        self.gates = {expert: threading.Event() for expert in held}
        self.reached = {expert: threading.Event() for expert in held}

    def read(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.address.expert in self.gates:
                self.reached[piece.address.expert].set()
                assert self.gates[piece.address.expert].wait(60)
        super().read(pieces)


def open_with(kind: type[OverLink], *arguments: object, slots: int = 6, **how: object) -> tuple[LadderSource, OverLink]:
    pack = tiny_pack()
    link = kind(DiskLink(pack.expert_file), *arguments)  # type: ignore[arg-type]
    return LadderSource(pack, link, slots=slots, dtype=torch.float32, **how), link  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [2, 3, 6, 24])
@pytest.mark.parametrize("ram_bytes", [0, 1 << 16, 1 << 20])
@pytest.mark.parametrize("readers", [1, 2])
def test_every_expert_comes_once_with_the_bits_of_the_pack(slots: int, ram_bytes: int, readers: int) -> None:
    with LadderSource.open(
        tiny_pack(), slots=slots, dtype=torch.float32, ram_bytes=ram_bytes, readers=readers
    ) as source:
        for layer in (*range(LAYERS), *range(LAYERS)):
            assert sorted(read_all(source, layer, ALL)) == ALL
        source.check_integrity()


@settings(max_examples=40)
@given(
    slots=st.integers(2, 24),
    steps=st.lists(
        st.tuples(
            st.integers(0, LAYERS - 1),
            st.lists(st.sampled_from(ALL), unique=True, min_size=1),
            st.none() | st.sets(st.sampled_from(ALL)),
            st.lists(st.tuples(st.integers(0, LAYERS - 1), st.sampled_from(ALL)), max_size=6),
        ),
        max_size=12,
    ),
    readers=st.integers(1, 2),
    policy=st.sampled_from(["lru", "lfru", "forecast"]),
    seed=st.integers(0, 5),
)
def test_any_leases_and_guesses_give_the_same_bits_and_counters_that_add_up(
    slots: int,
    steps: list[tuple[int, list[int], set[int] | None, list[tuple[int, int]]]],
    readers: int,
    policy: str,
    seed: int,
) -> None:
    faults = Faults(fail_share=0.3)
    with LadderSource.open(
        tiny_pack(), slots=slots, dtype=torch.float32, readers=readers, policy=policy,
        wrap=lambda link: FaultyLink(link, faults, seed),
    ) as source:  # fmt: skip
        leased = 0
        for layer, routed, keep, guesses in steps:
            experts = [ExpertId(*guess) for guess in guesses]
            source.prefetch(experts, Reason.PREFETCH if len(guesses) % 2 else Reason.DRAFT, math.inf)
            kept = None if keep is None else [expert for expert in keep if expert in routed]
            assert sorted(read_all(source, layer, routed, kept)) == sorted(routed)
            source.cancel_prefetches(experts[::2])
            leased += len(routed)
        source.check_integrity()
        counts = source.counters()
        assert counts.leased == leased == counts.hits + counts.late + counts.misses
        assert counts.leases == len(steps)
        arrived = counts.demand.transfers + counts.prefetch.transfers + counts.draft.transfers
        assert counts.misses <= arrived
        cut = sum(each.cancelled_bytes for each in (counts.demand, counts.prefetch, counts.draft))
        block = next(iter(source._ladder.addresses.values())).size_bytes
        assert counts.read_bytes == arrived * block + cut
        assert len(source.residents) <= slots


def test_an_expert_is_loaded_at_most_once_per_lease() -> None:
    for slots in (2, 5):
        source, link = open_with(CountingLink, slots=slots)
        assert isinstance(link, CountingLink)
        with source:
            for layer in range(LAYERS):
                source.check_integrity()  # what was read ahead has arrived, so reads below are this lease's own
                before = link.blocks.copy()
                read_all(source, layer, ALL, keep=[0, 1])
                now = link.blocks - before
                assert max((n for e, n in now.items() if e.layer == layer), default=0) <= 1
            source.check_integrity()
        assert max(link.blocks.values()) == 1


def test_a_lease_of_what_is_resident_is_one_wave_and_reads_nothing() -> None:
    source, link = open_with(CountingLink)
    assert isinstance(link, CountingLink)
    with source:
        read_all(source, 1, [3, 5])
        calls = len(link.calls)
        with source.lease(1, [5, 3]) as lease:
            assert [wave.experts for wave in lease.waves()] == [(3, 5)]
        assert len(link.calls) == calls
        counts = source.counters()
        assert (counts.demand.hits, counts.misses, counts.late) == (2, 2, 0)


def test_what_is_here_comes_before_what_has_to_be_read() -> None:
    source, _ = open_with(CountingLink)
    with source:
        read_all(source, 0, [6])
        assert read_all(source, 0, [1, 6])[0] == 6


def test_the_wave_that_has_landed_is_computed_while_another_block_is_on_its_way() -> None:
    slow = ExpertId(0, 7)
    source, link = open_with(GatedLink, [slow], readers=2)
    assert isinstance(link, GatedLink)
    with source, source.lease(0, [0, 7]) as lease:
        waves = lease.waves()
        assert next(waves).experts == (0,)  # though 7 cannot come
        link.gates[slow].set()
        assert next(waves).experts == (7,)
        assert next(waves, None) is None


def test_neighbours_on_disk_are_one_read() -> None:
    source, link = open_with(CountingLink, slots=24)
    assert isinstance(link, CountingLink)
    with source:
        read_all(source, 0, ALL)
        assert link.calls[0] == [ExpertId(0, expert) for expert in ALL]
        assert source.counters().disk_reads == 1


def test_a_prompt_evicts_no_more_than_the_transient_limit() -> None:
    slots = 16
    with LadderSource.open(tiny_pack(), slots=slots, dtype=torch.float32) as source:
        for layer in range(2):
            read_all(source, layer, ALL)  # a full cache
        source.check_integrity()
        before = set(source.residents)
        assert len(before) >= slots - default_transient_limit(slots)
        for layer in range(LAYERS):
            read_all(source, layer, ALL, keep=[])
        source.check_integrity()
        assert len(before - set(source.residents)) <= default_transient_limit(slots)


def test_the_tail_of_a_prompt_is_kept() -> None:
    with LadderSource.open(tiny_pack(), slots=8, dtype=torch.float32) as source:
        for layer in range(2):
            read_all(source, layer, ALL)
        read_all(source, 2, ALL, keep=[2, 5])
        source.check_integrity()
        assert {ExpertId(2, 2), ExpertId(2, 5)} <= set(source.residents)
        assert not {ExpertId(2, 0), ExpertId(2, 7)} & set(source.residents)


def test_nothing_is_dropped_while_slots_are_free() -> None:
    with LadderSource.open(tiny_pack(), slots=24, dtype=torch.float32) as source:
        for layer in range(LAYERS):
            read_all(source, layer, ALL, keep=[])
        source.check_integrity()
        assert len(source.residents) >= 24 - default_transient_limit(24)


# --- guesses


def test_the_next_layer_is_read_ahead_when_half_of_a_layer_was_used() -> None:
    with LadderSource.open(tiny_pack(), slots=8, dtype=torch.float32) as source:
        read_all(source, 0, ALL[:3])
        source.check_integrity()
        assert source.counters().prefetch.transfers == 0
        read_all(source, 0, ALL[:4])
        source.check_integrity()
        assert source.counters().prefetch.transfers == default_transient_limit(8)
        ahead = [expert for expert in source.residents if expert.layer == 1]
        assert len(ahead) == default_transient_limit(8)
        read_all(source, 1, [expert.expert for expert in ahead])
        assert source.counters().prefetch.hits == len(ahead)


def test_the_most_frequent_experts_of_the_next_layer_are_read_ahead_first() -> None:
    with LadderSource.open(tiny_pack(), slots=4, dtype=torch.float32) as source:
        for _ in range(3):
            read_all(source, 1, [6, 7])
        read_all(source, 2, [0, 1, 2])  # evicts them
        read_all(source, 0, ALL)
        source.check_integrity()
        assert [expert.expert for expert in source.residents if expert.layer == 1] == [6, 7]


def test_what_was_read_ahead_and_is_not_wanted_gives_its_slot_back() -> None:
    with LadderSource.open(tiny_pack(), slots=8, dtype=torch.float32) as source:
        read_all(source, 0, ALL)
        source.check_integrity()
        ahead = {expert.expert for expert in source.residents if expert.layer == 1}
        other = next(expert for expert in ALL if expert not in ahead)
        read_all(source, 1, [other])
        source.check_integrity()
        assert [expert for expert in source.residents if expert.layer == 1] == [ExpertId(1, other)]


def test_a_guess_that_is_demanded_is_continued_and_counted_as_late() -> None:
    guess = ExpertId(1, 4)
    source, link = open_with(GatedLink, [guess])
    assert isinstance(link, GatedLink)
    with source:
        read_all(source, 1, [0])
        assert source.prefetch([guess], Reason.PREFETCH, math.inf) == 1
        assert link.reached[guess].wait(60)
        with source.lease(1, [0, 4]) as lease:
            waves = lease.waves()
            assert next(waves).experts == (0,)
            link.gates[guess].set()
            assert next(waves).experts == (4,)
        counts = source.counters()
        assert (counts.prefetch.late, counts.misses, counts.prefetch.transfers) == (1, 1, 1)
        source.check_integrity()


def test_a_guess_counts_as_hit_once_and_then_belongs_to_the_cache() -> None:
    with LadderSource.open(tiny_pack(), slots=6, dtype=torch.float32) as source:
        source.prefetch([ExpertId(0, 1)], Reason.DRAFT, math.inf)
        source.check_integrity()
        for _ in range(3):
            read_all(source, 0, [1])
        counts = source.counters()
        assert (counts.draft.hits, counts.demand.hits, counts.misses) == (1, 2, 0)


def test_a_cancelled_guess_is_cut_at_the_next_chunk() -> None:
    guess = ExpertId(1, 4)
    source, link = open_with(GatedLink, [guess], chunk_bytes=4096)
    assert isinstance(link, GatedLink)
    with source:
        source.prefetch([guess], Reason.PREFETCH, math.inf)
        assert link.reached[guess].wait(60)
        source.cancel_prefetches([guess])
        link.gates[guess].set()
        source.check_integrity()
        counts = source.counters()
        assert (counts.prefetch.cancelled, counts.prefetch.cancelled_bytes) == (1, 4096)
        assert source.residents == []
        assert read_all(source, 1, [4]) == [4]


def test_a_guess_whose_deadline_has_passed_is_dropped_at_the_next_lease() -> None:
    held, stale = ExpertId(1, 4), ExpertId(1, 6)
    source, link = open_with(GatedLink, [held])
    assert isinstance(link, GatedLink)
    with source:
        source.prefetch([held], Reason.PREFETCH, math.inf)
        assert link.reached[held].wait(60)
        source.prefetch([stale], Reason.PREFETCH, 0.0)  # perf_counter has passed 0
        with source.lease(0, []):
            pass
        link.gates[held].set()
        source.check_integrity()
        assert source.residents == [held]
        assert source.counters().prefetch.cancelled == 1


def test_demand_takes_the_slots_of_guesses_that_have_not_landed() -> None:
    guesses = [ExpertId(2, 0), ExpertId(2, 1)]
    source, link = open_with(GatedLink, guesses, slots=2, readers=2)
    assert isinstance(link, GatedLink)
    with source:
        assert source.prefetch([ExpertId(2, 0)], Reason.PREFETCH, math.inf) == 1
        assert link.reached[guesses[0]].wait(60)
        assert source.prefetch([ExpertId(2, 1), ExpertId(2, 2)], Reason.DRAFT, math.inf) == 1
        link.gates[guesses[1]].set()
        assert sorted(read_all(source, 0, [0, 1, 2])) == [0, 1, 2]  # with one slot, the other being held up
        link.gates[guesses[0]].set()
        source.check_integrity()


def expecting(*experts: ExpertId, protect: Sequence[ExpertId] = ()) -> Plan:
    return Plan(tuple(Guess(expert, 0.9, float(at)) for at, expert in enumerate(experts, 10**9)), tuple(protect))


def test_what_is_expected_gets_a_slot_only_when_the_link_has_nothing_to_do() -> None:
    held, expected = ExpertId(0, 0), ExpertId(2, 3)
    source, link = open_with(GatedLink, [held], slots=2)
    assert isinstance(link, GatedLink)
    with source:
        with source.lease(0, [0]) as lease:  # on its way, held up
            assert link.reached[held].wait(60)
            source.steer(expecting(expected))
            assert source.counters().evictions == 0 and source._ladder.table.free_slots == 1
            link.gates[held].set()
            assert next(lease.waves()).experts == (0,)
        source.check_integrity()
        assert expected in source.residents


def test_the_sooner_expected_is_read_first() -> None:
    first, second = ExpertId(1, 5), ExpertId(2, 1)
    source, link = open_with(GatedLink, [first, second])
    assert isinstance(link, GatedLink)
    with source:
        source.steer(expecting(first, second))
        assert link.reached[first].wait(60)
        assert not link.reached[second].is_set()
        link.gates[first].set()
        link.gates[second].set()
        source.check_integrity()
        assert source.residents == [first, second]


def test_what_is_no_longer_expected_is_cut_and_never_begun() -> None:
    begun, waiting, later = ExpertId(1, 4), ExpertId(1, 6), ExpertId(2, 2)
    source, link = open_with(GatedLink, [begun], chunk_bytes=4096)
    assert isinstance(link, GatedLink)
    with source:
        source.steer(expecting(begun, waiting))
        assert link.reached[begun].wait(60)
        source.steer(expecting(later))
        link.gates[begun].set()
        source.check_integrity()
        assert source.residents == [later]
        assert source.counters().prefetch.cancelled == 1


def test_what_is_expected_and_demanded_goes_on_as_demand() -> None:
    expected = ExpertId(1, 4)
    source, link = open_with(GatedLink, [expected])
    assert isinstance(link, GatedLink)
    with source:
        source.steer(expecting(expected))
        assert link.reached[expected].wait(60)
        with source.lease(1, [4]) as lease:
            source.steer(expecting())  # another forecast does not cut what a lease waits for
            link.gates[expected].set()
            assert next(lease.waves()).experts == (4,)
        assert source.counters().prefetch.late == 1
        source.check_integrity()


def test_ready_says_which_experts_of_a_layer_are_there() -> None:
    with LadderSource.open(tiny_pack(), slots=6, dtype=torch.float32) as source:
        read_all(source, 1, [2, 5])
        assert np.flatnonzero(source.ready(1)).tolist() == [2, 5]
        assert not source.ready(0).any()
        assert source.block_seconds > 0 and source.waited_seconds > 0


def test_guesses_never_evict_what_is_protected_or_leased() -> None:
    with LadderSource.open(tiny_pack(), slots=2, dtype=torch.float32) as source:
        read_all(source, 0, [0, 1])
        source.protect([ExpertId(0, 0)])
        with source.lease(0, [1]) as lease:
            next(lease.waves())
            assert source.prefetch([ExpertId(2, 0), ExpertId(2, 1)], Reason.PREFETCH, math.inf) == 0
        source.check_integrity()
        assert source.residents == [ExpertId(0, 0), ExpertId(0, 1)]
        assert source.prefetch([ExpertId(2, 0), ExpertId(2, 1)], Reason.PREFETCH, math.inf) == 1
        source.check_integrity()
        assert ExpertId(0, 0) in source.residents


def test_the_warm_set_is_kept_like_what_was_demanded() -> None:
    warm = [ExpertId(0, 3), ExpertId(1, 4), ExpertId(2, 5)]
    with LadderSource.open(tiny_pack(), slots=6, dtype=torch.float32) as source:
        assert source.warm(warm) == 3
        source.check_integrity()
        read_all(source, 0, [3], keep=[])
        source.check_integrity()
        assert source.residents == warm


# --- budgets, threads, ends


def test_two_threads_lease_from_two_slots_and_both_go_on() -> None:
    with LadderSource.open(tiny_pack(), slots=2, dtype=torch.float32) as source:
        came: list[list[int]] = []

        def work(seed: int) -> None:
            random = Random(seed)
            for _ in range(30):
                routed = random.sample(ALL, random.randint(1, EXPERTS))
                came.append(sorted(read_all(source, random.randrange(LAYERS), routed)))
                assert came[-1]

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(came) == 60
        source.check_integrity()


def fail_after(source: LadderSource, waves: int) -> None:
    with source.lease(0, ALL) as lease:
        for _ in zip(range(waves), lease.waves(), strict=False):
            pass
        raise ZeroDivisionError


def test_an_error_inside_the_block_releases_everything() -> None:
    for after in (0, 1, 2):
        with LadderSource.open(tiny_pack(), slots=3, dtype=torch.float32) as source:
            with pytest.raises(ZeroDivisionError):
                fail_after(source, after)
            source.check_integrity()
            assert sorted(read_all(source, 0, ALL)) == ALL
            source.check_integrity()


def test_waves_that_are_not_finished_release_everything() -> None:
    with LadderSource.open(tiny_pack(), slots=3, dtype=torch.float32) as source:
        with source.lease(0, ALL) as lease:
            next(lease.waves())
        source.check_integrity()


def test_the_same_expert_cannot_be_leased_twice_at_once() -> None:
    opened = LadderSource.open(tiny_pack(), slots=3, dtype=torch.float32)
    with opened as source, pytest.raises(AssertionError, match="leased twice"):
        source.lease(0, [1, 1])


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("steerpipe-reader")]


def test_closing_ends_the_threads_and_later_leases_say_so() -> None:
    before = len(reader_threads())
    source = LadderSource.open(tiny_pack(), slots=3, dtype=torch.float32, readers=2)
    read_all(source, 0, [1])
    assert len(reader_threads()) == before + 2
    source.close()
    source.close()
    assert len(reader_threads()) == before
    with pytest.raises(TransferError, match="closed"), source.lease(0, [1]) as lease:
        next(lease.waves())


def test_a_source_that_nobody_holds_ends_its_threads() -> None:
    before = len(reader_threads())
    source = LadderSource.open(tiny_pack(), slots=3, dtype=torch.float32)
    read_all(source, 0, [1])
    del source
    gc.collect()
    assert len(reader_threads()) == before


def test_a_lease_that_waits_when_the_source_is_closed_is_told() -> None:
    held = ExpertId(0, 0)
    source, link = open_with(GatedLink, [held])
    assert isinstance(link, GatedLink)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            read_all(source, 0, [0])
        except TransferError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert link.reached[held].wait(60)
    closing = threading.Thread(target=source.close)
    closing.start()
    thread.join()
    link.gates[held].set()
    closing.join()
    assert "closed" in str(errors[0])


def test_a_mistake_in_a_reader_reaches_the_lease_instead_of_hanging_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = tiny_pack()

    def broken(*_: object, **__: object) -> None:
        raise AssertionError("a mistake of ours")

    monkeypatch.setattr(pack, "decode_block", broken)
    with LadderSource.open(pack, slots=3, dtype=torch.float32) as source:
        with pytest.raises(RuntimeError, match="reader") as raised, source.lease(0, [1]) as lease:
            next(lease.waves())
        assert "a mistake of ours" in str(raised.value.__cause__)


def test_a_failed_guess_is_forgotten_and_the_demand_tries_again() -> None:
    expert = ExpertId(0, 5)
    faults = Faults(fails={expert: 3})
    with LadderSource.open(
        tiny_pack(), slots=3, dtype=torch.float32, wrap=lambda link: FaultyLink(link, faults)
    ) as source:
        source.prefetch([expert], Reason.PREFETCH, math.inf)
        source.check_integrity()
        assert source.counters().failures == 1
        assert source.residents == []
        assert read_all(source, 0, [5]) == [5]


def test_a_block_that_cannot_be_read_fails_its_lease_and_no_other() -> None:
    bad = ExpertId(0, 5)
    faults = Faults(fails={bad: ALWAYS})
    with LadderSource.open(
        tiny_pack(), slots=3, dtype=torch.float32, wrap=lambda link: FaultyLink(link, faults)
    ) as source:
        for _ in range(2):
            with pytest.raises(TransferError, match="expert 5 of layer 0"):
                read_all(source, 0, ALL)
            source.check_integrity()
        fine = [expert for expert in ALL if expert != 5]
        assert sorted(read_all(source, 0, fine)) == fine
        assert sorted(read_all(source, 1, ALL)) == ALL
        source.check_integrity()


def test_addresses_are_those_of_the_pack() -> None:
    pack = tiny_pack()
    with LadderSource.open(pack, slots=2, dtype=torch.float32) as source:
        place = pack.place(1, 3)
        assert source._ladder.addresses[ExpertId(1, 3)] == BlockAddress(
            ExpertId(1, 3), place.offset, place.layout.block_bytes
        )


def test_an_interrupt_while_a_lease_waits_leaves_nobody_hungry(monkeypatch: pytest.MonkeyPatch) -> None:
    held = ExpertId(0, 0)
    source, gated = open_with(GatedLink, [held], slots=2)
    assert isinstance(gated, GatedLink)
    with source:
        changed = source._ladder.changed

        def interrupted(timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(changed, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                read_all(source, 0, [0, 1, 2])
        gated.gates[held].set()
        source.check_integrity()
        assert read_all(source, 0, ALL)
