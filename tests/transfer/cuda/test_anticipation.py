"""Experts for prompts that are being typed, on a GPU: they change no byte, keep what is to be kept, and can be cut."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.transfer.cuda.anticipation import CudaAnticipation
from steerpipe.transfer.cuda.copier import HostCopier
from steerpipe.transfer.cuda.source import CudaSource
from tests.transfer.cuda import test_streams as streams
from tests.transfer.cuda.blocks import CPU, EXPERTS, NAMES, backing, contents, made_up

COUNT = 3 * EXPERTS
numbers = st.lists(st.integers(0, COUNT - 1), max_size=8)
drafts = st.one_of(st.tuples(st.just("expect"), numbers, numbers), st.tuples(st.just("look")))


def expect(source: CudaSource, moving: CudaAnticipation, wanted: list[int], keep: list[int]) -> int:
    return moving.expect([source.experts[each] for each in wanted], [source.experts[each] for each in keep])


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(4, COUNT - 1),
    in_ring=st.just(()) | st.sets(st.integers(0, COUNT - 1)),
    policy=st.sampled_from(["lru", "lfru"]),
    steps=st.lists(st.one_of(drafts, drafts, streams.leases, streams.passes, streams.serves, streams.serves)),
)
def test_whatever_is_expected_kernels_find_what_was_packed(
    seed: int, slots: int, in_ring: set[int], policy: str, steps: list[Any]
) -> None:
    machine = streams.Machine(seed, slots, in_ring, None, policy)
    with machine.source as source:
        moving = source.anticipation()
        for kind, *what in steps:
            if kind == "expect":
                expect(source, moving, *what)
                machine.streams.some()
            elif kind == "look":
                assert moving.bytes_in_flight >= 0
            elif kind == "lease":
                assert sorted(machine.lease(*what)) == sorted(what[1])
            elif kind == "pass":
                for layer in NAMES:
                    assert sorted(machine.lease(layer, *what)) == sorted(what[0])
            elif source.serves(4):
                machine.serve(*what)
        source.check_integrity()
        assert moving.bytes_in_flight == 0


def opened(slots: int, in_ring: set[int] | None = None) -> CudaSource:
    layers, copier = made_up(), HostCopier()
    behind = backing(contents(layers, 0), copier, in_ring or set())
    return CudaSource(layers, behind, slots=slots, device=CPU, copier=copier, direct=False)


@pytest.mark.parametrize("in_ring", [set(), {1, 2}], ids=["pinned", "some to be read"])
def test_what_is_expected_comes_and_counts_as_a_drafts_when_it_is_used(in_ring: set[int]) -> None:
    with opened(6, in_ring) as source:
        moving = source.anticipation()
        assert expect(source, moving, [0, 1, 2], []) == 3
        while moving.bytes_in_flight:
            pass
        assert set(source.residents) == set(source.experts[:3])
        with source.lease(NAMES[0], [0, 1, 2]) as lease:
            assert sorted(index for wave in lease.waves() for index in wave) == [0, 1, 2]
        counts = source.counters()
        assert (counts.draft.transfers, counts.draft.hits, counts.misses) == (3, 3, 0)
        assert expect(source, moving, [0, 1, 2], []) == 0, "they are there"


def test_what_is_kept_gives_no_slot_to_a_guess() -> None:
    with opened(4) as source:
        moving = source.anticipation()
        assert expect(source, moving, [0, 1, 2, 3], []) == 4
        assert expect(source, moving, [4, 5], [0, 1, 2]) == 1
        assert set(source.experts[:3]) <= set(source.residents)


def test_what_is_not_expected_any_more_is_not_read() -> None:
    with opened(6, in_ring={0, 1, 2}) as source:
        moving = source.anticipation()
        expect(source, moving, [0, 1, 2], [])
        assert expect(source, moving, [], []) == 0
        assert not source.residents and source.counters().draft.cancelled == 3
        source.check_integrity()
