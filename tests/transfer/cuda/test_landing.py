"""Steps that read what is missing by themselves, on streams that lag: every slot holds what the table says of it."""

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.core.blocks import DirectReads, SentBlock
from steerpipe.core.errors import ConfigError, TransferError
from steerpipe.transfer.cuda.copier import HostCopier
from steerpipe.transfer.cuda.landing import LAYERS_LENT, PINNED, supply_of
from steerpipe.transfer.cuda.lent import MOST_SUPPLIED, RING
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.queue import Reason
from tests.transfer.cuda.blocks import CPU, EXPERTS, NAMES, backing, contents, made_up
from tests.transfer.cuda.streams import Kernel, Streams

ALL = range(EXPERTS)
COUNT = 3 * EXPERTS
MASK = (1 << 63) - 1


class Router:
    """A kernel on the computing stream: reads the tail, the ring and then the table, each at a time of its own."""

    def __init__(self, machine: "Machine", layer: int, chosen: Sequence[int]) -> None:
        self._machine, self._layer, self._chosen = machine, layer, chosen
        self._seen: list[list[int]] = []
        self.posted: DirectReads | None = None
        self.origin: list[int] = []
        self.target: list[int] = []

    def __call__(self) -> bool:
        landing = self._machine.source.landing
        assert landing is not None
        places = (landing.tail, landing.ring, self._machine.source.table(self._layer))
        self._seen.append(places[len(self._seen)].tolist())
        if len(self._seen) < 3:
            return False
        (tail,), ring, table = self._seen
        head = int(landing.head[0])
        self.origin = [table[expert] for expert in self._chosen]
        missed, landed = [], []
        for expert, entry in zip(self._chosen, self.origin, strict=True):
            self.target.append(0)
            if entry < 0:
                missed.append(expert)
                if head < tail:
                    self.target[-1] = ring[head % RING]
                    landed.append(expert)
                    head += 1
        landing.head[0] = head
        self.posted = DirectReads(list(self._chosen), missed, landed)
        return True


class Reader:
    """The expert kernels behind a router: read each block where it was found, and store it where a ticket leads."""

    def __init__(self, machine: "Machine", layer: int, router: Router) -> None:
        self._machine, self._layer, self._router = machine, layer, router
        self._steps = 0
        self._begun = False

    def __call__(self) -> bool:
        streams, router = self._machine.streams, self._router
        taken = [address for address in router.target if address]
        if not self._begun:
            self._begun, self._steps = True, streams.some_steps()
            for address in (entry & MASK for entry in router.origin):
                streams.reading[address] = streams.reading.get(address, 0) + 1
            assert len(set(taken)) == len(taken), "two experts land in one slot"
            assert not set(taken) & set(router.origin), "a slot is written that this layer reads"
        assert not any(streams.reading.get(address) for address in taken), "a slot is written while a kernel reads it"
        self._steps -= 1
        if self._steps:
            return False
        base = self._machine.source._shelf.base[self._layer]
        for expert, entry, into in zip(router._chosen, router.origin, router.target, strict=True):
            block = self._machine.blocks[base + expert]
            streams.reading[entry & MASK] -= 1
            assert ctypes.string_at(entry & MASK, len(block)) == block, f"expert {expert} was not where it was found"
            if into:
                ctypes.memmove(into, entry & MASK, len(block))
        return True


