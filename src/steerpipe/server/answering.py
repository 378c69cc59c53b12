"""One HTTP request from the engine's first word to its last: gathered into one answer, or sent on as it comes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from steerpipe.core.events import PromptEvent, TokenEvent
from steerpipe.server.answers import AnswerGroup, Word
from steerpipe.server.asking import Asked
from steerpipe.server.events import DONE, ClientLeftError, EventStream, event, unless_left
from steerpipe.server.faults import ApiError, json_response
from steerpipe.server.messages import Ended, Failed, Told
from steerpipe.server.metrics import Metrics, TokenClock
from steerpipe.server.outcomes import Outcome, figures_json

_CLIENT_LEFT = 499  # nginx's number; nobody reads it but the log


class Writer(Protocol):
    """Puts outcomes into the words of one endpoint."""

    def whole(self, outcomes: Sequence[Outcome]) -> dict[str, Any]: ...

    def opening(self) -> Iterator[dict[str, Any]]: ...

    def prompt(self, place: int, outcome: Outcome) -> Iterator[dict[str, Any]]: ...

    def token(self, place: int, event: TokenEvent) -> Iterator[dict[str, Any]]: ...

    def end(self, place: int, outcome: Outcome) -> dict[str, Any]: ...

    def closing(self, outcomes: Sequence[Outcome]) -> dict[str, Any]: ...


class Answering:
    """Follows one group of sequences. Whatever happens to the client, nothing of it is left in the engine."""

    def __init__(self, asked: Asked, group: AnswerGroup, metrics: Metrics, timeout_seconds: float) -> None:
        self.outcomes = [Outcome() for _ in asked.requests]
        self._asked = asked
        self._group = group
        self._metrics = metrics
        self._clock = TokenClock(metrics)
        self._timeout_seconds = timeout_seconds
        self._words = self._counted(asyncio.get_running_loop().time() + timeout_seconds)

    async def gather(self, http: Request) -> list[Outcome]:
        """All choices, complete. Raises ApiError, or ClientLeftError."""
        try:
            await unless_left(http, self._run_through())
        finally:
            self.close()
        return self.outcomes

    async def respond(self, http: Request, writer: Writer) -> Response:
        """The answer as one object, or as a stream of chunks."""
        try:
            if not self._asked.stream:
                return json_response(writer.whole(await self.gather(http)))
            first = await unless_left(http, anext(self._words))  # what fails at once still gets a status of its own
        except ClientLeftError:
            self.close()
            return Response(status_code=_CLIENT_LEFT)
        except BaseException:
            self.close()
            raise
        return EventStream(self._chunks(first, writer), self.close)

    async def _run_through(self) -> None:
        async for _ in self._words:
            pass

    async def objects(self, writer: Writer) -> AsyncGenerator[dict[str, Any], None]:
        """Chunks as they come, for whoever has another way to send them than HTTP. Raises ApiError."""
        try:
            for chunk in writer.opening():
                yield self._chunk(chunk)
            async for place, word in self._words:
                for chunk in self._said(place, word, writer):
                    yield self._chunk(chunk)
            if self._asked.include_usage:
                yield writer.closing(self.outcomes)
        finally:
            self.close()

    async def _chunks(self, first: tuple[int, Word], writer: Writer) -> AsyncGenerator[bytes, None]:
        self._words = _after(first, self._words)
        try:
            async for chunk in self.objects(writer):
                yield event(chunk)
            yield DONE
        except ApiError as error:  # the status is gone out already: the error is the last event
            yield event(error.body())

    def _said(self, place: int, word: Word, writer: Writer) -> Iterator[dict[str, Any]]:
        if isinstance(word, Ended):
            last = all(outcome.ended is not None for outcome in self.outcomes)
            yield writer.end(place, self.outcomes[place]) | (figures_json(self.outcomes) if last else {})
        elif isinstance(word, Told):
            if isinstance(word.event, PromptEvent):
                yield from writer.prompt(place, self.outcomes[place])
            else:
                yield from writer.token(place, word.event)

    def _chunk(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return chunk | {"usage": None} if self._asked.include_usage else chunk

    async def _counted(self, deadline: float) -> AsyncIterator[tuple[int, Word]]:
        """The engine's words, each put where it belongs. Raises ApiError."""
        try:
            async for place, word in self._group.words(deadline):
                self._count(place, word)
                self.outcomes[place].add(word)
                yield place, word
        except TimeoutError:
            taken = f"the request took longer than {self._timeout_seconds:g} s"
            raise ApiError(504, f"{taken}; ask for less, or raise --timeout", code="timeout") from None

    def _count(self, place: int, word: Word) -> None:
        if isinstance(word, Ended):
            self._metrics.ended(word, first=place % self._asked.choices == 0)
        elif isinstance(word, Failed):
            self._metrics.finished["error"] += 1
        elif isinstance(word.event, TokenEvent):
            self._clock.token(place)

    def close(self) -> None:
        """Cancels what still runs. Twice is once."""
        if self._group.open_count:
            self._metrics.finished["cancelled"] += self._group.open_count
        self._group.close()
        self._clock.end()


async def _after(first: tuple[int, Word], rest: AsyncIterator[tuple[int, Word]]) -> AsyncIterator[tuple[int, Word]]:
    yield first
    async for each in rest:
        yield each
