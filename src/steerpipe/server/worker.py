"""The engine process: takes messages between steps, and never waits for HTTP or a slow client.

Requests come as tokens; only drafts are tokenised here, a little at a time.
"""

import gc
import signal
import time
from bisect import bisect_left
from multiprocessing.connection import Connection
from pathlib import Path

from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import CapacityError, InputError, SteerpipeError
from steerpipe.core.events import PromptEvent, SequenceFailed, TokenEvent
from steerpipe.core.ids import SequenceId
from steerpipe.core.quality import AnswerQuality, Dial
from steerpipe.engine.engine import Event
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.server.draft_desk import DraftDesk
from steerpipe.server.messages import (
    OVERHEAD_SECONDS,
    Cancel,
    CloseDraft,
    EditDraft,
    Ended,
    Failed,
    Failure,
    FailureKind,
    FromEngine,
    LoadFailed,
    Loading,
    Observe,
    Observed,
    OpenDraft,
    Ready,
    Stepped,
    StepTimes,
    Stop,
    Submit,
    SwitchPrediction,
    Ticket,
    ToEngine,
    Told,
)
from steerpipe.server.onlooker import Onlooker
from steerpipe.transfer.counters import LadderCounters

_PROGRESS_SECONDS = 0.2  # between two messages about loading
_MOST_TAKEN = 64  # messages and edits between two steps: nobody's typing holds up an answer