class Machine:
    """A source that lends slots, and the model's steps on it."""

    def __init__(self, seed: int, slots: int, policy: str = "lru", **named: object) -> None:
        layers = made_up()
        self.blocks = contents(layers, seed)
        self.streams = Streams(seed)
        self.source = CudaSource(
            layers, backing(self.blocks, self.streams), slots=slots, device=CPU, copier=self.streams, policy=policy,
            direct=True, **named,  # type: ignore[arg-type]
        )  # fmt: skip
        self.streams.watch(self.source._memory.entries, self.source._memory.addresses)

    def step(self, routed: Sequence[Sequence[int]], fail: Callable[[int], None] = lambda order: None) -> None:
        """One graph for all layers; the host follows. `fail` may raise before a layer is followed."""
        landing, routers = self.source.landing, []
        assert landing is not None
        ticket = first = landing.begin()
        for layer, chosen in zip(NAMES, routed, strict=True):
            routers.append(Router(self, layer, chosen))
            self.streams.launch(routers[-1])
            self.streams.launch(Reader(self, layer, routers[-1]))
        try:
            for order, (layer, router) in enumerate(zip(NAMES, routers, strict=True)):
                self.streams.until(lambda router=router: router.posted is not None)  # type: ignore[misc]
                self.streams.some()
                fail(order)
                ticket = landing.follow(layer, router.posted, ticket)
                self.streams.some()
            landing.end()
        except KeyboardInterrupt:
            self.streams.drain()
            ticket = first
            for layer, router in zip(NAMES, routers, strict=True):
                ticket = landing.follow(layer, router.posted, ticket)
            self.source.release()

    def lease(self, layer: int, routed: Sequence[int]) -> None:
        with self.source.lease(layer, routed) as lease:
            for wave in lease.waves():
                self.streams.launch(self.kernel(layer, wave, waits=False))
                self.streams.some()

    def serve(self, routed: Sequence[Sequence[int]]) -> None:
        posted: list[int] = []
        self.source.begin()
        for layer, chosen in zip(NAMES, routed, strict=True):
            self.streams.launch(lambda layer=layer: not posted.append(layer))  # type: ignore[misc,func-returns-value]
            self.streams.launch(self.kernel(layer, chosen, waits=True))
        for layer, chosen in zip(NAMES, routed, strict=True):
            self.streams.until(lambda layer=layer: layer in posted)  # type: ignore[misc]
            self.source.serve(layer, chosen)
            self.streams.some()

    def kernel(self, layer: int, experts: Sequence[int], *, waits: bool) -> Kernel:
        base = self.source._shelf.base[layer]
        truth = {index: self.blocks[base + index] for index in ALL}
        return Kernel(self.streams, self.source.table(layer), experts, truth, waits=waits)

    def check(self) -> None:
        """Behind every address of the table lies the block; no slot of the ring is anybody's."""
        self.source.check_integrity()
        memory, landing = self.source._memory, self.source.landing
        assert landing is not None
        lent = {memory.addresses[slot] for slot in landing.lent}
        for layer in NAMES:
            base = self.source._shelf.base[layer]
            for expert, entry in enumerate(self.source.table(layer).tolist()):
                block = self.blocks[base + expert]
                assert ctypes.string_at(entry & MASK, len(block)) == block
                assert entry not in lent
                assert (entry > 0) == bool(self.source._shelf.here[base + expert])


routes = st.lists(st.sampled_from(ALL), unique=True, min_size=1, max_size=4)
every = st.lists(routes, min_size=3, max_size=3)
events = st.one_of(
    st.tuples(st.just("step"), every),
    st.tuples(st.just("step"), every),
    st.tuples(st.just("lease"), st.sampled_from(NAMES), st.lists(st.sampled_from(ALL), unique=True, min_size=1)),
    st.tuples(st.just("serve"), every),
    st.tuples(st.just("warm"), st.lists(st.integers(0, COUNT - 1), max_size=6)),
)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(4, COUNT - 1),
    policy=st.sampled_from(["lru", "lfru"]),
    events=st.lists(events, max_size=10),
)
def test_kernels_find_what_was_packed_whoever_brings_it(
    seed: int, slots: int, policy: str, events: list[tuple]  # type: ignore[type-arg]
) -> None:  # fmt: skip
    machine = Machine(seed, slots, policy)
    with machine.source as source:
        for kind, *what in events:
            if kind == "step":
                machine.step(what[0])
            elif kind == "lease":
                machine.lease(*what)
            elif kind == "warm":
                source.warm(source.experts[number] for number in what[0])
            elif source.serves(4):
                machine.serve(what[0])
        machine.check()


