"""Guesses that the device fetches by itself, on streams that lag: kernels never read what is being written."""

import ctypes
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from steerpipe.core.blocks import DirectReads, SentBlock
from steerpipe.transfer.cuda.lent import RING
from steerpipe.transfer.cuda.sending import MOST_SENT, NOBODY, GuessSlots, guesses_of
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.queue import Reason
from steerpipe.transfer.throttle import ENOUGH_SENT, MOST_SILENT
from tests.transfer.cuda.blocks import CPU, EXPERTS, NAMES, backing, contents, made_up
from tests.transfer.cuda.streams import COMPUTE, COPY, Kernel, Operation, Streams, word

ALL = range(EXPERTS)
COUNT = 3 * EXPERTS
MASK = (1 << 63) - 1
TAP, FETCH = 2, 3
PARTS, GUESSES = 4, 2


class Branches(Streams):
    """Two more streams, where a tap and the copies of what it names run."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._queues |= {TAP: deque(), FETCH: deque()}

    def branch(self, stream: int, operation: Operation) -> None:
        self._queues[stream].append(operation)

    def step(self) -> None:
        stream = self._random.choice((COMPUTE, TAP, FETCH)) if self._random.random() >= self._copying else COPY
        queue = self._queues[stream]
        if queue and queue[0]():
            queue.popleft()


class Layer:
    """One layer of a step on the device: its router, its experts, and what the tap before it has sent for."""

    def __init__(self, machine: "Machine", order: int) -> None:
        self.machine, self.order = machine, order
        self.chosen: Sequence[int] = ()
        self.named: Sequence[int] = ()
        self.layer = NAMES[order]
        self.base = machine.source._shelf.base[self.layer]
        self.before: Layer | None = None  # whose tap speaks of this one
        self.stopped = False  # the step of that tap has ended
        self.seen: list[list[int]] = []
        self.posted: DirectReads | None = None
        self.read = False  # by its experts, all of it
        self.told = False  # the tap before this layer has spoken
        self.tags: list[tuple[int, int]] = []  # (expert, slot), as the tap before this layer left them
        self.parts: list[int] = []  # of each that are there
        self.mail: list[SentBlock] | None = None
        self.places: list[tuple[int, int, int]] = []  # of each chosen: entry, slot to keep it in, number of its tag
        self.steps = 0

    def route(self) -> bool:
        """Tails, rings and then the table and the tags, each at a time of its own."""
        slots, landing = self.machine.guesses, self.machine.source.landing
        assert landing is not None
        looks = (
            lambda: [int(slots.tail[0]), int(landing.tail[0])], lambda: landing.ring.tolist(),
            lambda: self.machine.source.table(self.layer).tolist(),
        )  # fmt: skip
        self.seen.append(looks[len(self.seen)]())
        if len(self.seen) == 1:
            self.machine.sighted = self.seen[0][0]
        if len(self.seen) < 3:
            return False
        (_, tail), ring, table = self.seen
        head, tags = int(landing.head[0]), [expert for expert, _ in self.tags]
        missed, landed, sent = [], [], []
        for expert in self.chosen:
            place, tag = 0, -1
            if table[expert] < 0 and expert in tags:
                sent.append(expert)
                tag = tags.index(expert)
                place = self.tags[tag][1]
            elif table[expert] < 0:
                missed.append(expert)
                if head < tail:
                    place = ring[head % RING]
                    landed.append(expert)
                    head += 1
            self.places.append((table[expert], place, tag))
        landing.head[0] = head
        self.posted = DirectReads(list(self.chosen), missed, landed, sent)
        return True

    def foretell(self) -> bool:
        """Behind the router of the layer before, on a stream of its own: takes tickets that a router has seen."""
        slots = self.machine.guesses
        if self.before is None or self.before.posted is None:
            return False
        table, head = self.machine.source.table(self.layer).tolist(), int(slots.head[0])
        for expert in [each for each in self.named if table[each] < 0][:GUESSES]:
            if head < self.machine.sighted:
                self.tags.append((expert, int(slots.ring[head % RING])))
                self.parts.append(0)
                head += 1
        slots.head[0] = head
        self.told = True
        return True

    def fetch(self) -> bool:
        """Behind its tap, beside the experts of that layer: part by part, until this layer's router has looked."""
        streams = self.machine.streams
        if not self.told:
            return False
        for number, (expert, place) in enumerate(self.tags):
            if self.parts[number] == PARTS or self.posted is not None or self.stopped:
                continue
            mine = sum(place == each for _, each, _ in self.places)
            assert streams.reading.get(place, 0) <= mine, "a slot is written while a kernel reads it"
            entries = self.machine.source._memory.entries
            assert all(word(entry) != place for entry in entries), "a slot is written while the table points to it"
            self._move(expert, place, self.parts[number])
            self.parts[number] += 1
            return False
        self.mail = [SentBlock(tag[0], part / PARTS) for tag, part in zip(self.tags, self.parts, strict=True)]
        return True

    def stop(self) -> bool:
        self.stopped = True
        return True

    def run(self) -> bool:
        """The experts: what has come is read in its slot, the rest in pinned memory, and kept."""
        streams = self.machine.streams
        if not self.steps:
            self.steps = 1 + streams.some_steps()
            for entry, place, tag in self.places:
                address = place if tag >= 0 else entry & MASK
                streams.reading[address] = streams.reading.get(address, 0) + 1
            taken = [place for _, place, _ in self.places if place]
            assert len(set(taken)) == len(taken), "two experts land in one slot"
        self.steps -= 1
        if self.steps:
            return False
        for expert, (entry, place, tag) in zip(self.chosen, self.places, strict=True):
            block = self.machine.blocks[self.base + expert]
            come = self.parts[tag] if tag >= 0 else 0
            streams.reading[place if tag >= 0 else entry & MASK] -= 1
            if place:
                for part in range(come, PARTS):
                    self._move(expert, place, part)
            found = ctypes.string_at(place or entry & MASK, len(block))
            assert found == block, f"expert {expert} was not where it was found"
        self.read = True
        return True

    def _move(self, expert: int, place: int, part: int) -> None:
        block = self.machine.blocks[self.base + expert]
        start, end = len(block) * part // PARTS, len(block) * (part + 1) // PARTS
        ctypes.memmove(place + start, block[start:end], end - start)