def run_engine(connection: Connection, model: str | None, config: EngineConfig) -> None:
    """What the process runs, from its start to its end. The server alone decides when that is."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # a terminal and a supervisor signal the whole group
        signal.signal(ignored, signal.SIG_IGN)
    try:
        pipe = Pipeline(model, config=config, progress=_Teller(connection))
    except SteerpipeError as error:
        connection.send(LoadFailed(failure_of(error)))
        return
    except (MemoryError, RuntimeError) as problem:  # torch says "out of memory" with either
        first = str(problem).strip().partition("\n")[0] or type(problem).__name__
        fix = "give the experts less (--fast-memory), or lower --max-context"
        connection.send(LoadFailed(Failure(FailureKind.ENGINE, f"the model cannot be loaded: {first}", fix)))
        return
    gc.collect()
    gc.freeze()  # a full collection would look at everything that torch and transformers loaded, between two steps
    with pipe:
        try:
            connection.send(_ready(pipe))
            EngineLoop(pipe, connection).run()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the server is gone, and with it everybody who waits


def failure_of(error: SteerpipeError) -> Failure:
    kind = FailureKind.INPUT if isinstance(error, InputError) else FailureKind.ENGINE
    kind = FailureKind.CAPACITY if isinstance(error, CapacityError) else kind
    return Failure(kind, error.what, error.fix, error.exit_status)


class EngineLoop:
    """Steps the engine while there is work, and sleeps on the pipe while there is none."""

    def __init__(self, pipe: Pipeline, connection: Connection) -> None:
        self._pipe = pipe
        self._engine = pipe.engine
        self._connection = connection
        self._onlooker = Onlooker(pipe)
        self._desk = DraftDesk(pipe)
        self._tickets: dict[SequenceId, Ticket] = {}
        self._sequences: dict[Ticket, SequenceId] = {}
        self._before: dict[Ticket, LadderCounters | None] = {}  # the ladder when the sequence was submitted
        self._steps = 0
        self._waited_seconds = 0.0
        self._overhead_seconds = 0.0
        self._overhead_counts = [0] * (len(OVERHEAD_SECONDS) + 1)
        self._wall_counts = [0] * (len(OVERHEAD_SECONDS) + 1)

    def run(self) -> None:
        """Until a Stop comes, or the server is gone (EOFError)."""
        while True:
            if self._engine.idle:
                self._connection.poll(self._desk.patience())
            before = self._clock()
            told: list[Told | Ended | Failed] = []
            taken = 0
            while taken < _MOST_TAKEN and self._connection.poll(0):
                message: ToEngine = self._connection.recv()
                if isinstance(message, Stop):
                    return
                told += self._obey(message)
                taken += 1 + (len(message.edits) if isinstance(message, EditDraft) else 0)
            self._desk.tend()
            stepped = not self._engine.idle
            told += [word for event in self._engine.step() for word in self._words(event)]
            if told:
                self._send(Stepped(tuple(told)))
            if stepped:
                self._onlooker.rest()
                for begun in self._desk.stepped():
                    self._send(begun)
            for warmed in self._desk.news():
                self._send(warmed)
            if stepped:
                self._count(before)

    def _obey(
        self, message: Submit | Cancel | Observe | SwitchPrediction | OpenDraft | EditDraft | CloseDraft
    ) -> list[Told | Ended | Failed]:
        if isinstance(message, Submit):
            return self._submit(message)
        if isinstance(message, Cancel):
            sequence = self._sequences.get(message.ticket)
            if sequence is not None:
                self._engine.discard(sequence)
                self._forget(sequence)
            return []
        if isinstance(message, OpenDraft | EditDraft | CloseDraft):
            self._desk.obey(message)
            return []
        if isinstance(message, SwitchPrediction):
            self._onlooker.switch(message.on)
            return []
        if message.watching:
            self._onlooker.watch()
        self._send(self._observed())
        return []

    def _submit(self, message: Submit) -> list[Told | Ended | Failed]:
        try:
            if message.draft is None:
                sequence = self._engine.submit(message.request, message.promise)
            else:
                sequence = self._desk.submit(message.draft, message.request, message.promise)
        except SteerpipeError as error:
            return [Failed(message.ticket, failure_of(error))]
        self._tickets[sequence] = message.ticket
        self._sequences[message.ticket] = sequence
        self._before[message.ticket] = self._pipe.counters()
        return []

    def _words(self, event: Event) -> list[Told | Ended | Failed]:
        ticket = self._tickets.get(event.sequence)
        if ticket is None:  # cancelled
            return []
        if isinstance(event, SequenceFailed):
            self._forget(event.sequence)
            return [Failed(ticket, failure_of(event.error))]
        if event.finish_reason is None:
            return [Told(ticket, event)]
        return [Told(ticket, event), self._ended(ticket, event)]

    def _ended(self, ticket: Ticket, event: TokenEvent | PromptEvent) -> Ended:
        completion = self._engine.take_completion(event.sequence)
        before, after = self._before[ticket], self._pipe.counters()
        quality = self._forget(event.sequence)
        experts = None if before is None or after is None else after - before
        return Ended(ticket, completion.finish_reason, completion.timings, experts, quality)

    def _forget(self, sequence: SequenceId) -> AnswerQuality | None:
        """None: the engine is exact."""
        ticket = self._tickets.pop(sequence)
        del self._sequences[ticket]
        del self._before[ticket]
        quality = self._pipe.quality
        return None if quality is None else quality.of(quality.desk.accounts.take(sequence))

    def _observed(self) -> Observed:
        times = StepTimes(
            self._steps,
            self._engine.compute_seconds,
            self._waited_seconds,
            self._overhead_seconds,
            tuple(self._overhead_counts),
            tuple(self._wall_counts),
        )
        onlooker = self._onlooker
        pipe, load = self._pipe, self._engine.load
        lossy = None if pipe.quality is None else pipe.quality.desk.accounts.total
        return Observed(load, pipe.counters(), times, onlooker.map(), onlooker.prediction(), pipe.pages(), lossy)

    def _clock(self) -> tuple[float, float]:
        """Seconds beside computing: by the clock, and in which this thread ran."""
        engine = self._engine
        return time.perf_counter() - engine.compute_seconds, time.thread_time() - engine.compute_thread_seconds

    def _count(self, before: tuple[float, float]) -> None:
        """One step has ended that began at `before`."""
        wall, own = (now - then for now, then in zip(self._clock(), before, strict=True))
        self._steps += 1
        self._waited_seconds += max(0.0, wall - own)
        self._overhead_seconds += own
        self._overhead_counts[bisect_left(OVERHEAD_SECONDS, own)] += 1
        self._wall_counts[bisect_left(OVERHEAD_SECONDS, wall)] += 1

    def _send(self, message: FromEngine) -> None:
        self._connection.send(message)


class _Teller:
    """Tells the server how far loading is, a few times a second."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last >= _PROGRESS_SECONDS:
            self._last = now
            self._connection.send(Loading(done, total))


def _ready(pipe: Pipeline) -> Ready:
    quality = Dial.EXACT.value if pipe.quality is None else Path(pipe.quality.chosen.name).name
    return Ready(
        folder=str(pipe.folder),
        max_context=pipe.config.max_context,
        max_batch=pipe.config.max_batch,
        vocab=pipe.spec.vocab,
        end_tokens=pipe.defaults.end_tokens,
        defaults=pipe.defaults.settings,
        settings=(*((choice.name, choice.value) for choice in pipe.config.choices), ("quality", quality)),
        memory=pipe.memory,
        experts_resident=pipe.budget.resident,
    )
