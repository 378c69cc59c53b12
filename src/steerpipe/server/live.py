"""What a page that is looked at shows: frames of the engine's state, at most ten a second, made once for everybody."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from steerpipe.runtime.prediction import score_json
from steerpipe.runtime.view import USED, count_places
from steerpipe.server.engine_link import EngineLink
from steerpipe.server.events import event
from steerpipe.server.faults import ApiError
from steerpipe.server.messages import Observed
from steerpipe.server.outcomes import experts_json

FRAME_SECONDS = 0.1
MOST_VIEWERS = 64
_QUIET_SECONDS = 15.0  # after so long without news a comment says that the line is alive
_UNUSED = str.maketrans({str(place + USED): str(place) for place in range(USED)})
_ALIVE = b": nothing new\n\n"


class Gallery:
    """Those who look. The engine is asked only while there are any, and one question serves all. On the event loop."""

    def __init__(self, link: EngineLink, shared: Callable[[], bool]) -> None:
        """`shared`: several users look, and what one asks is not to be read from the experts that were used."""
        self._link = link
        self._shared = shared
        self._viewers = 0
        self._looking: asyncio.Task[None] | None = None
        self._news = asyncio.Condition()
        self._frame: dict[str, Any] | None = None
        self._number = 0  # of the frame
        self._closed = False

    def enter(self) -> AsyncGenerator[bytes, None]:
        """Frames as server-sent events. Who reads slowly misses some, and holds nobody up. Raises ApiError."""
        if self._viewers >= MOST_VIEWERS:
            raise ApiError(429, f"{MOST_VIEWERS} pages look already; close one", retry_after_seconds=5)
        return self._frames()

    def close(self) -> None:
        """The server ends: so do all streams, within a frame's time."""
        self._closed = True

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        self._viewers += 1
        if self._looking is None:
            self._frame = None
            self._looking = asyncio.create_task(self._look())
        seen = -1
        try:
            while not self._closed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_QUIET_SECONDS), self._news:
                        await self._news.wait_for(lambda: self._closed or self._is_new(seen))  # noqa: B023
                news, seen = self._is_new(seen), self._number
                yield event(self._frame) if news else _ALIVE
        finally:
            self._viewers -= 1
            if not self._viewers and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    def _is_new(self, seen: int) -> bool:
        return self._frame is not None and self._number != seen

    async def _look(self) -> None:
        while not self._closed:
            shared = self._shared()
            observed = await self._link.observe(watching=not shared)
            frame = frame_json(self._link, observed, used=not shared)
            async with self._news:
                if frame != self._frame:
                    self._frame, self._number = frame, self._number + 1
                    self._news.notify_all()
            await asyncio.sleep(FRAME_SECONDS)
        async with self._news:
            self._news.notify_all()


def frame_json(link: EngineLink, observed: Observed | None, *, used: bool) -> dict[str, Any]:
    """Everything counts from the engine's start, as in `/metrics`; without an engine only its state is told.

    `used`: the map tells which experts the last step used.
    """
    done, total = link.loaded_bytes
    head: dict[str, Any] = {"state": link.state.value, "loaded": done / total if total else 0.0}
    if observed is None:
        return head
    counters, prediction = observed.experts, observed.prediction
    return head | {
        "map": observed.map if used else tuple(row.translate(_UNUSED) for row in observed.map),
        "places": count_places(observed.map),
        "experts": experts_json(counters),
        "compute_seconds": observed.times.compute_seconds,
        "copy_seconds": 0.0 if counters is None else counters.link_seconds,
        "running": observed.load.running,
        "waiting": observed.load.waiting,
        "prediction": None if prediction is None else {"on": prediction.on, "line": prediction.line},
        "predictor": None if prediction is None else prediction.predictor,
    }


def prediction_json(observed: Observed | None) -> dict[str, Any]:
    """The answer of `/prediction`."""
    state = None if observed is None else observed.prediction
    if observed is None or state is None:
        return {"available": False, "on": False}
    scores = {
        name: score_json(own, by, state.block_bytes, state.miss_seconds)
        for (name, own), by in zip(state.scores, state.layers, strict=True)
    }
    return {
        "available": True,
        "on": state.on,
        "predictor": state.predictor,
        "verdict": state.line,
        "eviction": state.eviction,
        "beside": state.beside,
        "trial_seconds_per_token": dict(state.trial_seconds),
        "scores": scores,
        "guessed_bytes": asdict(state.guessed(observed.experts)) if observed.experts else None,
    }
