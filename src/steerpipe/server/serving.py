"""Runs the server from its start to its end: bind, load, answer, and end without dropping anybody in silence."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import ConfigError
from steerpipe.server.app import build_app
from steerpipe.server.engine_link import EngineLink
from steerpipe.server.messages import Failure
from steerpipe.server.service import Service
from steerpipe.server.settings import ServerSettings

log = logging.getLogger("steerpipe.server")
_TICK_SECONDS = 0.05
_LAST_WORDS_SECONDS = 2.0  # for the last bytes to reach the clients

Announce = Callable[[str, Service], None]


class LoadFailedError(Exception):
    """The model could not be loaded at the start."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.what)
        self.failure = failure


class _Server(uvicorn.Server):
    """uvicorn, whose signals only say that the end has come: how it ends is decided here."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal()


class Serving:
    """One server. `run` blocks until it is told to end, by SIGINT, SIGTERM or `stop`."""

    def __init__(self, model: str | None, config: EngineConfig, settings: ServerSettings, announce: Announce) -> None:
        """Binds its port at once. `announce` is told the address when the model is loaded. Raises ConfigError."""
        self._settings = settings
        self._listener = _bound(settings)
        self._announce = announce
        self._service = Service(settings, EngineLink(model, config))
        self._signals = 0
        logging.getLogger("uvicorn.error").addFilter(_is_no_refusal)
        self._server = _Server(
            uvicorn.Config(
                build_app(self._service),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="websockets-sansio",
                ws_max_size=settings.max_body_bytes,
                ws_per_message_deflate=False,  # small messages, and nothing to be learnt from their compressed size
                server_header=False,
                log_level="warning",  # its access log would hold queries; ours has none
                timeout_graceful_shutdown=int(_LAST_WORDS_SECONDS),
            ),
            self.stop,
        )

    def run(self) -> None:
        """Raises LoadFailedError."""
        asyncio.run(self._run())

    def stop(self) -> None:
        """The first call lets running requests finish, the second ends them, the third ends at once. Any thread."""
        self._signals += 1
        if self._signals > 2:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)

    async def _run(self) -> None:
        address = "http://{}:{}".format(*self._listener.getsockname()[:2])
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        preparing = asyncio.create_task(self._service.prepare())
        told = asyncio.create_task(self._until_told())
        try:
            await asyncio.wait((told, preparing), return_when=asyncio.FIRST_COMPLETED)
            if preparing.done():
                failure = preparing.result()
                if failure is not None:
                    raise LoadFailedError(failure)
                self._announce(address, self._service)
                await told
            await self._drain()
        finally:
            preparing.cancel()
            told.cancel()
            self._server.should_exit = True
            await serving
            await self._service.link.stop()

    async def _until_told(self) -> None:
        while not self._signals:
            await asyncio.sleep(_TICK_SECONDS)

    async def _drain(self) -> None:
        """New requests are refused with 503; running ones finish within the grace, or are told that they will not."""
        self._service.stopping = True
        self._service.gallery.close()
        link, loop = self._service.link, asyncio.get_running_loop()
        until = loop.time() + self._settings.grace_seconds
        while link.open_count and loop.time() < until and self._signals < 2:
            await asyncio.sleep(_TICK_SECONDS)
        if link.open_count:
            log.warning("%d sequences are ended by the shutdown", link.open_count)
        link.end_all()
        await asyncio.sleep(_TICK_SECONDS)  # the event loop writes their last words


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """uvicorn takes a WebSocket that was refused with a status for one that was forgotten, and says so."""
    return "without completing handshake" not in str(record.msg)


def _bound(settings: ServerSettings) -> socket.socket:
    """Bound before anything is loaded, so that a taken port is told at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as problem:
        listener.close()
        raise ConfigError(
            f"{settings.host}:{settings.port} cannot be listened on: {problem.strerror or problem}",
            fix="choose another --port, or end what uses it",
        ) from None
    return listener
