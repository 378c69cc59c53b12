"""Server-sent events, and noticing that a client has left."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from steerpipe.server.faults import to_json

DONE = b"data: [DONE]\n\n"
Value = TypeVar("Value")


def event(content: object) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"


class ClientLeftError(Exception):
    """Nobody reads the answer any more."""


async def unless_left(request: Request, work: Awaitable[Value]) -> Value:
    """The result of `work`, or ClientLeftError: then the work is cancelled. The body must have been read."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return await task
    finally:
        await _cancelled(task, leaving)


class EventStream(Response):
    """Sends chunks as they come; stops, and closes their source, when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        """`close` is called at the end, whatever it was: a generator that never began ends without its `finally`."""
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                with suppress(OSError):  # the connection broke in the middle of a write
                    await sending
        finally:
            await _cancelled(sending, leaving)
            await self._chunks.aclose()
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels what still runs and waits until it has cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
