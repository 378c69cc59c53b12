"""The answers to one HTTP request on their way from the engine to the client."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from steerpipe.server.messages import Ended, Failed, Failure, Ticket, Told

Word = Told | Ended | Failed


class AnswerGroup:
    """One sequence per choice, and one queue for what the engine says of all of them. Lives on the event loop.

    Iterating ends when every sequence has ended. `close` cancels what still runs; twice is once.
    """

    def __init__(self, tickets: Sequence[Ticket], cancel: Callable[[Ticket], None], scope: str | None = None) -> None:
        self.scope = scope  # who asked
        self.places = {ticket: place for place, ticket in enumerate(tickets)}  # ticket → index of the choice
        self._open = set(tickets)
        self._cancel = cancel
        self._words: asyncio.Queue[Word] = asyncio.Queue()

    def put(self, word: Word) -> None:
        """The engine said something."""
        if word.ticket in self._open:
            if not isinstance(word, Told):
                self._open.discard(word.ticket)
            self._words.put_nowait(word)

    def fail(self, failure: Failure) -> None:
        """Ends everything that is still open with one failure."""
        for ticket in sorted(self._open):
            self.put(Failed(ticket, failure))

    @property
    def open_count(self) -> int:
        """Sequences that have not ended."""
        return len(self._open)

    async def words(self, deadline: float) -> AsyncIterator[tuple[int, Word]]:
        """(index of the choice, what was said of it). Raises TimeoutError at `deadline`, in the loop's time."""
        left = len(self.places)
        while left:
            async with asyncio.timeout_at(deadline):
                word = await self._words.get()
            left -= not isinstance(word, Told)
            yield self.places[word.ticket], word

    def close(self) -> None:
        for ticket in sorted(self._open):
            self._cancel(ticket)
        self._open.clear()
