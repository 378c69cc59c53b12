"""A pack behind a CudaSource, copies at once: every block through the table, whatever tiers and faults lie below."""

import ctypes
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.core.errors import CapacityError, TransferError
from steerpipe.core.ids import ExpertId
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.profile import Profile, load_profile, save_profile
from steerpipe.transfer.cuda.copier import HostCopier, PacedCopier
from steerpipe.transfer.cuda.opening import default_transient_limit
from steerpipe.transfer.cuda.pinned import PinnedArena
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.faulty import ALWAYS, Faults, FaultyLink
from tests.transfer.cuda.blocks import CPU, backing, contents, made_up
from tests.transfer.packs import EXPERTS, LAYERS, own_pack, tiny_pack

ALL = list(range(EXPERTS))
COUNT = LAYERS * EXPERTS
PACK = tiny_pack()
BLOCK = PACK.layout(0).block_bytes


def found(source: CudaSource, layer: int, expert: int) -> bytes:
    """The block that the table leads to."""
    address = int(source.table(layer)[expert])
    assert address, f"expert {expert} of layer {layer} has no address"
    return ctypes.string_at(address, BLOCK)


def packed(layer: int, expert: int) -> bytes:
    return PACK.read_block(layer, expert).numpy().tobytes()


def read_all(source: CudaSource, layer: int, routed: Sequence[int], keep: Sequence[int] | None = None) -> list[int]:
    came: list[int] = []
    with source.lease(layer, routed, keep) as lease:
        for wave in lease.waves():
            assert wave == tuple(sorted(wave)) and wave
            for expert in wave:
                assert found(source, layer, expert) == packed(layer, expert), f"expert {expert} of layer {layer}"
            came += wave
    return came


@pytest.mark.parametrize("slots", [2, 3, 9, COUNT])
@pytest.mark.parametrize(("pinned", "ram"), [(0, 0), (5, 0), (5, 4), (COUNT, 0), (0, COUNT)])
@pytest.mark.parametrize("readers", [1, 2])
def test_every_expert_comes_once_with_the_bytes_of_the_pack(slots: int, pinned: int, ram: int, readers: int) -> None:
    with CudaSource.open(
        tiny_pack(), slots=slots, device=CPU, pinned_bytes=pinned * BLOCK, ram_bytes=ram * BLOCK, readers=readers
    ) as source:
        for layer in (*range(LAYERS), *range(LAYERS)):
            assert sorted(read_all(source, layer, ALL)) == ALL
        source.check_integrity()
        assert source.resident == (slots == COUNT)
        assert source.counters().leased == 2 * COUNT


def test_who_does_not_wait_streams_no_layer_ahead_of_a_token_but_ahead_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with CudaSource.open(tiny_pack(), slots=9, device=CPU, pinned_bytes=COUNT * BLOCK) as source:
        left: list[int] = []
        monkeypatch.setattr(source._ahead, "leave", lambda layer, *_: left.append(layer))
        read_all(source, 0, ALL[:2])
        read_all(source, 1, ALL[:2], keep=[])
        assert left == [0, 1]
        pytest.importorskip("triton")
        source.impatient()
        read_all(source, 0, ALL[:2])
        read_all(source, 1, ALL[:2], keep=[])
        assert left == [0, 1, 1]


@settings(max_examples=40)
@given(
    slots=st.integers(2, COUNT - 1),
    pinned=st.integers(0, COUNT),
    ram=st.sampled_from([0, 3, COUNT]),
    steps=st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, LAYERS - 1),
            st.lists(st.sampled_from(ALL), unique=True, min_size=1),
            st.none() | st.sets(st.sampled_from(ALL)),
        ),
        max_size=12,
    ),
    seed=st.integers(0, 5),
)
def test_faults_that_pass_change_no_byte_and_the_counters_add_up(
    slots: int, pinned: int, ram: int, steps: list[tuple[bool, int, list[int], set[int] | None]], seed: int
) -> None:
    faults = Faults(fail_share=0.3, corrupts={ExpertId(0, 1): 1, ExpertId(2, 3): 1})
    with CudaSource.open(
        tiny_pack(), slots=slots, device=CPU, pinned_bytes=pinned * BLOCK, ram_bytes=ram * BLOCK,
        wrap=lambda link: FaultyLink(link, faults, seed),
    ) as source:  # fmt: skip
        leased = 0
        for served, layer, routed, keep in steps:
            if served and source.serves(len(routed)):
                source.serve(layer, routed, keep)
                for expert in routed:
                    assert found(source, layer, expert) == packed(layer, expert)
            else:
                assert sorted(read_all(source, layer, routed, None if keep is None else sorted(keep))) == sorted(routed)
            leased += len(routed)
        source.check_integrity()
        counts = source.counters()
        assert counts.leased == leased and counts.leases == len(steps)
        assert counts.read_bytes == BLOCK * (counts.demand.transfers + counts.prefetch.transfers)
        assert len(source.residents) <= slots


