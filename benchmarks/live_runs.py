"""Runs of the product within budgets, by turns: what slows the machine for a moment slows them all."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from steerpipe import Pipeline
from steerpipe.core.events import RoutingRecord
from steerpipe.transfer.counters import LadderCounters
from steerpipe.transfer.source import LadderSource

WARMUP = 40  # tokens after which a step is measured, live and replayed
TURN = 4  # tokens that a run writes before it is the next one's turn


class Recorder:
    """Keeps the routing of steps of one row, a prompt of one token included: [layers, top_k] per token."""

    def __init__(self) -> None:
        self.rows: list[list[np.ndarray[Any, Any]]] = []

    def observe(self, record: RoutingRecord) -> None:
        if len(record.positions) == 1:
            if record.layer == 0:
                self.rows.append([])
            self.rows[-1].append(record.experts[0])


@dataclass(frozen=True)
class Text:
    """What a run writes: the same tokens every time."""

    prompt: int  # one token, so that the recording has all that the cache has seen
    seed: int


@dataclass(frozen=True)
class Run:
    """What a round does once."""

    text: Text
    share: float
    pace: str | None


@dataclass(frozen=True)
class Live:
    """One run of the product."""

    spent: np.ndarray[Any, Any]  # [tokens after the warm-up] seconds
    hit_rate: float
    read_seconds: float  # per block that came after the warm-up, by the link's meter; 0: none came
    routing: np.ndarray[Any, Any]  # [tokens, layers, top_k]


class Writer:
    """A pipeline that writes its text a few tokens at a time. A context manager."""

    def __init__(self, pack: Path, run: Run, tokens: int) -> None:
        self._recorder = Recorder()
        self._pipe = Pipeline(
            pack, dtype="float32", threads=1, profile=False, sink=self._recorder, fast_memory=f"{run.share:%}",
            pace=run.pace, policy="lfru", predict="off",
        )  # fmt: skip
        if run.share == 1:  # every expert in a slot: the ladder's own work counts, as it does under a budget
            ladder = self._pipe.experts
            assert isinstance(ladder, LadderSource), "slots are warmed"
            ladder.warm(ladder.experts)
            ladder.check_integrity()  # waits until nothing moves
        text = run.text
        self._tokens = iter(
            self._pipe.stream([text.prompt], temperature=1.0, seed=text.seed, max_tokens=tokens, ignore_eos=True)
        )
        self._spent: list[float] = []
        self._begun: LadderCounters | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()

    def write(self, count: int) -> None:
        for _ in range(count):
            if len(self._spent) == WARMUP:
                self._begun = self._pipe.counters()
            begin = time.perf_counter()
            next(self._tokens)
            self._spent.append(time.perf_counter() - begin)

    def told(self) -> Live:
        ended = self._pipe.counters()
        assert self._begun is not None and ended is not None, "the run was shorter than its warm-up"
        counted = ended - self._begun
        read = counted.link_seconds / counted.demand.transfers if counted.demand.transfers else 0.0
        routing = np.array(self._recorder.rows, dtype=np.int64)
        return Live(np.array(self._spent[WARMUP:]), counted.hits / counted.leased, read, routing)


def live(pack: Path, tokens: int, runs: Sequence[Run]) -> list[Live]:
    """All of them at once, by turns."""
    with ExitStack() as stack:
        writers = [stack.enter_context(Writer(pack, run, tokens)) for run in runs]
        for done in range(0, tokens, TURN):
            for writer in writers:
                writer.write(min(TURN, tokens - done))
        return [writer.told() for writer in writers]