class Machine:
    """A source that lends slots for misses and guesses, and the model's steps on it."""

    def __init__(self, seed: int, slots: int, policy: str = "lru") -> None:
        layers = made_up()
        self.blocks = contents(layers, seed)
        self.streams = Branches(seed)
        self.source = CudaSource(
            layers, backing(self.blocks, self.streams), slots=slots, device=CPU, copier=self.streams, policy=policy,
            direct=True,
        )  # fmt: skip
        self.streams.watch(self.source._memory.entries, self.source._memory.addresses)
        self.sighted = 0
        self.layers: list[Layer] = []
        self.first = Layer(self, 0)  # of the next step, for which this one may have sent

    @property
    def guesses(self) -> GuessSlots:
        assert self.source.landing is not None and self.source.landing.guesses is not None
        return self.source.landing.guesses

    def step(self, routed: Sequence[Sequence[int]], named: Sequence[Sequence[int]] | None) -> None:
        """One graph for all layers; the host follows. `named`: for each layer, by the tap before it; None: he rests."""
        landing = self.source.landing
        assert landing is not None
        self.guesses.collect()
        self.layers = []
        ticket = first = landing.begin()
        followed = 0
        try:
            if named is None:
                self.guesses.rest(len(NAMES))
            else:
                self.guesses.begin()
            self._queue(routed, named)
            for layer in self.layers:
                self.streams.until(lambda layer=layer: layer.posted is not None)  # type: ignore[misc]
                self.streams.some()
                assert layer.posted is not None
                ticket = landing.follow(layer.layer, layer.posted, ticket)
                followed = layer.order + 1
                self.streams.some()
                if named is not None:
                    self._settle(layer, layer.posted.sent, named)
                self.streams.some()
            if named is not None:
                self.guesses.owe(NAMES[0], lambda layer=self.first: self._mail(layer))  # type: ignore[misc]
            landing.end()
        except KeyboardInterrupt:
            self.streams.drain()
            self._catch_up(first, followed)
            self.source.release()
            self.first = Layer(self, 0)
        if named is not None:  # the graph joins its branches
            self.streams.until(lambda: not self.streams._queues[TAP] and not self.streams._queues[FETCH])

    def serve(self, routed: Sequence[Sequence[int]], guess: Callable[[], None]) -> None:
        """One graph whose layers the host serves, of steps that count stamps of their own. `guess`: the host, now and
        then."""
        posted: list[int] = []
        self.guesses.tags.fill_(0)  # as taps would leave them
        self.source.begin()
        if (self.guesses.tags == NOBODY).all():
            self.first = Layer(self, 0)
        guess()
        for layer, chosen in zip(NAMES, routed, strict=True):
            base = self.source._shelf.base[layer]
            truth = {index: self.blocks[base + index] for index in ALL}
            self.streams.launch(lambda layer=layer: not posted.append(layer))  # type: ignore[misc,func-returns-value]
            self.streams.launch(Kernel(self.streams, self.source.table(layer), chosen, truth, waits=True))
        guess()
        for layer, chosen in zip(NAMES, routed, strict=True):
            self.streams.until(lambda layer=layer: layer in posted)  # type: ignore[misc]
            self.source.serve(layer, chosen, meanwhile=guess)
            self.streams.some()

    def _queue(self, routed: Sequence[Sequence[int]], named: Sequence[Sequence[int]] | None) -> None:
        first = self.first if named is not None else Layer(self, 0)
        self.layers = [first, *(Layer(self, order) for order in range(1, len(NAMES)))]
        self.first = Layer(self, 0)
        for before, layer in itertools.pairwise([*self.layers, self.first]):
            before.chosen = routed[before.order]
            self.streams.launch(before.route)
            if named is not None:
                layer.before, layer.named = before, named[layer.order]
                self.streams.branch(TAP, layer.foretell)
                self.streams.branch(FETCH, layer.fetch)
            self.streams.launch(before.run)
        self.streams.launch(self.first.stop)

    def _settle(self, layer: Layer, wanted: Sequence[int], named: Sequence[Sequence[int]]) -> None:
        """Nobody who is in use or expected in the next layer gives up a slot for a guess."""
        shelf, following = self.source._shelf, (layer.order + 1) % len(NAMES)
        near = {NAMES[following]: named[following], layer.layer: layer.chosen}
        here = [shelf.base[name] + each for name, experts in near.items() for each in experts]
        here = [number for number in here if shelf.here[number]]
        if layer.order == 0:
            self.guesses.settle_owed(wanted, lambda: near)
        else:
            self.guesses.settle(layer.layer, self._mail(layer), wanted, lambda: near)
        assert all(shelf.here[number] for number in here)

    def _mail(self, layer: Layer) -> list[SentBlock]:
        self.streams.until(lambda: layer.mail is not None)
        return layer.mail or []

    def _catch_up(self, ticket: int, followed: int) -> None:
        landing = self.source.landing
        assert landing is not None
        for layer in self.layers:
            if layer.posted is None:
                return
            if layer.order < followed:
                ticket += len(layer.posted.landed)
            else:
                ticket = landing.follow(layer.layer, layer.posted, ticket)

    def check(self) -> None:
        """Behind every address of the table lies the block; no slot of a ring is anybody's."""
        self.source.check_integrity()
        landing = self.source.landing
        assert landing is not None
        lent = {self.source._memory.addresses[slot] for slot in landing.lent}
        for layer in NAMES:
            base = self.source._shelf.base[layer]
            for expert, entry in enumerate(self.source.table(layer).tolist()):
                block = self.blocks[base + expert]
                assert ctypes.string_at(entry & MASK, len(block)) == block
                assert entry not in lent