@pytest.mark.parametrize("seed", [4413, 4506, 4706, 5156, 6337, 6552])
def test_a_slot_of_a_block_that_came_twice_is_nobody_elses(seed: int) -> None:
    """Guesses of the host take free slots while kernels still write (these seeds did, where the ring could shrink)."""
    random = Random(seed)
    machine = Machine(seed, random.randint(12, COUNT - 1), random.choice(["lru", "lfru"]))
    count = random.choice((1, 1, 1, 2))
    with machine.source as source:
        pool = [random.sample(ALL, 3) for _ in NAMES]

        def guess(order: int = 0) -> None:
            if random.random() < 0.5:
                chosen = [source.experts[each] for each in random.sample(range(COUNT), 3)]
                source.prefetch(chosen, Reason.PREFETCH, math.inf)

        for _ in range(random.randint(2, 8)):
            guess()
            machine.step([random.sample(each, count) for each in pool], guess)
            guess()
        machine.check()


@pytest.mark.parametrize("seed", range(12))
def test_a_served_step_finds_no_entry_that_a_direct_one_has_changed(seed: int) -> None:
    """Else a layer that finds an old entry, still right, runs ahead of the copy that takes a later layer's slot."""
    machine = Machine(seed, 14, "lru")
    with machine.source as source:
        machine.serve([[0], [0], [5]])
        machine.serve([[1, 2], [0, 1, 3], [0, 1, 3]])
        machine.step([[3], [0, 2], [2]])
        machine.streams.drain()
        machine.streams._copying = 0.0  # the copy stream stands still
        machine.step([[1, 4], [0], [0]])
        changed = [number for number in range(COUNT) if not source._shelf.here[number] and entry(source, number) > 0]
        assert changed, "a slot was lent, and its owner's entry is there still"
        source.begin()
        found: list[list[int]] = []
        machine.streams.launch(lambda: not found.append([entry(source, number) for number in changed]))  # type: ignore[func-returns-value]
        machine.streams.some(1000)
        assert not found, "a served step waits"
        machine.streams._copying = 0.5
        machine.streams.until(lambda: bool(found))
        assert max(found[0]) <= 0
        source.release()
        machine.check()


def entry(source: CudaSource, number: int) -> int:
    expert = source.experts[number]
    return int(source.table(expert.layer)[expert.expert])


def test_what_the_host_sent_for_a_step_that_runs_by_itself_is_neither_right_nor_wrong() -> None:
    machine = Machine(0, 14)
    with machine.source as source:
        machine.serve([[0], [0], [0]])
        source.expect([(NAMES[0], 4)])
        source.pump()
        machine.streams.drain()
        throttle = source._shelf.throttle
        machine.step([[0], [0], [0]])
        machine.serve([[0], [0], [0]])
        assert throttle._sent == 0
        source.expect([(NAMES[1], 4)])
        source.pump()
        machine.serve([[0], [0], [0]])
        assert throttle._sent == 1  # wrong
        machine.check()


@pytest.mark.parametrize("seed", range(12))
def test_nobody_lends_slots_to_a_served_step_and_the_next_direct_one_finds_some(seed: int) -> None:
    machine, random = Machine(seed, 14), Random(seed)
    with machine.source as source:
        landing = source.landing
        assert landing is not None
        for _ in range(4):
            machine.step([random.sample(ALL, 2) for _ in NAMES])
            assert landing.lent
            machine.serve([random.sample(ALL, 4) for _ in NAMES])
            assert not landing.lent and not source._shelf.table.reserved
            taken = landing.taken
            machine.step([[each for each in ALL if not source._shelf.here[base + each]][:1] for base in (0, 6, 12)])
            assert landing.taken > taken, "what is missing has landed"
            machine.check()


