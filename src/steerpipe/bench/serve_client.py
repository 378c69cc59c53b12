"""A client of the server for measurements: standard library only, one thread per user."""

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from steerpipe.core.errors import InputError

_WAIT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Timed:
    """One streamed answer, in seconds since the request."""

    first: float
    gaps: tuple[float, ...]  # between the tokens after the first
    tokens: int


@dataclass(frozen=True, slots=True)
class Target:
    """A server, by its address."""

    host: str
    port: int
    key: str | None = None

    @classmethod
    def of(cls, url: str, key: str | None = None) -> "Target":
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise InputError(f"{url!r} is no address of a server", fix="give --url http://host:port")
        return cls(parts.hostname, parts.port or 80, key)

    @contextmanager
    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
        """The answer, to be read. Raises InputError where it is not 200."""
        connection = HTTPConnection(self.host, self.port, timeout=_WAIT_SECONDS)
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                said = answer.read(2000).decode(errors="replace")
                raise InputError(f"{method} {path} was answered with {answer.status}: {said}", fix="see the message")
            yield answer
        except OSError as problem:
            raise InputError(
                f"the server at {self.host}:{self.port} does not answer: {problem}", fix="start it, or check --url"
            ) from None
        finally:
            connection.close()

    def ask(self, prompt: str, tokens: int) -> Timed:
        """Streams one chat answer of exactly so many tokens."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "logprobs": True,
        }  # fmt: skip  (with log probabilities every token is a chunk, even one that shows no text yet)
        began = time.perf_counter()
        with self.request("POST", "/v1/chat/completions", body) as answer:
            times = [time.perf_counter() - began for line in answer if b'"logprobs":{' in line]
        gaps = tuple(after - before for before, after in itertools.pairwise(times))
        return Timed(times[0], gaps, len(times))

    def metrics(self) -> dict[str, float]:
        with self.request("GET", "/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}


def ask_together(target: Target, prompts: Sequence[str], clients: int, tokens: int) -> tuple[list[Timed], float]:
    """All prompts, by so many clients at once, each one after the other; and the seconds it took."""
    left, found, problems = list(reversed(prompts)), list[Timed](), list[BaseException]()
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not left or problems:
                    return
                prompt = left.pop()
            try:
                timed = target.ask(prompt, tokens)
            except BaseException as problem:  # noqa: BLE001  raised again by whoever started the thread
                problems.append(problem)
                return
            with lock:
                found.append(timed)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return found, time.perf_counter() - began


@contextmanager
def own_server(arguments: Sequence[str]) -> Iterator[Target]:
    """`steerpipe serve` in a process of its own, ended with the block."""
    command = [sys.executable, "-m", "steerpipe", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            address = next((word for word in line.split() if word.startswith("http://")), None)
            if address is None:
                raise InputError("the server did not start", fix="run `steerpipe serve` with the same arguments")
            yield Target.of(address)
        finally:
            process.terminate()