routes = st.lists(st.sampled_from(ALL), unique=True, min_size=1, max_size=4)
every = st.lists(routes, min_size=3, max_size=3)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10_000), slots=st.integers(8, COUNT - 1), policy=st.sampled_from(["lru", "lfru"]),
    steps=st.lists(st.tuples(every, st.one_of(every, every, st.none())), max_size=10),
)  # fmt: skip
def test_kernels_find_what_was_packed_whatever_is_guessed(
    seed: int, slots: int, policy: str, steps: list[tuple[list[list[int]], list[list[int]] | None]]
) -> None:
    machine = Machine(seed, slots, policy)
    with machine.source:
        for routed, named in steps:
            machine.step(routed, named)
        machine.check()


@settings(max_examples=100)
@given(seed=st.integers(0, 10_000), slots=st.integers(8, COUNT - 1), policy=st.sampled_from(["lru", "lfru"]))
@example(seed=295, slots=12, policy="lru")  # these did not wait for kernels of the step before
@example(seed=994, slots=10, policy="lru")
def test_kernels_find_what_was_packed_where_the_host_serves_some_steps(seed: int, slots: int, policy: str) -> None:
    random, machine = Random(seed), Machine(seed, slots, policy)
    pool = [random.sample(ALL, random.choice((3, 4, 5))) for _ in NAMES]
    count = random.choice((1, 2, 2, 3))
    with machine.source as source:

        def guess() -> None:
            if random.random() < 0.3:
                chosen = [source.experts[each] for each in random.sample(range(COUNT), 3)]
                source.prefetch(chosen, Reason.PREFETCH, math.inf)
            elif random.random() < 0.4:
                source.expect([(random.choice(NAMES), random.choice(ALL)) for _ in range(3)])
                source.pump()

        for _ in range(random.randint(3, 14)):
            routed, named = [random.sample(each, count) for each in pool], [random.sample(each, 2) for each in pool]
            if random.random() < 0.4 and source.serves(4):
                machine.serve(routed, guess)
            else:
                machine.step(routed, named if random.random() < 0.8 else None)
            guess()
        machine.check()


