"""Answers that come token by token, several at once from one engine."""

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import torch

from steerpipe.core.errors import SteerpipeError
from steerpipe.core.events import Completion, SequenceFailed, TokenEvent
from steerpipe.core.ids import SequenceId
from steerpipe.engine.engine import Engine, Event
from steerpipe.engine.request import Request
from steerpipe.runtime.cover import CoverDesk
from steerpipe.runtime.quality_accounts import Accounts


class AnswerDesk:
    """Steps the engine for whoever waits, and keeps every event for the answer it belongs to. One thread.

    `threads` is torch's, which belong to the process: they are set before a step where another engine changed them.
    """

    def __init__(
        self, engine: Engine, threads: int, accounts: Accounts | None = None, cover: CoverDesk | None = None
    ) -> None:
        """`accounts` of what lossy answers to a miss have substituted; None: the engine is exact. `cover`: of first
        tokens that do not wait."""
        self.engine = engine
        self._threads = threads
        self._accounts = accounts
        self._cover = cover
        self._waiting: dict[SequenceId, deque[Event]] = {}
        self._answers: weakref.WeakValueDictionary[SequenceId, Answer] = weakref.WeakValueDictionary()

    def submit(self, request: Request) -> "Answer":
        """Raises RequestError if the request could never run."""
        sequence_id = self.engine.submit(request)
        if self._cover is not None:
            self._cover.cover(sequence_id)
        self._waiting[sequence_id] = deque()
        answer = self._answers[sequence_id] = Answer(self, sequence_id)
        weakref.finalize(answer, self.forget, sequence_id).atexit = False  # an answer that nobody holds is not computed
        return answer

    def next_event(self, sequence_id: SequenceId) -> Event | None:
        """The next event of one sequence; steps the engine until there is one. None when it has ended."""
        while not self._waiting[sequence_id]:
            if not self.engine.runs(sequence_id):
                return None
            if torch.get_num_threads() != self._threads:
                torch.set_num_threads(self._threads)
            for event in self.engine.step():
                if event.sequence in self._waiting:
                    self._waiting[event.sequence].append(event)
        return self._waiting[sequence_id].popleft()

    def close_all(self) -> None:
        """Ends every answer that still runs; each keeps what it had."""
        for answer in list(self._answers.values()):
            answer.cancel()
        self.engine.check_integrity()

    def take_outcome(self, sequence_id: SequenceId) -> Completion:
        """Ends a sequence, if it still runs; what it came to, once."""
        self.engine.cancel(sequence_id)
        self._waiting.pop(sequence_id, None)
        completion = self.engine.take_completion(sequence_id)
        if self._cover is not None:
            return replace(completion, covered=self._cover.take(sequence_id))
        if self._accounts is None:
            return completion
        return replace(completion, substituted=self._accounts.take(sequence_id))

    def forget(self, sequence_id: SequenceId) -> None:
        """Ends a sequence whose answer is not wanted any more and leaves nothing of it behind."""
        self.engine.discard(sequence_id)
        self._waiting.pop(sequence_id, None)
        if self._cover is not None:
            self._cover.take(sequence_id)


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
                if isinstance(event, TokenEvent):  # what there is to say of the prompt is in the completion
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
        if self._outcome is None:
            self._outcome = self._desk.take_outcome(self._id)
