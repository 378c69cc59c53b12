"""The rules of ADR 0008 on streams that lag: whatever is leased or served, kernels find what was packed."""

from collections.abc import Collection, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.core.errors import TransferError
from steerpipe.transfer.cuda.source import CudaSource
from tests.transfer.cuda.blocks import CPU, EXPERTS, NAMES, PAGE, backing, contents, made_up
from tests.transfer.cuda.streams import Kernel, Streams

ALL = range(EXPERTS)
EXAMPLES = 150


class Machine:
    """A source on lagging streams, and the model's steps on it."""

    def __init__(
        self, seed: int, slots: int, in_ring: Collection[int] = (), transient_limit: int | None = None,
        policy: str = "lru",
    ) -> None:  # fmt: skip
        layers = made_up()
        self.blocks = contents(layers, seed)
        self.streams = Streams(seed)
        self.failing: set[int] = set()
        behind = backing(self.blocks, self.streams, in_ring, before=self._before)
        self.source = CudaSource(
            layers, behind, slots=slots, device=CPU, copier=self.streams, policy=policy,
            transient_limit=transient_limit, chunk_bytes=PAGE // 4,
        )  # fmt: skip
        self.streams.watch(self.source._memory.entries, self.source._memory.addresses)
        self.let_go = self.source.release  # what an interrupted step calls

    def _before(self, number: int) -> None:
        if number in self.failing:
            raise TransferError("a fault was planted", fix="none")

    def kernel(self, layer: int, experts: Sequence[int], *, waits: bool) -> Kernel:
        base = self.source._shelf.base[layer]
        truth = {index: self.blocks[base + index] for index in ALL}
        return Kernel(self.streams, self.source.table(layer), experts, truth, waits=waits)

    def lease(self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None) -> list[int]:
        came: list[int] = []
        with self.source.lease(layer, routed, keep) as lease:
            for wave in lease.waves():
                self.streams.launch(self.kernel(layer, wave, waits=False))
                self.streams.some()
                came += wave
        self.streams.some()
        return came

    def serve(
        self, routed: Sequence[Sequence[int]], keep: Collection[int] | None = None,
        stopped_by: type[BaseException] = TransferError,
    ) -> None:  # fmt: skip
        """One graph for all layers: each router posts its experts, then their kernels wait for the table."""
        assert self.source.serves(max(map(len, routed))), "whoever serves has asked"
        posted: list[int] = []
        kernels: list[Kernel] = []
        try:
            self.source.begin()
            for layer, chosen in zip(NAMES, routed, strict=True):
                self.streams.launch(lambda layer=layer: not posted.append(layer))  # type: ignore[misc,func-returns-value]
                kernels.append(self.kernel(layer, chosen, waits=True))
                self.streams.launch(kernels[-1])
            for layer, chosen in zip(NAMES, routed, strict=True):
                self.streams.until(lambda layer=layer: layer in posted)  # type: ignore[misc]
                self.streams.some()
                self.source.serve(layer, chosen, keep)
                self.streams.some()
        except stopped_by:
            for kernel in kernels:
                kernel.spoiled = True
            self.let_go()
            raise


routes = st.lists(st.sampled_from(ALL), unique=True, min_size=1, max_size=4)
kept = st.none() | st.sets(st.sampled_from(ALL))
leases = st.tuples(
    st.just("lease"), st.sampled_from(NAMES), st.lists(st.sampled_from(ALL), unique=True, min_size=1), kept
)
passes = st.tuples(st.just("pass"), st.lists(st.sampled_from(ALL), unique=True, min_size=3), kept)
serves = st.tuples(st.just("serve"), st.lists(routes, min_size=3, max_size=3), kept)
warms = st.tuples(st.just("warm"), st.lists(st.integers(0, 3 * EXPERTS - 1), max_size=8))
steps = st.lists(st.one_of(leases, passes, serves, serves, warms), max_size=10)