@settings(max_examples=80)
@given(seed=st.integers(0, 10_000), slots=st.integers(8, 16), at=st.integers(1, 60), rests=st.booleans())
def test_an_interrupt_at_any_word_leaves_a_true_table(seed: int, slots: int, at: int, rests: bool) -> None:
    random, machine, left = Random(seed), Machine(seed, slots), [at]
    write = machine.streams.write

    def interrupted(address: int, value: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        write(address, value)

    def step(*, rests: bool = False) -> None:
        routed, named = ([random.sample(ALL, 4) for _ in NAMES] for _ in range(2))
        machine.step(routed, None if rests else named)

    with machine.source:
        step()
        machine.streams.write = interrupted  # type: ignore[method-assign]
        step(rests=rests)
        machine.streams.write = write  # type: ignore[method-assign]
        machine.check()
        for _ in range(3):
            step()
        machine.check()


def test_right_guesses_are_used_and_wrong_ones_give_their_slots_back() -> None:
    machine = Machine(1, 16)
    with machine.source as source:
        for step in range(3):
            machine.step([[0], [step, 3 + step], [step]], [[], [step], [5]])
        machine.streams.drain()
        counts = source.counters()
        used = counts.prefetch.hits + counts.prefetch.late
        assert used == 3 and counts.prefetch.cancelled >= 2  # where a slot was seen in time
        moved = counts.prefetch.read_bytes + counts.demand.read_bytes - counts.prefetch.cancelled_bytes
        assert moved == (counts.misses + used) * len(machine.blocks[0])
        machine.check()


def test_what_the_last_tap_names_is_the_next_steps() -> None:
    machine = Machine(1, 16)
    with machine.source as source:
        machine.step([[0], [1], [2]], [[4], [], []])
        machine.check()
        machine.step([[4], [1], [2]], [[5], [], []])
        counts = source.counters()
        assert counts.prefetch.hits + counts.prefetch.late == 1 and counts.misses == 3
        machine.step([[5], [1], [2]], None)
        assert source.counters().prefetch.cancelled == 1, "who rests does not look for it"
        machine.step([[5], [1], [2]], [[], [], []])
        machine.check()


def test_guesses_that_nobody_looks_for_say_nothing_of_who_made_them() -> None:
    machine = Machine(1, 8)
    with machine.source as source:
        for token in range(4 * ENOUGH_SENT):  # every second step is nobody's, and wants what was guessed before it
            first, then = token % EXPERTS, (token + 1) % EXPERTS
            machine.step([[first], [first], [first]], [[then], [], []])
            machine.step([[then], [then], [then]], None)
        counts = source.counters().prefetch
        assert counts.cancelled > ENOUGH_SENT and not counts.hits + counts.late
        assert not source.throttled


def test_who_rests_has_no_slots() -> None:
    machine = Machine(1, 16)
    with machine.source:
        machine.step([[0], [1], [2]], [[], [1], [2]])
        assert len(machine.guesses.slots.lent) == guesses_of(16) == 2
        machine.step([[0], [1], [2]], None)
        machine.streams.drain()
        assert not machine.guesses.slots.lent
        machine.check()
        machine.step([[4], [5], [3]], [[], [5], [3]])
        assert machine.source.counters().prefetch.transfers == 4
        machine.check()


def test_a_slot_that_lies_elsewhere_has_nothing_of_the_block_that_was_sent_for() -> None:
    machine = Machine(1, 16)
    with machine.source as source:
        machine.step([[0], [1], [2]], [[4], [], []])
        machine.streams.drain()
        machine.guesses.tags[0, 0] = 5  # as a tap leaves them
        assert source.landing is not None
        source.landing.relocate({})
        assert (machine.guesses.tags == -1).all()


def test_guesses_that_nobody_wants_are_given_up_for_a_while() -> None:
    machine = Machine(1, 16)
    with machine.source as source:
        for _ in range(40):
            assert not source.throttled
            machine.step([[0], [1], [2]], [[], [3, 4], [4, 5]])
            if source.throttled:
                break
        assert source.throttled and machine.guesses.resting
        machine.check()


def test_what_a_predictor_sends_for_the_next_step_is_his_whoever_speaks_there() -> None:
    machine = Machine(1, 16)
    with machine.source as source:
        for _ in range(64):  # the first one's guesses, which nobody wants, are settled in steps of the second
            source.attend(0)
            if source.throttled:
                break
            machine.step([[0], [1], [2]], [[4, 5], [], []])
            source.attend(1)
            machine.step([[0], [1], [2]], [[], [], []])
        assert source.throttled
        source.attend(1)
        assert not source.throttled
        machine.check()


def test_a_predictor_that_sends_for_nobody_rests_too() -> None:
    machine, here = Machine(1, 16), [[0], [1], [2]]
    with machine.source as source:
        machine.step(here, [[], [], []])
        machine.streams.drain()
        steps = 1
        while not source.throttled:
            machine.step(here, here)
            steps += 1
        assert steps == MOST_SILENT // len(NAMES) + 1 and machine.guesses.resting
        assert not source.counters().prefetch.read_bytes
        machine.check()


@pytest.mark.parametrize(("slots", "lent"), [(7, 0), (36, 4), (180, MOST_SENT)])
def test_an_eighth_of_the_slots_at_most_is_for_guesses(slots: int, lent: int) -> None:
    assert guesses_of(slots) == lent