def test_a_block_that_cannot_be_had_is_an_error_of_its_lease_alone() -> None:
    faults = Faults(fails={ExpertId(1, 2): ALWAYS})
    with CudaSource.open(tiny_pack(), slots=4, device=CPU, wrap=lambda link: FaultyLink(link, faults)) as source:
        with pytest.raises(TransferError, match="expert 2 of layer 1"):
            read_all(source, 1, ALL)
        source.check_integrity()
        with pytest.raises(TransferError, match="expert 2 of layer 1"):
            source.serve(1, [2])
        source.release()
        source.check_integrity()
        assert sorted(read_all(source, 1, [0, 1, 3])) == [0, 1, 3]
        source.check_integrity()
        assert source.counters().failures == 2


@pytest.mark.parametrize("slots", [4, COUNT])
def test_a_pack_that_is_damaged_is_not_opened(tmp_path: Path, slots: int) -> None:
    pack = own_pack(tmp_path / "damaged")
    with pack.expert_file.open("r+b") as file:
        file.seek(pack.place(2, 5).offset + 7)
        file.write(b"\x55\xaa\x55")
    with pytest.raises(TransferError, match="expert 5 of layer 2"):
        CudaSource.open(pack, slots=slots, device=CPU, pinned_bytes=COUNT * BLOCK)


def test_what_is_resident_is_one_wave_and_copies_nothing() -> None:
    with CudaSource.open(tiny_pack(), slots=10, device=CPU, pinned_bytes=COUNT * BLOCK) as source:
        read_all(source, 0, [1, 3, 5])
        before = source.counters()
        with source.lease(0, [5, 1]) as lease:
            assert list(lease.waves()) == [(1, 5)]
        source.serve(0, [3, 1])
        since = source.counters() - before
        assert since.hits == 4 and since.misses == 0 and since.read_bytes == 0


def test_tokens_are_counted_by_the_first_layer() -> None:
    with CudaSource.open(tiny_pack(), slots=20, device=CPU) as source:
        read_all(source, 0, [1])
        read_all(source, 1, [1])
        source.serve(0, [1])
        source.serve(1, [1])
        assert source.tokens == 2


def test_a_prompt_leaves_the_decode_cache_alone_but_for_its_few_slots() -> None:
    with CudaSource.open(tiny_pack(), slots=12, device=CPU, pinned_bytes=COUNT * BLOCK, transient_limit=3) as source:
        for layer in range(LAYERS):
            source.serve(layer, [0, 1, 2])
        cached = set(source.residents)
        for layer in range(LAYERS):
            read_all(source, layer, ALL, keep=[])
        assert len(cached & set(source.residents)) == len(
            cached
        )  # three slots were free: the prompt went through those
        assert source.counters().evictions > 0
        source.check_integrity()


def test_a_prompt_sends_the_next_layer_ahead() -> None:
    with CudaSource.open(tiny_pack(), slots=18, device=CPU, pinned_bytes=COUNT * BLOCK, transient_limit=8) as source:
        read_all(source, 0, ALL, keep=[])
        before = source.counters()
        assert before.prefetch.transfers == EXPERTS
        read_all(source, 1, ALL, keep=[])
        since = source.counters() - before
        assert since.prefetch.hits == EXPERTS and since.misses == 0
        source.check_integrity()


def test_one_step_of_decode_sends_nothing_ahead() -> None:
    with CudaSource.open(tiny_pack(), slots=18, device=CPU, pinned_bytes=COUNT * BLOCK) as source:
        read_all(source, 0, [1, 2, 3])
        assert source.counters().prefetch.transfers == 0


