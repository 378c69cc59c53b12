"""The server's end of the engine process: starts it, speaks to it, and starts it again when it dies.

Everything here runs on the event loop.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from enum import Enum

from steerpipe.core.config import EngineConfig
from steerpipe.engine.request import Opening, Request
from steerpipe.server.answers import AnswerGroup
from steerpipe.server.engine_child import Child
from steerpipe.server.messages import (
    Begun,
    Cancel,
    CloseDraft,
    DraftName,
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
    Submit,
    SwitchPrediction,
    Ticket,
    Told,
    Warmed,
)

log = logging.getLogger("steerpipe.server")
_LONGEST_PAUSE_SECONDS = 30.0  # between two attempts to load a model that cannot be loaded
LOST = Failure(
    FailureKind.ENGINE,
    "the engine process ended while this request was running",
    "send the request again: the engine is being started anew",
)
STOPPED = Failure(FailureKind.CAPACITY, "the server is shutting down", "send the request to another server, or later")


class EngineState(Enum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"  # could not load; it is tried again
    STOPPED = "stopped"


class EngineLink:
    """One engine process at a time. Requests that come while it is started again wait for it."""

    def __init__(self, model: str | None, config: EngineConfig) -> None:
        self.state = EngineState.LOADING
        self.restarts = 0
        self.loaded_bytes: tuple[int, int] = (0, 0)  # done, of
        self.facts: Ready | None = None  # of the last engine that was ready
        self.failure: Failure | None = None  # of the last attempt to load
        self._model, self._config = model, config
        self._numbers = itertools.count()
        self._groups: dict[Ticket, AnswerGroup] = {}
        self._held: list[Submit] = []  # until the engine is ready
        self._observers: list[asyncio.Future[Observed | None]] = []  # of the question that is under way
        self._next_observers: list[asyncio.Future[Observed | None]] = []  # one more question serves all of them
        self._next_watching = False
        self._predicts = True  # unless somebody switched it off
        self._settled = asyncio.Event()  # the first attempt to load has ended
        self._failures = 0  # attempts to load in a row
        self.on_ready: Callable[[], None] = lambda: None  # after every start of an engine
        self.on_warmed: Callable[[Warmed], None] = lambda _: None
        self.on_begun: Callable[[Begun], None] = lambda _: None
        self._child: Child | None = None
        self._again: asyncio.TimerHandle | None = None

    @property
    def open_count(self) -> int:
        """Sequences that wait or run."""
        return len(self._groups)

    def open_of(self, scope: str | None) -> int:
        """Of them, those of one user."""
        return sum(group.scope == scope for group in self._groups.values())

    @property
    def process_id(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    def start(self) -> None:
        """Starts the process; returns at once. Call it on the event loop."""
        self._again = None
        if self.state is not EngineState.STOPPED:
            self.state = EngineState.LOADING
            self._child = Child(self._model, self._config, asyncio.get_running_loop(), self._heard, self._lost)

    async def first_load(self) -> Failure | None:
        """Waits until the model is loaded for the first time, or cannot be: then says why."""
        await self._settled.wait()
        return self.failure

    def submit(
        self, requests: Sequence[Request], draft: DraftName | None = None, opening: Opening | None = None
    ) -> AnswerGroup:
        """One sequence per request, all in one group. `draft` has become the only one of them; its `opening` is told
        at once.
        """
        tickets = [Ticket(next(self._numbers)) for _ in requests]
        group = AnswerGroup(tickets, self._cancel, requests[0].scope)
        for ticket, request in zip(tickets, requests, strict=True):
            self._groups[ticket] = group
            self._hand_over(Submit(ticket, request, draft, None if opening is None else opening.promise))
            for event in () if opening is None else opening.events:
                group.put(Told(ticket, event))
        if self.state is EngineState.STOPPED:
            self._fail_all(STOPPED)
        return group

    def tell(self, message: OpenDraft | EditDraft | CloseDraft) -> None:
        """To the engine if there is one; the next is told by whoever listens to `on_ready`."""
        if self.state is EngineState.READY and self._child is not None:
            self._child.send(message)

    def switch_prediction(self, on: bool) -> None:
        """Of this engine and of those that follow it."""
        self._predicts = on
        if self.state is EngineState.READY and self._child is not None:
            self._child.send(SwitchPrediction(on))

    async def observe(self, *, watching: bool = False) -> Observed | None:
        """What the engine counts, as of its next step; None while there is no engine. `watching`: see Observe."""
        if self.state is not EngineState.READY or self._child is None:
            return None
        future: asyncio.Future[Observed | None] = asyncio.get_running_loop().create_future()
        self._next_observers.append(future)
        self._next_watching |= watching
        if not self._observers:
            self._ask()
        return await future

    @property
    def unsent(self) -> int:
        """Messages that wait to be sent to the engine."""
        return 0 if self._child is None else len(self._child.outbox)

    def unread(self, name: DraftName) -> int:
        """How much of what was typed in a draft waits to be sent to the engine, in characters."""
        return 0 if self._child is None else self._child.outbox.typed(name)

    def end_all(self) -> None:
        """Every sequence that waits or runs ends now, and is told why."""
        for ticket in list(self._groups):
            if self._child is not None:
                self._child.send(Cancel(ticket))
        self._fail_all(STOPPED)

    async def stop(self) -> None:
        """Ends the process, gently at first."""
        was_ready = self.state is EngineState.READY
        self.state = EngineState.STOPPED
        if self._again is not None:
            self._again.cancel()
        self._fail_all(STOPPED)
        if self._child is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._child.stop, was_ready)
            self._child = None

    def _hand_over(self, message: Submit) -> None:
        if self.state is EngineState.READY and self._child is not None:
            self._child.send(message)
        else:
            self._held.append(message)

    def _cancel(self, ticket: Ticket) -> None:
        self._groups.pop(ticket, None)
        self._held = [held for held in self._held if held.ticket != ticket]
        if self._child is not None:
            self._child.send(Cancel(ticket))

    def _heard(self, child: Child, message: FromEngine) -> None:
        if child is not self._child:
            return  # the last words of a process that was given up
        if isinstance(message, Stepped):
            self._deliver(message)
        elif isinstance(message, Observed):
            self._answer_observers(message)
        elif isinstance(message, Warmed):
            self.on_warmed(message)
        elif isinstance(message, Begun):
            self.on_begun(message)
        elif isinstance(message, Loading):
            self.loaded_bytes = (message.done_bytes, message.total_bytes)
        elif isinstance(message, LoadFailed):
            self.failure = message.failure
        else:
            self._became_ready(child, message)

    def _deliver(self, message: Stepped) -> None:
        for word in message.told:
            group = self._groups.get(word.ticket)
            if group is not None:
                group.put(word)
            if isinstance(word, Ended | Failed):
                self._groups.pop(word.ticket, None)

    def _became_ready(self, child: Child, message: Ready) -> None:
        self.facts, self.failure, self._failures = message, None, 0
        self._model = message.folder  # a hub name is not looked up again
        self.state = EngineState.READY
        if not self._predicts:
            child.send(SwitchPrediction(False))
        self.on_ready()
        for held in self._held:
            child.send(held)
        self._held.clear()
        self._settled.set()

    def _lost(self, child: Child) -> None:
        """The process is gone: everybody who waits is told, and the next process is started."""
        if child is not self._child or self.state is EngineState.STOPPED:
            return
        was_ready = self.state is EngineState.READY
        child.forget()
        self.restarts += was_ready
        self._failures += not was_ready
        if not was_ready and self.failure is None:
            self.failure = Failure(FailureKind.ENGINE, "the engine process ended while it loaded", "see its output")
        self._fail_all(LOST if was_ready else self.failure or LOST)
        self.state = EngineState.LOADING if was_ready else EngineState.FAILED
        self._settled.set()
        if self.facts is None:
            return  # it has never been ready: whoever waits for the first load decides
        log.warning("the engine process ended (exit status %s); it is started again", child.process.exitcode)
        pause = min(_LONGEST_PAUSE_SECONDS, 2.0**self._failures) if self._failures else 0.0
        self._again = asyncio.get_running_loop().call_later(pause, self.start)

    def _fail_all(self, failure: Failure) -> None:
        groups = {id(group): group for group in self._groups.values()}
        self._groups.clear()
        self._held.clear()
        for group in groups.values():
            group.fail(failure)
        self._observers += self._next_observers
        self._next_observers = []
        self._answer_observers(None)

    def _ask(self) -> None:
        """Asks the engine once for all who wait to know."""
        assert self._child is not None, "nobody asks an engine that is not there"
        self._observers, self._next_observers = self._next_observers, []
        watching, self._next_watching = self._next_watching, False
        self._child.send(Observe(watching))

    def _answer_observers(self, observed: Observed | None) -> None:
        asked, self._observers = self._observers, []
        for future in asked:
            if not future.done():  # whoever asked may have left
                future.set_result(observed)
        if self._next_observers:
            self._ask()
