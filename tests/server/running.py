"""A server on a tiny model: HTTP in a thread of the test's process, the engine in a process of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from steerpipe.core.config import load_config
from steerpipe.server.service import Service
from steerpipe.server.serving import Serving
from steerpipe.server.settings import ServerSettings

LIMIT_SECONDS = 120.0  # for whatever a test waits for; reached only where something hangs


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    service: Service
    folder: Path

    def client(self, key: str | None = None) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=LIMIT_SECONDS)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=LIMIT_SECONDS, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=LIMIT_SECONDS, **more)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A greedy text completion that does not end by itself."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True} | fields
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content

    def metrics(self) -> dict[str, float]:
        """Sample → value, as Prometheus would read them."""
        lines = self.get("/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}


@contextmanager
def serving(folder: Path, settings: dict[str, Any] | None = None, **engine: Any) -> Iterator[Running]:
    """Started when the block begins, ended and joined when it ends."""
    ready = threading.Event()
    told: list[tuple[str, Service]] = []

    def announce(address: str, service: Service) -> None:
        told.append((address, service))
        ready.set()

    config = load_config({"dtype": "float32", "threads": 1, "profile": False} | engine, environ={})
    server = Serving(str(folder), config, ServerSettings(**({"port": 0} | (settings or {}))), announce)
    problems: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as problem:  # noqa: BLE001  told to the test
            problems.append(problem)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        assert ready.wait(LIMIT_SECONDS), "the server did not become ready"
        if problems:
            raise problems[0]
        yield Running(told[0][0], told[0][1], folder)
    finally:
        server.stop()
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive(), "the server did not end"
