"""The engine process as its parent holds it, with the two threads that speak with it.

One waits on the pipe for what the engine says, one writes to it: a pipe that is full (the engine computes a long
prompt) never stops the event loop, and the engine's words are always taken off its hands.
"""

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from steerpipe.core.config import EngineConfig
from steerpipe.server.messages import FromEngine, Stop, ToEngine
from steerpipe.server.outbox import Outbox
from steerpipe.server.worker import run_engine

_SPAWN = multiprocessing.get_context("spawn")  # a fork would copy threads' locks and CUDA's state
_STOP_SECONDS = 20.0  # for closing a model; it may have a profile to save


class Child:
    """A process and the two threads that speak with it."""

    def __init__(
        self,
        model: str | None,
        config: EngineConfig,
        loop: asyncio.AbstractEventLoop,
        heard: "Callable[[Child, FromEngine], None]",
        lost: "Callable[[Child], None]",
    ) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self.outbox = Outbox()
        self._loop, self._heard, self._lost = loop, heard, lost
        self.process: SpawnProcess = _SPAWN.Process(
            target=run_engine, args=(theirs, model, config), name="steerpipe-engine", daemon=True
        )
        self._started = threading.Event()
        threading.Thread(target=self._run, args=(theirs,), name="engine-listener", daemon=True).start()
        threading.Thread(target=self._write, name="engine-writer", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Never waits, and never fails: if the process is gone, the listener says so."""
        self.outbox.put(message)

    def forget(self) -> None:
        """The process is gone: its writer ends."""
        self.outbox.close()

    def stop(self, gently: bool) -> None:
        """Waits for the process to end; kills it when it does not. One that loads listens to nobody."""
        self._started.wait()
        self.send(Stop())
        self.process.join(_STOP_SECONDS if gently else 0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.forget()

    def _run(self, theirs: Connection) -> None:
        """Starting takes a second: it is done here, not on the loop."""
        self.process.start()
        self._started.set()
        theirs.close()  # ours alone is left, so that the end of the process is the end of the pipe
        try:
            while True:
                self._call(self._heard, self._connection.recv())
        except (EOFError, OSError):
            self.process.join()
            self._connection.close()
            self._call(self._lost)

    def _write(self) -> None:
        while (message := self.outbox.take()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return

    def _call(self, function: "Callable[..., None]", *arguments: FromEngine) -> None:
        with suppress(RuntimeError):  # the loop is closed: there is nobody left to tell
            self._loop.call_soon_threadsafe(function, self, *arguments)
