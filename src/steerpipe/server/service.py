"""What the routes share: the engine, the tokenizer, the counters, and the limits that are kept for all of them."""

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request

from steerpipe.engine.request import Opening
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.server.answering import Answering
from steerpipe.server.asking import Asked, Asker
from steerpipe.server.draft_room import DraftRoom
from steerpipe.server.engine_link import EngineLink, EngineState
from steerpipe.server.faults import ApiError, api_error, parse_json
from steerpipe.server.live import Gallery
from steerpipe.server.messages import DraftName, Failure
from steerpipe.server.metrics import Metrics
from steerpipe.server.pieces import TokenTexts
from steerpipe.server.settings import ServerSettings

_BODY_SECONDS = 30.0  # for a client to send its body
_LONGEST_RETRY_SECONDS = 60
Result = TypeVar("Result")


class Service:
    """Lives on the event loop; one per server."""

    def __init__(self, settings: ServerSettings, link: EngineLink) -> None:
        self.settings = settings
        self.link = link
        self.metrics = Metrics()
        self.gallery = Gallery(link, lambda: len(self.settings.api_keys) > 1)
        self.drafts = DraftRoom(link)
        self.started = int(time.time())
        self.stopping = False
        self.name = settings.model_name or ""
        self._asker: Asker | None = None
        # one thread: a fast tokenizer that two threads use at once may refuse with "Already borrowed"
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    async def prepare(self) -> Failure | None:
        """Loads the model. Says why, if it cannot be loaded."""
        self.link.start()
        failure = await self.link.first_load()
        facts = self.link.facts
        if facts is None:
            return failure
        codec = await self._in_thread(TextCodec.load, Path(facts.folder))
        self.name = self.name or Path(facts.folder).name
        self._asker = Asker(codec, facts)
        return None

    @property
    def asker(self) -> Asker:
        """Raises ApiError while the model is not there."""
        if self.stopping:
            raise ApiError(503, "the server is shutting down", retry_after_seconds=5)
        if self.link.state is EngineState.FAILED and self.link.failure is not None:
            raise api_error(Failure(self.link.failure.kind.CAPACITY, self.link.failure.what, self.link.failure.fix))
        if self._asker is None:
            raise ApiError(503, "the model is being loaded; try again soon", code="loading", retry_after_seconds=2)
        return self._asker

    @property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.asker.codec)

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.name:
            message = f"the model {model[:80]!r} is not here; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def tokenized(self, function: "Callable[..., Result]", *arguments: Any) -> Result:
        """Runs what may take as long as a text is, off the event loop."""
        return await self._in_thread(function, *arguments)

    def answering(self, asked: Asked, draft: DraftName | None = None, opening: Opening | None = None) -> Answering:
        """Hands a request to the engine, or what a draft has become, with how its answer begins where that is known.
        Raises ApiError where the queue is full.
        """
        wanted, room = len(asked.requests), self.asker.facts.max_batch + self.settings.max_queue
        if wanted > room:
            raise ApiError(400, f"the request has {wanted} choices; at most {room} may wait at once", param="n")
        own = self.link.open_of(asked.requests[0].scope)
        share = room if len(self.settings.api_keys) < 2 else -(-room // 2)  # one user leaves room for another
        if self.link.open_count + wanted > room or (own and own + wanted > share):
            raise ApiError(
                429,
                f"{self.link.open_count} sequences run or wait already, {own} of them yours; try again later",
                code="queue_full",
                retry_after_seconds=self._retry_after_seconds(),
            )
        group = self.link.submit(asked.requests, draft, opening)
        return Answering(asked, group, self.metrics, self.settings.timeout_seconds)

    def head(self, prefix: str) -> dict[str, Any]:
        """What every object of one answer begins with."""
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}

    async def read_json(self, http: Request) -> Any:
        """The body, within the limits. Raises ApiError."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the body must be JSON: Content-Type: application/json")
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                body = await self._read(http)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {_BODY_SECONDS:g} s") from None
        return parse_json(body, "the body")

    async def _read(self, http: Request) -> bytes:
        limit, parts, size = self.settings.max_body_bytes, [], 0
        declared = http.headers.get("content-length", "0")
        async for part in http.stream():
            size += len(part)
            if size > limit or (declared.isdigit() and int(declared) > limit):
                raise ApiError(413, f"the body is larger than {limit} bytes; shorten it")
            parts.append(part)
        return b"".join(parts)

    def _retry_after_seconds(self) -> int:
        """How long the queue lasts if requests take as long as they did so far."""
        served = sum(self.metrics.whole_request.counts)
        each = self.metrics.whole_request.total / served if served else 1.0
        rounds = self.link.open_count / self.asker.facts.max_batch
        return max(1, min(_LONGEST_RETRY_SECONDS, round(each * rounds / 2)))

    async def _in_thread(self, function: "Callable[..., Result]", *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, lambda: function(*arguments))
