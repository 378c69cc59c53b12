"""The host's part of predicted steps against a GPU that is a clock: what is moved, and what Python takes for it.

    PYTHONPATH=src:. python benchmarks/serve_on_a_clock.py --forecasts FILE [--format int4] [--share 0.25] [--repeat 3]

Needs no GPU. The source, its guesses and the steering are the real ones; copies end, routers post and taps answer when
a clock says so, which the host's calls move on by what an H200's driver took. So what is decided is the same in every
run, and the microseconds of serving a layer are this machine's CPU time.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from steerpipe.bench.forecasts import ForecastFile, read_forecasts
from steerpipe.bench.prediction import spoken
from steerpipe.bench.shapes import Shape, make_shape
from steerpipe.core.ids import ExpertId
from steerpipe.model.gpu.steer import Steer
from steerpipe.store.formats import parse_expert_format
from steerpipe.transfer.cuda.backing import LayerBlocks, ReadCounts
from steerpipe.transfer.cuda.copier import HostCopier, Mark
from steerpipe.transfer.cuda.guesses import CHUNK_BYTES, WINDOW
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.machine import slots_of_share

LINK = 55.5e9  # bytes per second
PAUSE, FIRST_WORD, NEXT_WORD = 2.3e-6, 1.5e-6, 0.6e-6  # seconds of it: for a copy, for words that go together
WORDS, COPY, EVENT, SERVE, POLL = 3e-6, 4e-6, 4e-6, 9e-6, 3e-6  # seconds of the host
TAP = 25e-6  # of the device, from a router to what its tap says
HORIZON = 2


class Everywhere:
    """A backing of blocks that have addresses and no bytes."""

    ring, pinned_bytes = None, 0

    def __init__(self, stride: int) -> None:
        self._stride = stride

    def locate(self, number: int) -> int:
        return (1 + number) * self._stride

    def view(self, number: int) -> int:
        return 0

    def reads(self) -> ReadCounts:
        return ReadCounts()

    def held(self) -> frozenset[ExpertId]:
        return frozenset()

    def close(self) -> None:
        """Nothing is held."""


class Clock(HostCopier):
    """A copy stream of which only the time is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self._free = 0.0
        self.landed: dict[int, float] = {}  # by the address of an entry
        self._done: dict[int, float] = {}  # by a mark's ordinal

    def copy(self, source: int, into: int, size_bytes: int) -> None:
        self.now += COPY
        self._free = max(self.now, self._free) + PAUSE + size_bytes / LINK

    def write(self, address: int, value: int) -> None:
        self.write_many([(address, value)])

    def write_many(self, words: Sequence[tuple[int, int]]) -> None:
        if words:
            self.now += WORDS
            self._free = max(self.now, self._free) + FIRST_WORD + (len(words) - 1) * NEXT_WORD
            self.landed.update((address, self._free) for address, _ in words)

    def copied(self) -> Mark:
        self.now += EVENT
        mark = super().copied()
        self._done[mark.ordinal] = self._free
        return mark

    def passed(self, mark: Mark) -> bool:
        return self.now >= self._done[mark.ordinal]


