"""What stands before every route: who asks, and from where. Pure ASGI, so that streams pass as they are.

- Host: localhost, an address, or a name that was allowed. A web page that binds its own name to 127.0.0.1 is refused.
- Origin: pages of other origins are refused unless named. Programs send none.
- Key: `Authorization: Bearer …` where keys are set. Each key is a scope of its own.
"""

import hmac
import ipaddress
import logging
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from steerpipe.server.faults import ApiError
from steerpipe.server.frontpage import PATHS as PAGE_PATHS
from steerpipe.server.service import Service
from steerpipe.server.settings import ServerSettings

log = logging.getLogger("steerpipe.server")
_OPEN = PAGE_PATHS | {"/health"}  # says nothing but whether the server is ready
_UNLOGGED = frozenset({"/health", "/metrics"})  # asked every few seconds
_EVERYBODY = "everybody"


class Guard:
    """Refuses what must not pass; counts and logs the rest: method, path, status, time. Never a body or a query."""

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._socket(WebSocket(scope, receive, send))
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._service.metrics.http[str(status)] += 1
            await send(message)

        try:
            scope.setdefault("state", {})["user"] = self._admit(scope["path"], Headers(scope=scope))
            await self._app(scope, receive, counted)
        except ApiError as error:
            await error.response()(scope, receive, counted)
        except Exception as problem:  # noqa: BLE001  a mistake of ours
            _log_mistake(problem)
            if not status:
                await ApiError(500, "the server made a mistake; its log says where").response()(scope, receive, counted)
        finally:
            taken_ms = (time.perf_counter() - began) * 1e3
            if scope["path"] not in _UNLOGGED:
                log.info("%s %s %s %.0f ms", scope["method"], _shown(scope["path"]), status or "left", taken_ms)

    async def _socket(self, socket: WebSocket) -> None:
        """Refused with a status and a message, before it is a WebSocket."""
        began = time.perf_counter()
        try:
            headers = socket.headers
            keyless = "authorization" not in headers  # a browser cannot send it: then the first message has the key
            socket.state.user = self._admit(socket.url.path, headers, keyless=keyless)
        except ApiError as error:
            self._service.metrics.http[str(error.status)] += 1
            await socket.send_denial_response(error.response())
            return
        try:
            await self._app(socket.scope, socket.receive, socket.send)
        except Exception as problem:  # noqa: BLE001  a mistake of ours
            _log_mistake(problem)
            with suppress(RuntimeError, OSError):  # it is gone already
                await socket.close(1011, "the server made a mistake; its log says where")
        finally:
            log.info("WebSocket %s %.0f ms", _shown(socket.url.path), (time.perf_counter() - began) * 1e3)

    def _admit(self, path: str, headers: Mapping[str, str], *, keyless: bool = False) -> str:
        """The scope of whoever asks; empty if they are to show their key later (`keyless`)."""
        settings, host = self._service.settings, headers.get("host", "")
        if not is_allowed_host(host, settings.allowed_hosts):
            raise ApiError(
                403, "this server is not reached under that Host; name it with --allowed-host", code="host_not_allowed"
            )
        origin = headers.get("origin")
        if origin is not None and not is_allowed_origin(origin, host, settings.cors_origins):
            raise ApiError(
                403, "pages of that origin may not ask; name it with --cors-origin", code="origin_not_allowed"
            )
        if path in _OPEN or not settings.api_keys:
            return _EVERYBODY
        if keyless:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return user_of(key.strip() if scheme.lower() == "bearer" else "", settings)


def user_of(key: str, settings: ServerSettings) -> str:
    """The scope of whoever has this key. Raises ApiError."""
    if not settings.api_keys:
        return _EVERYBODY
    given = key.encode("utf-8", "backslashreplace")
    matches = [hmac.compare_digest(given, each.encode()) for each in settings.api_keys]  # all: the time tells nothing
    if True not in matches:
        raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
    return f"key {matches.index(True)}"


def _log_mistake(problem: Exception) -> None:
    """Its kind and place. Its message may quote a prompt: it is not logged."""
    frames = traceback.extract_tb(problem.__traceback__)[-3:]
    places = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames))
    log.error("%s in %s", type(problem).__name__, places)


def _shown(path: str) -> str:
    """Without line breaks of a client's in the log."""
    return path[:80].encode("unicode_escape").decode()


def is_allowed_host(header: str, allowed: tuple[str, ...]) -> bool:
    """`header` may end with a port."""
    name = urlsplit(f"//{header}").hostname if _splits(f"//{header}") else None
    if name is None:
        return False
    return name == "localhost" or name in {each.lower() for each in allowed} or _is_address(name)


def is_allowed_origin(origin: str, host: str, allowed: tuple[str, ...]) -> bool:
    """The server's own origin, or one that was named."""
    if origin in allowed:
        return True
    return _splits(origin) and bool(host) and urlsplit(origin).netloc.lower() == host.lower()


def _splits(url: str) -> bool:
    try:
        urlsplit(url)
    except ValueError:
        return False
    return True


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