@settings(max_examples=60)
@given(seed=st.integers(0, 1000), slots=st.integers(4, 12), at=st.integers(0, 60), order=st.integers(0, 2))
def test_an_interrupt_anywhere_leaves_a_true_table(seed: int, slots: int, at: int, order: int) -> None:
    """Before a layer is followed, or in the middle of one: at any word that is written."""
    random, machine = Random(seed), Machine(seed, slots)
    left = [at if at % 4 else 0]  # one interrupt, here or there
    write = machine.streams.write

    def interrupted(address: int, value: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        write(address, value)

    def stop(layer: int) -> None:
        if at % 4 == 0 and layer == order:
            raise KeyboardInterrupt

    with machine.source:
        machine.step([random.sample(ALL, 4) for _ in NAMES])
        machine.streams.write = interrupted  # type: ignore[method-assign]
        machine.step([random.sample(ALL, 4) for _ in NAMES], stop)
        machine.streams.write = write  # type: ignore[method-assign]
        machine.check()
        for _ in range(3):
            machine.step([random.sample(ALL, 4) for _ in NAMES])
        machine.check()


def test_a_step_that_nobody_followed_costs_slots_and_no_truth() -> None:
    """An interrupt, and another one in what mends the first: the next step finds out and mends."""
    random, machine = Random(3), Machine(3, 12)
    with machine.source as source:
        machine.step([random.sample(ALL, 4) for _ in NAMES])
        assert source.landing is not None
        source.landing.begin()
        for layer in NAMES:
            router = Router(machine, layer, random.sample(ALL, 4))
            machine.streams.launch(router)
            machine.streams.launch(Reader(machine, layer, router))
        machine.streams.drain()
        for _ in range(3):
            machine.step([random.sample(ALL, 4) for _ in NAMES])
        machine.check()


def test_what_landed_is_a_hit_the_next_time() -> None:
    machine = Machine(0, 12)
    with machine.source as source:
        for _ in range(2):
            machine.step([[0], [1], [2]])
            machine.streams.drain()
        counts = source.counters()
        assert (counts.misses, counts.hits, counts.leases, counts.leased) == (3, 3, 6, 6)
        assert counts.read_bytes == 3 * len(machine.blocks[0]) and counts.demand.transfers == 3
        assert machine.streams.copies == 0
        machine.check()


def test_what_does_not_land_is_read_all_the_same_and_counted() -> None:
    machine = Machine(0, 4)  # one slot in the ring
    with machine.source as source:
        machine.step([[0, 1, 2], [3], [4]])
        assert source.counters().misses == 5
        assert source.counters().demand.transfers == 5
        machine.check()


def test_an_expert_that_landed_twice_keeps_its_first_slot() -> None:
    """Its entry is still on its way when the next step looks."""
    machine = Machine(0, 12)
    landing = machine.source.landing
    assert landing is not None
    with machine.source:
        landing.head[0] = 2
        ticket = landing.follow(1, DirectReads([3], [3], [3]), 0)
        kept = machine.source._shelf.table.slots_of([3])
        for address in (int(landing.ring[0]), int(landing.ring[1])):
            ctypes.memmove(address, machine.blocks[3], len(machine.blocks[3]))
        assert landing.follow(1, DirectReads([3], [3], [3]), ticket) == 2
        assert machine.source._shelf.table.slots_of([3]) == kept
        machine.check()


class Calls(HostCopier):
    """Notes how many words each call has."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[int] = []

    def write(self, address: int, value: int) -> None:
        self.words.append(1)
        super().write(address, value)

    def write_many(self, words: Sequence[tuple[int, int]]) -> None:
        self.words.append(len(words))
        for address, value in words:
            super().write(address, value)


def test_all_words_of_a_layer_go_in_one_call_the_tail_last_and_who_is_near_gives_up_nothing() -> None:
    layers, copier = made_up(), Calls()
    blocks = contents(layers, 0)
    with CudaSource(
        layers, backing(blocks, copier), slots=16, device=CPU, copier=copier, policy="lru", direct=True
    ) as source:  # fmt: skip
        landing, near = source.landing, dict[int, list[int]]()
        assert landing is not None and landing.guesses is not None
        ticket, guesses = landing.begin(), landing.guesses
        guesses.begin()
        for first, layer in itertools.product((0, 2, 4), NAMES):  # until all slots have owners
            copier.words.clear()
            landing.head[0] += 2
            pair = [first, first + 1]
            ticket = landing.follow(layer, DirectReads(pair, pair, pair), ticket)
        assert copier.words == [7]  # two entries, two old owners', two slots, the tail
        copier.words.clear()
        guesses.head[0] += 1
        order, expert = divmod(list(source._shelf.here).index(0), EXPERTS)
        guesses.settle(NAMES[order], [SentBlock(expert, 1.0)], [expert], lambda: near)
        assert copier.words == [4]  # one of each
        assert int(guesses.tail[0]) == int(guesses.head[0]) + guesses.slots.most
        near = {layer: list(ALL) for layer in NAMES}  # nobody gives up a slot for a guess now
        here = sum(source._shelf.here)
        copier.words.clear()
        guesses.head[0] += 1
        order, expert = divmod(list(source._shelf.here).index(0), EXPERTS)
        guesses.settle(NAMES[order], [SentBlock(expert, 1.0)], [expert], lambda: near)
        assert copier.words == [2] and sum(source._shelf.here) == here + 1


def test_a_layer_that_was_followed_is_not_followed_twice() -> None:
    machine = Machine(0, 12)
    landing = machine.source.landing
    assert landing is not None
    with machine.source:
        landing.head[0] = 2
        for _ in range(2):
            assert landing.follow(1, DirectReads([3, 4], [3, 4], [3, 4]), 0) == 2
        assert landing.taken == 2
        for number, address in zip((3, 4), landing.ring.tolist(), strict=False):
            ctypes.memmove(address, machine.blocks[number], len(machine.blocks[number]))
        machine.check()


def test_a_lease_has_the_slots_that_are_not_lent() -> None:
    machine = Machine(3, 8)
    with machine.source as source:
        assert supply_of(8, routed=4) == 2
        assert source.serves(4) and not source.serves(5)
        machine.lease(1, ALL)
        machine.step([[0, 1], [2, 3], [4, 5]])
        machine.lease(2, ALL)
        machine.check()


@pytest.mark.parametrize(
    ("slots", "routed", "supplied"), [(4, 2, 1), (32, 4, 8), (128, 4, 4 * LAYERS_LENT), (6000, 32, MOST_SUPPLIED)]
)
def test_the_ring_takes_a_quarter_of_the_slots_at_most(slots: int, routed: int, supplied: int) -> None:
    assert supply_of(slots, routed) == supplied


def test_a_source_reads_directly_only_where_it_is_told_to_or_has_a_gpu() -> None:
    layers = made_up()
    blocks = contents(layers)

    def open_source(**named: object) -> CudaSource:
        copier = HostCopier()
        in_ring = named.pop("in_ring", ())
        return CudaSource(layers, backing(blocks, copier, in_ring), device=CPU, copier=copier, **named)  # type: ignore[arg-type]

    with open_source(slots=12) as source:
        assert not source.direct and source.landing is None
        assert source.table(1).tolist() == [0] * EXPERTS
    with open_source(slots=12, direct=True) as source:
        assert source.direct
        assert all(
            entry == source._shelf.places[number] | PINNED for number, entry in enumerate(source.table(1).tolist())
        )
    with open_source(slots=COUNT, direct=True) as source:
        assert source.resident and not source.direct
    for wrong in ({"slots": 3}, {"slots": 12, "in_ring": [5]}, {"slots": 12, "pace": 1e9}):
        with pytest.raises(ConfigError, match="pinned memory"):
            open_source(direct=True, **wrong)


def test_a_step_does_not_begin_on_a_closed_source() -> None:
    machine = Machine(0, 12)
    landing = machine.source.landing
    assert landing is not None
    machine.source.close()
    with pytest.raises(TransferError, match="closed"):
        landing.begin()
