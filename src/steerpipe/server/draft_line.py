"""One WebSocket at `/v1/drafts`: a person types, sees what is ready, presses Enter, and reads the answer.

The text is mirrored here, so that an edit that does not fit is refused at once and a new engine can be told
everything. It is kept in memory until the draft ends, and never logged.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from steerpipe.core.errors import RequestError
from steerpipe.engine.request import Opening, Request
from steerpipe.engine.tokenizer import ChatMessage
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import DraftEdit, insert, replace
from steerpipe.runtime.drafts import Warmth
from steerpipe.server.chat import ChatWriter
from steerpipe.server.draft_schema import Edits, Opened, Said, Submitted, parse_said
from steerpipe.server.faults import ApiError, api_error, to_json
from steerpipe.server.guard import user_of
from steerpipe.server.messages import DraftName, OpenDraft
from steerpipe.server.schema import ChatRequest
from steerpipe.server.service import Service

EXPIRE_SECONDS = 300.0  # without a key a draft is given up
KEY_SECONDS = 30.0  # for the first message, where it has to show a key
MOST_FAULTS = 100  # messages that make no sense; then the line is closed
MOST_UNREAD = 4096  # messages that wait for a client to read them; then too
MOST_UNSENT = 1 << 16  # characters that wait for the engine to read them
_PACE_SECONDS = 0.01  # between two looks at that
_CLOSE_SECONDS = 1.0  # for a line that is closed


class DraftLine:
    """A Typist. Everything but the socket's own reads and writes happens on the event loop at once."""

    def __init__(self, socket: WebSocket, service: Service) -> None:
        self.scope: str = socket.state.user or ""  # empty until a key was given
        self._socket = socket
        self._service = service
        self._outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MOST_UNREAD)
        self._patience = asyncio.timeout(None)  # ends when the client has not read for too long
        self._faults = 0
        self._name: DraftName | None = None
        self._body: ChatRequest | None = None
        self._request: Request | None = None  # settings and class that the answer will have
        self._typed = Draft()
        self._warmth: Warmth | None = None
        self._begins: Opening | None = None  # the answer, to what stood there a moment ago
        self._news = False  # a word about it waits to be sent
        self._answer: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until the client leaves, makes no sense, or does not read."""
        await self._socket.accept()
        writing = asyncio.create_task(self._write())
        try:
            async with self._patience:
                await self._listen()
            await self._end("too many messages that make no sense")
        except WebSocketDisconnect:
            return
        except TimeoutError:
            await self._end("what is said on the line is not read")
        finally:
            self._close()
            await _cancelled(self._answer, writing)

    async def _listen(self) -> None:
        while self._faults < MOST_FAULTS:
            try:
                await self._obey(await self._next())
            except ApiError as error:
                self._faults += 1
                self._say("error", error.body())

    # --- as a Typist

    def opening(self, name: DraftName) -> OpenDraft:
        assert self._body is not None and self._request is not None, "a draft is opened with both"
        turns = tuple(ChatMessage(message.role, message.text) for message in self._body.messages[:-1])
        return OpenDraft(name, self.scope, turns, self._request.settings, self._request.batched)

    def whole(self) -> DraftEdit | None:
        return insert(0, self._typed.text, time.monotonic()) if len(self._typed) else None

    def warmed(self, warmth: Warmth) -> None:
        self._warmth = warmth
        if not self._news:  # else the one that waits to be sent will say this
            self._news = True
            self._say("warmth", {})

    def begun(self, opening: Opening) -> None:
        self._begins = opening

    def superseded(self) -> None:
        self._name = self._begins = None
        self._say("superseded", {})

    # --- what the client says

    async def _next(self) -> Said:
        """The next message. Gives the draft up when none comes for too long."""
        while True:
            limit = EXPIRE_SECONDS if self._name is not None else None
            try:
                async with asyncio.timeout(limit if self.scope else KEY_SECONDS):
                    received = await self._socket.receive()
            except TimeoutError:
                if not self.scope:
                    await self._end("no key was shown")
                    raise WebSocketDisconnect(1008) from None
                self._close()
                self._say("expired", {})
                continue
            if received["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(received.get("code", 1000))
            if received.get("text") is None:
                raise ApiError(400, "a message is text, not bytes")
            return parse_said(received["text"])

    async def _obey(self, said: Said) -> None:
        if isinstance(said, Opened):
            await self._open(said)
        elif isinstance(said, Edits):
            self._edit(said.stamped())
            await self._keep_pace()
        elif isinstance(said, Submitted):
            await self._submit(said.text)
        elif said.type == "close":
            self._close()
        elif self._answer is not None:
            self._answer.cancel()

    async def _open(self, said: Opened) -> None:
        """A draft; one that was open on this line is superseded by it."""
        if not self.scope or said.key is not None:
            self.scope = user_of(said.key or "", self._service.settings)
        self._service.check_model(said.body.model)
        asked = await self._service.tokenized(self._service.asker.chat, _streamed(said.body), self.scope)
        self._close()
        self._body, self._request = _streamed(said.body), asked.requests[0]
        self._typed, self._warmth, self._begins = Draft(), None, None
        self._name = self._service.drafts.open(self)
        self._say("opened", {"draft": self._name})

    def _edit(self, edits: tuple[DraftEdit, ...]) -> None:
        name, limit = self._opened(), self._service.settings.max_body_bytes
        done = []
        try:
            for edit in edits:
                if len(self._typed) + len(edit.text) > limit:
                    raise ApiError(400, f"a draft has at most {limit} characters", param="edits")
                self._typed.apply(edit)
                done.append(edit)
        except RequestError as error:
            raise api_error(error, param="edits") from None
        finally:
            self._service.drafts.edit(name, tuple(done))

    async def _keep_pace(self) -> None:
        """Who types faster than the engine reads is not listened to meanwhile."""
        service = self._service
        while self._name is not None and not service.stopping and service.link.unread(self._name) > MOST_UNSENT:
            await asyncio.sleep(_PACE_SECONDS)

    async def _submit(self, text: str | None) -> None:
        self._opened()
        if self._answer is not None and not self._answer.done():
            raise ApiError(409, "an answer is under way on this line; stop it, or wait for its end")
        if text is not None and text != self._typed.text:
            self._edit((_rewritten(len(self._typed), text),))
        assert self._body is not None, "a draft is opened with it"
        turns = [*self._body.messages[:-1], self._body.messages[-1].model_copy(update={"content": self._typed.text})]
        body = self._body.model_copy(update={"messages": turns})
        service = self._service
        asked = await service.tokenized(service.asker.chat, body, self.scope)
        hidden = service.asker.facts.end_tokens | frozenset(asked.requests[0].settings.stop_token_ids)
        writer = ChatWriter(asked, service.texts, hidden, service.head("chatcmpl"))
        name = self._opened()  # it may have been superseded while the text was tokenised
        known = self._begins
        begins = known if known is not None and known.request == asked.requests[0] else None
        answering = service.answering(asked, name, begins)
        service.drafts.submitted(name)
        self._name = self._begins = None
        self._say("submitted", {} if self._warmth is None else warmth_json(self._warmth))

        async def answer() -> None:
            try:
                async for chunk in answering.objects(writer):
                    self._say("chunk", {"chunk": chunk})
                self._say("done", {})
            except ApiError as error:
                self._say("error", error.body())

        def ended(task: asyncio.Task[None]) -> None:
            answering.close()  # also of a task that was stopped before it began
            if task.cancelled():
                self._say("stopped", {})

        self._answer = asyncio.create_task(answer())
        self._answer.add_done_callback(ended)

    def _opened(self) -> DraftName:
        if self._name is None:
            raise ApiError(400, "no draft is open on this line; send open first", param="type", code="no_draft")
        return self._name

    def _close(self) -> None:
        if self._name is not None:
            self._service.drafts.close(self._name)
            self._name = self._begins = None

    async def _end(self, why: str) -> None:
        """The line is closed, after what was said on it so far."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._outgoing.join()
        with suppress(RuntimeError, OSError):  # it is gone already, or does not read; OSError has TimeoutError in it
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._socket.close(1008, why)

    # --- what it hears

    def _say(self, kind: str, content: dict[str, Any]) -> None:
        try:
            self._outgoing.put_nowait({"type": kind} | content)
        except asyncio.QueueFull:
            with suppress(RuntimeError):  # it ends already
                self._patience.reschedule(0.0)

    async def _write(self) -> None:
        while True:
            message = await self._outgoing.get()
            if message["type"] == "warmth":
                self._news = False
                message |= {} if self._warmth is None else warmth_json(self._warmth)
            with suppress(RuntimeError, WebSocketDisconnect, OSError):  # the reader hears that it is gone
                await self._socket.send_text(to_json(message).decode())
            self._outgoing.task_done()


def warmth_json(warmth: Warmth) -> dict[str, Any]:
    found = asdict(warmth)
    return found | {"saved_ms": round(found.pop("saved_seconds") * 1e3, 3)}


def _rewritten(length: int, text: str) -> DraftEdit:
    """All of a text becomes another. Raises ApiError."""
    try:
        return replace(0, length, text, time.monotonic())
    except RequestError as error:
        raise api_error(error, param="text") from None


def _streamed(body: ChatRequest) -> ChatRequest:
    return body.model_copy(update={"stream": True})


async def _cancelled(*tasks: asyncio.Task[None] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
