"""Two streams that do their work later, in any order that CUDA would allow, and assert the rules of ADR 0008.

`Streams` is a Copier. What is queued is executed step by step by a seeded scheduler, block copies in two halves.
Kernels read blocks through the table, from one step to another, and compare them with what was packed.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from random import Random

from torch import Tensor

from steerpipe.transfer.cuda.copier import Mark

COPY, COMPUTE = 1, 0
Operation = Callable[[], bool]  # one step of it; True: it is done. One that cannot go on now does nothing.


def word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


class Streams:
    """Never gets stuck: if nothing can go on while somebody waits, an assertion says so."""

    orders_words = True

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._copying = self._random.choice((0.03, 0.2, 0.5, 0.8, 0.97))  # share of the steps: either may lag far
        self._queues: dict[int, deque[Operation]] = {COPY: deque(), COMPUTE: deque()}
        self._marks = 0
        self._passed: set[int] = set()
        self._entries: Sequence[int] = ()
        self._slots: Sequence[int] = ()
        self.reading: dict[int, int] = {}  # address of a slot → kernels that read it now
        self.copies = 0
        self.closed = False

    def watch(self, entries: Sequence[int], slots: Sequence[int]) -> None:
        """Addresses of the table's entries and of the slots: from now on every copy is checked against them."""
        self._entries, self._slots = entries, slots

    # --- Copier

    def copy(self, source: int, into: int, size_bytes: int) -> None:
        half = size_bytes // 2
        done: list[int] = []
        slot = max((each for each in self._slots if each <= into), default=into)  # a chunk of it, perhaps

        def step() -> bool:
            assert not self.reading.get(slot), "a slot is written while a kernel reads it"
            assert all(word(entry) != slot for entry in self._entries), "a slot is written while the table points to it"
            start = half * len(done)
            ctypes.memmove(into + start, source + start, half if not done else size_bytes - half)
            done.append(1)
            return len(done) == 2

        self.copies += 1
        self._queues[COPY].append(step)

    def write(self, address: int, value: int) -> None:
        def step() -> bool:
            ctypes.c_int64.from_address(address).value = value
            return True

        self._queues[COPY].append(step)

    def write_many(self, words: Sequence[tuple[int, int]]) -> None:
        for address, value in words:
            self.write(address, value)

    def copied(self) -> Mark:
        return self._mark(COPY)

    def computed(self) -> Mark:
        return self._mark(COMPUTE)

    def join(self, mark: Mark) -> None:
        assert mark.stream == COPY
        self._queues[COMPUTE].append(lambda: mark.ordinal in self._passed)

    def follow(self, mark: Mark) -> None:
        assert mark.stream == COMPUTE
        self._queues[COPY].append(lambda: mark.ordinal in self._passed)

    def passed(self, mark: Mark) -> bool:
        return mark.ordinal in self._passed

    def wait(self, mark: Mark) -> None:
        self.until(lambda: mark.ordinal in self._passed)

    def drain(self) -> None:
        self.until(lambda: not any(self._queues.values()))

    def close(self) -> None:
        self.closed = True

    # --- for tests

    def launch(self, operation: Operation) -> None:
        """A kernel, on the computing stream."""
        self._queues[COMPUTE].append(operation)

    def until(self, reached: Callable[[], bool], patience: int = 100_000) -> None:
        while not reached():
            patience -= 1
            assert patience, f"nothing goes on: {[len(queue) for queue in self._queues.values()]} operations wait"
            self.step()

    def some(self, most: int = 12) -> None:
        for _ in range(self._random.randrange(most)):
            self.step()

    def some_steps(self) -> int:
        return self._random.choice((1, 2, 10, 40))

    def step(self) -> None:
        queue = self._queues[COPY if self._random.random() < self._copying else COMPUTE]
        if queue and queue[0]():
            queue.popleft()

    def _mark(self, stream: int) -> Mark:
        self._marks += 1
        ordinal = self._marks

        def step() -> bool:
            self._passed.add(ordinal)
            return True

        self._queues[stream].append(step)
        return Mark(ordinal, stream)


class Kernel:
    """Reads experts of one layer through its row of the table. Without `waits` every entry has to be there at once."""

    def __init__(
        self, streams: Streams, row: Tensor, experts: Sequence[int], truth: Mapping[int, bytes], *, waits: bool
    ) -> None:
        self._streams, self._row, self._truth, self._waits = streams, row, truth, waits
        self._todo = list(experts)
        self._reading: dict[int, int] = {}
        self._steps: dict[int, int] = {}  # that reading an expert goes on for
        self.spoiled = False  # `release` has written zeros: what is read may be anything

    def __call__(self) -> bool:
        for expert, address in list(self._reading.items()):
            self._steps[expert] -= 1
            if self._steps[expert]:
                continue
            found = ctypes.string_at(address, len(self._truth[expert]))
            assert self.spoiled or found == self._truth[expert], f"a kernel read something else than expert {expert}"
            self._streams.reading[address] -= 1
            del self._reading[expert]
        for expert in list(self._todo):
            address = max(0, int(self._row[expert]))  # negative: not here, but a router would know where
            assert address or self._waits, f"the table has no address for expert {expert}, which is in a wave"
            if address:
                self._todo.remove(expert)
                self._reading[expert] = address
                self._steps[expert] = self._streams.some_steps()
                self._streams.reading[address] = self._streams.reading.get(address, 0) + 1
        return not self._todo and not self._reading
