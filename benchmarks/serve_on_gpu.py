"""The server's engine process on a GPU, below HTTP: many clients over its pipe, drafts and cancels among them.

    PYTHONPATH=src:. python benchmarks/serve_on_gpu.py --json FILE [--device cpu] [--model FOLDER] [--answers 32]

For each budget one engine process. Every answer is compared with the same request asked alone before; each request has
a scope of its own, so that nobody's prompt is computed in pieces. Then one client's tokens per second, and those of
eight; then drafts that are typed while others are answered, and requests that are cancelled. Needs no web framework.
"""

import argparse
import itertools
import json
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from steerpipe.core.config import EngineConfig
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import ChatMessage, TextCodec
from steerpipe.intake.edits import insert
from steerpipe.server import messages as words
from steerpipe.server.worker import run_engine

ARMS: dict[str, dict[str, str]] = {
    "resident": {},
    "25 %": {"fast_memory": "25%"},
    "shared pages": {"fast_memory": "64MiB", "kv_memory": "shared"},
}
TOPICS = ("the sun", "a dog", "rain", "bread", "the sea", "a town", "music", "winter", "a friend", "trains", "a garden")


class Engine:
    """The server's end of the pipe."""

    def __init__(self, connection: Connection, ready: words.Ready) -> None:
        self._connection = connection
        self._heard: SimpleQueue[words.FromEngine] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.codec = TextCodec.load(Path(ready.folder))
        self.names = itertools.count()

    def send(self, message: words.ToEngine) -> None:
        self._connection.send(message)

    def hear(self) -> words.FromEngine:
        return self._heard.get(timeout=120)

    def _listen(self) -> None:
        """The engine never waits for us."""
        with suppress(EOFError, OSError):
            while True:
                self._heard.put(self._connection.recv())

    def request(self, text: str, tokens: int) -> Request:
        settings = SamplingSettings(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        ids = self.codec.apply_chat([ChatMessage("user", text)])
        return Request(tuple(ids), settings, batched=True, continues=False, scope=f"user {next(self.names)}")

    def observe(self) -> words.Observed:
        self.send(words.Observe())
        while not isinstance(found := self.hear(), words.Observed):
            pass
        return found


@contextmanager
def engine(model: str | None, settings: dict[str, Any]) -> Iterator[Engine]:
    """A process as the server starts it."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=run_engine, args=(theirs, model, EngineConfig(**settings)), daemon=True)
    process.start()
    theirs.close()
    try:
        while not isinstance(said := ours.recv(), words.Ready):
            assert not isinstance(said, words.LoadFailed), said
        yield Engine(ours, said)
        ours.send(words.Stop())
        process.join(60)
        assert process.exitcode == 0, f"the engine ended with {process.exitcode}"
    finally:
        process.kill()


@dataclass
class Asked:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    sent: float = 0.0


def ask(own: Engine, requests: Sequence[Request], clients: int) -> tuple[list[Asked], float]:
    """All of them, `clients` at a time; the answers in their order, and the seconds."""
    began = time.perf_counter()
    found = [Asked() for _ in requests]
    open_places: dict[words.Ticket, int] = {}
    left = iter(enumerate(requests))

    def next_one() -> None:
        for place, request in left:
            ticket = words.Ticket(next(own.names))
            open_places[ticket], found[place].sent = place, time.perf_counter()
            own.send(words.Submit(ticket, request))
            return

    for _ in range(clients):
        next_one()
    while open_places:
        message = own.hear()
        for word in message.told if isinstance(message, words.Stepped) else ():
            assert not isinstance(word, words.Failed), word
            place = open_places[word.ticket]
            if isinstance(word, words.Told) and hasattr(word.event, "token_id"):
                found[place].tokens.append(word.event.token_id)
                found[place].times.append(time.perf_counter())
            elif isinstance(word, words.Ended):
                del open_places[word.ticket]
                next_one()
    return found, time.perf_counter() - began


def mixed(own: Engine, texts: Sequence[str], tokens: int, seed: int) -> dict[str, int]:
    """Some are typed while others are answered, some are left: everybody else gets a whole answer."""
    chance, counts = random.Random(seed), {"typed": 0, "left": 0, "drafts left": 0, "answers": 0}
    waiting: dict[words.Ticket, int] = {}
    left: set[words.Ticket] = set()
    for place, text in enumerate(texts):
        request, ticket, kind = own.request(text, tokens), words.Ticket(next(own.names)), place % 4
        if kind < 2:  # typed, piece by piece; every other one is given up
            name = words.DraftName(next(own.names))
            own.send(words.OpenDraft(name, str(request.scope), (), request.settings, True))
            for at in range(0, len(text), 7):
                own.send(words.EditDraft(name, (insert(at, text[at : at + 7], time.monotonic()),)))
                time.sleep(chance.random() * 0.005)
            if kind:
                own.send(words.CloseDraft(name))
                counts["drafts left"] += 1
                continue
            own.send(words.Submit(ticket, request, name))
            counts["typed"] += 1
        else:
            own.send(words.Submit(ticket, request))
        waiting[ticket] = tokens
        if kind == 3:
            time.sleep(chance.random() * 0.02)
            own.send(words.Cancel(ticket))
            left.add(ticket)
            counts["left"] += 1
    while set(waiting) - left:
        message = own.hear()
        for word in message.told if isinstance(message, words.Stepped) else ():
            assert not isinstance(word, words.Failed), word
            if isinstance(word, words.Told):
                waiting[word.ticket] -= 1
            elif isinstance(word, words.Ended):
                assert not waiting.pop(word.ticket), "an answer is not whole"
                counts["answers"] += word.ticket not in left
                left.discard(word.ticket)
    return counts


def texts_of(count: int, name: str) -> list[str]:
    return [
        f"{'Tell me more. ' * (at % 5)}Write a line about {TOPICS[at % len(TOPICS)]}, {name} {at}."
        for at in range(count)
    ]


def at_rest(own: Engine) -> words.Observed:
    """When nobody is answered and no draft is worked at any more."""
    while True:
        found = own.observe()
        if not found.load.running and not found.load.waiting:
            return found
        time.sleep(0.05)


def measure(own: Engine, answers: int, tokens: int) -> dict[str, Any]:
    requests = [own.request(text, tokens) for text in texts_of(answers, "number")]
    ask(own, requests[:8], 8)  # graphs are captured
    alone, one_seconds = ask(own, requests, 1)
    before = at_rest(own)
    together, eight_seconds = ask(own, requests, 8)
    same = sum(a.tokens == b.tokens for a, b in zip(alone, together, strict=True))
    rounds = [mixed(own, texts_of(24, f"round {seed}"), tokens, seed) for seed in range(3)]
    after = at_rest(own)
    firsts = sorted(each.times[0] - each.sent for each in together)
    total = answers * tokens
    times, earlier = after.times, before.times
    return {
        "answers": answers, "tokens_each": tokens, "same_tokens_as_alone": same,
        "tokens_per_second": {"1": total / one_seconds, "8": total / eight_seconds},
        "eight_against_one": one_seconds / eight_seconds,
        "first_token_ms_at_8": {"median": 1e3 * firsts[len(firsts) // 2], "largest": 1e3 * firsts[-1]},
        "overhead_mean_ms": 1e3 * (times.overhead_seconds - earlier.overhead_seconds) / (times.steps - earlier.steps),
        "mixed": rounds,
        "left_blocks": after.load.live_blocks - after.load.kept_blocks,
        "pages": None if after.pages is None else asdict(after.pages),
        "misses": None if after.experts is None else after.experts.misses,
    }  # fmt: skip


def free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="The server's engine process on a GPU.")
    parser.add_argument("--model", help="folder; default: the embedded model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"device": given.device, "torch": torch.__version__, "arms": {}}
    good = True
    for name in given.arms.split(","):
        settings = {"device": given.device, "profile": False, "max_batch": 8, "max_context": 512, **ARMS[name]}
        with engine(given.model, settings) as own:
            row = measure(own, given.answers, given.tokens)
            held = free_bytes(given.device)
            for seed in (7, 8):
                mixed(own, texts_of(24, f"again {seed}"), given.tokens, seed)
            row["device_bytes_grown"] = held - free_bytes(given.device)
        found["arms"][name] = row
        good = good and row["same_tokens_as_alone"] == given.answers and row["left_blocks"] == 0
        print(name, json.dumps(row), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
