"""Answers that come token by token, several at once from one engine."""

from collections import deque
from collections.abc import Iterator

from steerpipe.core.errors import SteerpipeError
from steerpipe.core.events import Completion, SequenceFailed, TokenEvent
from steerpipe.core.ids import SequenceId
from steerpipe.engine.engine import Engine, Event
from steerpipe.engine.request import Request


class AnswerDesk:
    """Steps the engine for whoever waits, and keeps every event for the answer it belongs to. One thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: dict[SequenceId, deque[Event]] = {}

    def submit(self, request: Request) -> "Answer":
        """Raises RequestError if the request could never run."""
        sequence_id = self.engine.submit(request)
        self._waiting[sequence_id] = deque()
        return Answer(self, sequence_id)

    def next_event(self, sequence_id: SequenceId) -> Event | None:
        """The next event of one sequence; steps the engine until there is one. None when it has ended."""
        while not self._waiting[sequence_id]:
            if not self.engine.runs(sequence_id):
                return None
            for event in self.engine.step():
                if event.sequence in self._waiting:
                    self._waiting[event.sequence].append(event)
        return self._waiting[sequence_id].popleft()

    def close_all(self) -> None:
        """Ends every answer that still runs."""
        for sequence_id in list(self._waiting):
            self.close(sequence_id)
        self.engine.check_integrity()

    def close(self, sequence_id: SequenceId) -> None:
        """Ends a sequence, if it still runs, and forgets its events."""
        self.engine.cancel(sequence_id)
        self._waiting.pop(sequence_id, None)


class Answer:
    """One request's answer. Iterating gives its TokenEvents; leaving the loop early cancels what is left of it."""

    def __init__(self, desk: AnswerDesk, sequence_id: SequenceId) -> None:
        self._desk = desk
        self._id = sequence_id
        self._outcome: Completion | SteerpipeError | None = None

    def __iter__(self) -> Iterator[TokenEvent]:
        try:
            while self._outcome is None and (event := self._desk.next_event(self._id)) is not None:
                if isinstance(event, SequenceFailed):
                    self._outcome = event.error
                    raise event.error
                yield event
        finally:
            self.cancel()

    @property
    def completion(self) -> Completion:
        """The whole answer; runs it to its end first if nobody has iterated. Raises what it failed with."""
        for _ in self:
            pass
        assert self._outcome is not None, "an answer that ended has an outcome"
        if isinstance(self._outcome, SteerpipeError):
            raise self._outcome
        return self._outcome

    def cancel(self) -> None:
        """Ends the answer where it stands. Nothing happens to one that has ended."""
        self._desk.close(self._id)
        if self._outcome is None:
            self._outcome = self._desk.engine.take_completion(self._id)