@settings(max_examples=EXAMPLES)
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(2, 3 * EXPERTS),
    limit=st.none() | st.integers(1, 6),
    in_ring=st.sets(st.integers(0, 3 * EXPERTS - 1)),
    policy=st.sampled_from(["lru", "lfru"]),
    steps=steps,
)
def test_kernels_find_what_was_packed(
    seed: int, slots: int, limit: int | None, in_ring: set[int], policy: str, steps: list[tuple]  # type: ignore[type-arg]
) -> None:  # fmt: skip
    machine = Machine(seed, slots, in_ring, limit, policy)
    source = machine.source
    with source:
        for kind, *what in steps:
            if kind == "lease":
                layer, routed, keep = what
                assert sorted(machine.lease(layer, routed, keep)) == sorted(routed)
            elif kind == "pass":  # a prompt goes through all layers
                routed, keep = what
                for layer in NAMES:
                    assert sorted(machine.lease(layer, routed, keep)) == sorted(routed)
            elif kind == "warm":
                source.warm(source.experts[number] for number in what[0])
            elif source.serves(4):
                machine.serve(*what)
        source.check_integrity()
        counts = source.counters()
        assert counts.demand.transfers + counts.prefetch.transfers == machine.streams.copies
        assert len(source.residents) <= slots
    assert machine.streams.closed


@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_passes_through_a_few_slots(slots: int, seed: int) -> None:
    machine = Machine(seed, slots)
    with machine.source as source:
        for _ in range(2):
            for layer in NAMES:
                assert sorted(machine.lease(layer, ALL, keep=[0])) == list(ALL)
        source.check_integrity()


@pytest.mark.parametrize("seed", range(10))
def test_leases_and_serving_take_turns(seed: int) -> None:
    random = Random(seed)
    machine = Machine(seed, 7)
    with machine.source as source:
        for _ in range(8):
            if random.random() < 0.5:
                for layer in NAMES:
                    machine.lease(layer, random.sample(ALL, random.randint(1, 6)), random.sample(ALL, 2))
            else:
                machine.serve([random.sample(ALL, random.randint(1, 4)) for _ in NAMES])
        source.check_integrity()


@pytest.mark.parametrize("seed", range(10))
def test_a_lease_that_follows_a_served_step_leaves_its_last_layer_alone(seed: int) -> None:
    machine = Machine(seed, 6)
    with machine.source as source:
        for _ in range(3):
            machine.serve([[0, 1], [2, 3], [0, 2, 4, 5]])  # kernels of the last layer may not have begun
            assert sorted(machine.lease(NAMES[0], ALL)) == list(ALL)
        source.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_is_served_after_a_prompt_was_cut_short_finds_a_true_table(seed: int) -> None:
    machine = Machine(seed, 6, transient_limit=3)
    with machine.source as source:
        for _ in range(4):
            machine.serve([[0, 1], [2, 3], [4, 5]])
            machine.lease(NAMES[0], [0, 1, 2])  # half of the layer: experts of the next one are sent ahead
            machine.serve([[0, 1], [3], [4, 5]])
        assert source.counters().prefetch.transfers
        source.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_warming_after_a_served_step_leaves_its_last_layer_alone(seed: int) -> None:
    machine = Machine(seed, 6, policy="lfru")
    with machine.source as source:
        for turn in range(3):
            machine.serve([[0, 1], [2, 3], [0, 2, 4, 5]])
            source.warm(source.experts[number] for number in range(turn, 6))
            machine.serve([[0, 2], [3], [1, 2, 4, 5]])
        source.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_is_served_after_a_lease_was_cut_short_finds_a_true_table(seed: int) -> None:
    machine = Machine(seed, 6)
    with machine.source as source:
        for _ in range(3):
            machine.serve([[0, 1], [2, 3], [4, 5]])
            with source.lease(NAMES[2], [0, 1, 2, 3]) as lease:
                wave = next(lease.waves())
                machine.streams.launch(machine.kernel(NAMES[2], wave, waits=False))
            machine.serve([[0, 1], [2, 3], [4, 5]])
        source.check_integrity()


@pytest.mark.parametrize("seed", range(6))
def test_nobody_waits_for_ever_when_serving_fails(seed: int) -> None:
    machine = Machine(seed, 6, in_ring=range(18))
    with machine.source as source:
        machine.serve([[0, 1], [2, 3], [4, 5]])
        machine.failing = {6 + 1}  # expert 1 of the second layer
        with pytest.raises(TransferError, match="planted"):
            machine.serve([[0, 2], [0, 1, 4], [0, 3]])
        source.check_integrity()
        machine.failing = set()
        machine.serve([[0, 2], [0, 1, 4], [0, 3]])
        source.check_integrity()


def test_a_lease_whose_block_cannot_be_had_leaves_nothing_behind() -> None:
    machine = Machine(1, 4, in_ring=range(18))
    with machine.source as source:
        machine.failing = {3}
        with pytest.raises(TransferError, match="planted"):
            machine.lease(1, ALL)
        source.check_integrity()
        assert source.counters().failures == 1
        machine.failing = set()
        assert sorted(machine.lease(1, ALL)) == list(ALL)
        source.check_integrity()