class Taps:
    """A mailbox in which the words of a layer stand from a given time on."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._said, self._order, self._at = clock, np.zeros(0, dtype=np.int32), -1, 0.0

    def begin(self, said: NDArray[np.int32]) -> None:
        """said [L, h, n]."""
        self._said, self._order = said, -1

    def answer(self, order: int, at: float) -> None:
        self._order, self._at = order, at

    def look(self, place: int, stamp: int) -> list[int] | None:
        order, number = divmod(place, HORIZON)
        if order > self._order or (order == self._order and self._clock.now < self._at):
            return None
        return [int(word) for word in self._said[order, number]]


def run(shape: Shape, file: ForecastFile, said: str, given: argparse.Namespace) -> str:
    clock, size = Clock(), shape.layout.block_bytes
    layers = dict.fromkeys(shape.spec.moe_layers, LayerBlocks(shape.moe.experts, shape.layout.form, size))
    source = CudaSource(
        layers, Everywhere(size), slots=slots_of_share(given.share, shape.all_experts), device=torch.device("cpu"),
        direct=False, copier=clock, chunk_bytes=given.chunk << 10, window=given.window,
    )  # fmt: skip
    taps = Taps(clock)
    steer = Steer(source, taps, shape.spec.moe_layers, HORIZON) if said else None
    words = spoken(file.foresight(said, HORIZON), file.recording) if said else None
    layer_seconds = given.layer_us / 1e6
    seconds, served = [], []
    for number, token in enumerate([*[0] * given.again, *range(given.warmup + given.tokens)]):
        if number == given.again + given.warmup:
            begun = source.counters()
        if words is not None:
            taps.begin(words[token])
        begin = clock.now
        routing = file.recording.routing[token].tolist()
        spent = step(source, clock, taps, steer, routing, number + 1, layer_seconds, given.end_us / 1e6)
        if number >= given.again + given.warmup:
            seconds.append(clock.now - begin)
            served += spent
    counts = source.counters() - begun
    mean, serving = statistics.fmean(seconds) * 1e3, statistics.median(served) * 1e6
    each = [count / given.tokens for count in (counts.misses, counts.prefetch.hits, counts.prefetch.late)]
    return (
        f"{given.share:.1%} {said or 'LFRU':10} {mean:7.3f} ms on the clock, a layer served in {serving:.0f} us; "
        f"misses {each[0]:.1f}, guessed {each[1]:.1f}, late {each[2]:.1f}{', throttled' if source.throttled else ''}"
    )


def step(
    source: CudaSource, clock: Clock, taps: Taps, steer: Steer | None, routing: Sequence[Sequence[int]], stamp: int,
    layer_seconds: float, end_seconds: float,
) -> list[float]:  # fmt: skip
    """Seconds of CPU for each layer. A router posts `layer_seconds` after the last block of the layer before.

    `end_seconds`: of the device and the host, from the last layer to the next step.
    """
    spent, shelf = [], source._shelf  # noqa: SLF001
    source.begin()
    if steer is not None:
        steer.begin(stamp)
    post = clock.now + layer_seconds
    for order, (layer, experts) in enumerate(zip(shelf.base, routing, strict=True)):
        while clock.now < post:
            clock.now += POLL
            if steer is not None:
                steer.poll()
        routed = sorted(experts)
        clock.now += SERVE
        began = time.thread_time()
        if steer is not None:
            taps.answer(order, post + TAP)
            steer.served(routed)
        source.serve(layer, routed, meanwhile=None if steer is None else steer.poll)
        spent.append(time.thread_time() - began)
        entries = [shelf.memory.entries[shelf.base[layer] + each] for each in routed]
        post = max(post, *(clock.landed.get(each, 0.0) for each in entries)) + layer_seconds
    if steer is not None:
        while steer.waiting:
            clock.now += POLL
            steer.poll()
        steer.end()
    clock.now = max(clock.now, post + end_seconds)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forecasts", type=Path, required=True)
    parser.add_argument("--format", default="int4", help="bf16, int8 or int4")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--said", default=",heads,perfect", help="whose forecasts, by commas; empty: nobody's")
    parser.add_argument("--layer-us", type=float, default=70.0, help="of a layer that hits")
    parser.add_argument("--end-us", type=float, default=300.0, help="of logits and the host, between two steps")
    parser.add_argument("--chunk", type=int, default=CHUNK_BYTES >> 10, help="KiB of a guess at once")
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--warmup", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--again", type=int, default=0, help="so often token 0 comes before, as predict_on_gpu.py does")
    parser.add_argument("--repeat", type=int, default=1)
    given = parser.parse_args()
    form = parse_expert_format(given.format)
    assert form is not None, "a benchmark has no native format"
    shape = make_shape("qwen1.5-moe", form, 1024)
    file = read_forecasts(given.forecasts, shape.moe.experts)
    for said in given.said.split(",") * given.repeat:
        print(run(shape, file, said, given), flush=True)


if __name__ == "__main__":
    main()