def test_what_a_profile_kept_is_warm_in_the_next_run(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    with CudaSource.open(tiny_pack(), slots=6, device=CPU, pinned_bytes=5 * BLOCK) as source:
        read_all(source, 2, [1, 4, 6])
        save_profile(file, Profile("it", (0.0,) * COUNT, tuple(source.residents)))
    profile = load_profile(file, "it", COUNT)
    assert profile is not None
    with CudaSource.open(tiny_pack(), slots=6, device=CPU, pinned_bytes=5 * BLOCK) as source:
        assert source.warm(profile.warmest(6, source.experts)) == 3
        assert source.warm(profile.warmest(6, source.experts)) == 0
        assert sorted(read_all(source, 2, [1, 4, 6])) == [1, 4, 6]
        assert source.counters().misses == 0
        source.check_integrity()


@pytest.mark.parametrize("form", [ExpertFormat.INT4, ExpertFormat.INT8, ExpertFormat.BFLOAT16])
def test_slots_hold_blocks_as_they_were_packed(form: ExpertFormat) -> None:
    pack = tiny_pack(form=form)
    with CudaSource.open(pack, slots=3, device=CPU) as source:
        assert source.form(1) == pack.layout(1).form
        source.serve(1, [4])
        address = int(source.table(1)[4])
        assert ctypes.string_at(address, pack.layout(1).block_bytes) == pack.read_block(1, 4).numpy().tobytes()


def test_blocks_of_several_sizes_share_the_slots() -> None:
    layers = made_up(pages={2: 3})
    blocks, copier = contents(layers), HostCopier()
    with CudaSource(layers, backing(blocks, copier, range(4)), slots=5, device=CPU, copier=copier) as source:
        for number, expert in enumerate(source.experts):
            source.serve(expert.layer, [expert.expert])
            address = int(source.table(expert.layer)[expert.expert])
            assert ctypes.string_at(address, len(blocks[number])) == blocks[number]
        source.check_integrity()


def test_a_table_is_always_the_same_tensor() -> None:
    with CudaSource.open(tiny_pack(), slots=4, device=CPU) as source:
        before = source.table(1)
        source.serve(1, [3])
        assert source.table(1) is before and before.shape == (EXPERTS,) and before.dtype == torch.int64


def test_what_serves_is_said_before() -> None:
    with CudaSource.open(tiny_pack(), slots=6, device=CPU) as source:
        assert source.serves(4) and not source.serves(5)
    with CudaSource.open(tiny_pack(), slots=99, device=CPU) as source:
        assert source.resident and source.serves(EXPERTS)
        assert source.pinned_bytes == 0


def test_closing_twice_is_once_and_nothing_follows() -> None:
    source = CudaSource.open(tiny_pack(), slots=4, device=CPU)
    source.close()
    source.close()
    with pytest.raises(TransferError, match="closed"):
        source.lease(0, [1])
    with pytest.raises(TransferError, match="closed"):
        source.serve(0, [1])


def test_a_collected_source_closes_itself() -> None:
    source = CudaSource.open(tiny_pack(), slots=4, device=CPU)
    ring = source._shelf.backing.ring
    assert ring is not None
    read_all(source, 0, ALL)
    gone = weakref.ref(source)
    del source
    gc.collect()
    assert gone() is None
    assert not any(thread.is_alive() for thread in ring._threads)


def test_memory_that_is_not_there_is_refused_before_it_is_touched() -> None:
    with pytest.raises(CapacityError, match="pinned memory"):
        PinnedArena(1 << 50)


def test_a_paced_copy_takes_as_long_as_the_rate_says() -> None:
    now, slept = [10.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    copier = PacedCopier(HostCopier(), 1000.0, lambda: now[0], sleep)
    source, into = torch.ones(500, dtype=torch.uint8), torch.zeros(500, dtype=torch.uint8)
    copier.copy(source.data_ptr(), into.data_ptr(), 500)
    now[0] += 0.25  # somebody else was at work meanwhile
    copier.copy(source.data_ptr(), into.data_ptr(), 100)
    assert slept == pytest.approx([0.5, 0.1])
    assert torch.equal(source, into)


def test_the_transient_limit_is_two_layers_or_half_of_the_slots() -> None:
    layers = made_up(experts=6)
    assert [default_transient_limit(slots, layers) for slots in (2, 3, 10, 24, 100)] == [2, 2, 5, 12, 12]
