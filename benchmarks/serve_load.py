"""Load on the server: many clients, whole and streamed answers, random cancels, slow readers, drafts.

    python benchmarks/serve_load.py --seconds 600 --clients 64 --json benchmarks/results/serve_load.json

Every answer that comes to its end is compared with the same request asked alone before. Prints one JSON object last;
exit status 1 if an answer was lost, crossed or refused without reason, if something is left in the engine, or if one
step in a hundred has taken the scheduler's own thread 5 ms or more.
Needs httpx and websockets, which the tests need too.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from steerpipe.bench.report import machine, write_json
from steerpipe.bench.serve_client import Target, own_server
from steerpipe.tiny import write_tiny

PROMPTS = [f"{'More and more. ' * (place % 9)}Request number {place}:" for place in range(48)]
SAMPLE_SECONDS = 2.0
MOST_OVERHEAD_SECONDS = 0.005  # at p99, of the thread's own time: other work on the machine is not in it
OVERHEAD = "steerpipe_scheduler_overhead_seconds"
WALL = "steerpipe_scheduler_wall_seconds"
SERVED = ("--dtype", "float32", "--no-profile", "--threads", "1")
# Five pages for the tiny model: keys and values take up to three of them, and then 22 of its 32 experts fit.
TIGHT = ("--fast-memory", "1536KiB", "--kv-memory", "shared")
WAITED = "steerpipe_engine_waited_seconds_total"
MEMORY = 'steerpipe_process_resident_memory_bytes{{process="{}"}}'


@dataclass
class Load:
    """What the clients have seen."""

    url: str
    expected: dict[int, str]  # completions
    chats: dict[int, str]  # what the same prompts get as chats
    until: float
    counts: Counter[str] = field(default_factory=Counter)
    strange: list[str] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)

    def body(self, place: int) -> dict[str, Any]:
        return {"prompt": PROMPTS[place]} | self.settings(place)

    def chat(self, place: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": PROMPTS[place]}]} | self.settings(place)

    def settings(self, place: int) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 8 + place, "ignore_eos": True}

    def check(self, place: int, text: str, expected: dict[int, str] | None = None) -> None:
        self.counts["answers"] += 1
        if text != (expected or self.expected)[place]:
            self.counts["crossed"] += 1
            self.strange.append(f"prompt {place}: {text!r}")

    async def client(self, number: int) -> None:
        """One user, until the time is up."""
        chance = random.Random(number)
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as http:
            while time.monotonic() < self.until:
                place, kind = chance.randrange(len(PROMPTS)), chance.random()
                try:
                    if kind < 0.15:
                        await self.drafted(place, leaves=kind < 0.05, chance=chance)
                    elif kind < 0.35:
                        await self.whole(http, place)
                    else:
                        leaves_after = chance.randrange(1, 12) if kind < 0.55 else None
                        await self.streamed(http, place, leaves_after, pause=0.05 if kind > 0.85 else 0.0)
                except (httpx.HTTPError, WebSocketException, OSError) as problem:
                    self.counts["lost"] += 1
                    self.strange.append(f"{type(problem).__name__} {problem}")

    async def whole(self, http: httpx.AsyncClient, place: int) -> None:
        answer = await http.post("/v1/completions", json=self.body(place))
        if self.accepted(answer):
            self.check(place, answer.json()["choices"][0]["text"])

    async def streamed(self, http: httpx.AsyncClient, place: int, leaves_after: int | None, pause: float) -> None:
        text, chunks, done = "", 0, False
        async with http.stream("POST", "/v1/completions", json=self.body(place) | {"stream": True}) as answer:
            if not self.accepted(answer):
                return
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    chunks += 1
                    await asyncio.sleep(pause)
                if leaves_after is not None and chunks >= leaves_after:
                    self.counts["left"] += 1
                    return
        if done:
            self.check(place, text)
        else:
            self.counts["lost"] += 1

    async def drafted(self, place: int, *, leaves: bool, chance: random.Random) -> None:
        """Typed in a few pieces, with a mistake now and then; then sent, or left as it is."""
        async with connect(self.url.replace("http", "ws") + "/v1/drafts", proxy=None, open_timeout=300) as line:
            await say(line, {"type": "open"} | self.settings(place))
            text, at = PROMPTS[place], 0
            while at < len(text):
                piece = text[at : at + chance.randrange(1, 9)]
                edits = [{"at": at, "insert": "#"}, {"at": at, "remove": 1, "insert": piece}]
                await say(line, {"type": "edit", "edits": edits})
                at += len(piece)
                await asyncio.sleep(chance.random() * 0.1)
            if leaves:
                self.counts["drafts left"] += 1
                return
            await say(line, {"type": "submit", "text": text})
            answer = ""
            async for raw in line:
                message = json.loads(raw)
                if message["type"] == "chunk":
                    answer += "".join(each["delta"].get("content", "") for each in message["chunk"]["choices"])
                elif message["type"] in ("done", "error"):
                    break
            if message["type"] != "done":
                self.counts["lost"] += 1
                self.strange.append(f"draft {place}: {message}")
                return
        self.counts["drafts answered"] += 1
        self.check(place, answer, self.chats)

    def accepted(self, answer: httpx.Response) -> bool:
        if answer.status_code != 200:
            self.counts[f"status {answer.status_code}"] += 1
        return answer.status_code == 200

    async def watch(self, target: Target) -> None:
        """Memory of both processes, every few seconds."""
        began = time.monotonic()
        while time.monotonic() < self.until:
            found = await asyncio.to_thread(target.metrics)
            sizes = {name: found.get(MEMORY.format(name), 0.0) for name in ("server", "engine")}
            self.memory.append({"seconds": time.monotonic() - began, **sizes})
            await asyncio.sleep(SAMPLE_SECONDS)


async def say(line: ClientConnection, message: dict[str, Any]) -> None:
    await line.send(json.dumps(message))


def quantile(before: dict[str, float], after: dict[str, float], share: float, name: str = OVERHEAD) -> float:
    """Upper bound in seconds of the histogram's bucket in which the share of its new observations lies."""
    prefix = f'{name}_bucket{{le="'
    grown = {name.removeprefix(prefix)[:-2]: after[name] - before[name] for name in after if name.startswith(prefix)}
    total = grown["+Inf"]
    return min(float(bound) for bound, count in grown.items() if count >= share * total)


def growth(memory: list[dict[str, float]], name: str, warm_seconds: float) -> dict[str, float]:
    """Largest resident size in the first half after warming up, and in the second."""
    warm = [sample for sample in memory if sample["seconds"] >= warm_seconds] or memory[-2:]
    half = len(warm) // 2 or 1
    first, second = max(s[name] for s in warm[:half]), max(s[name] for s in warm[half:] or warm)
    return {"first_half_bytes": first, "second_half_bytes": second, "growth": second / first - 1}


async def settle(target: Target) -> dict[str, float]:
    """The counters when nothing runs any more."""
    while True:
        found = await asyncio.to_thread(target.metrics)
        if not found["steerpipe_num_requests_running"] and not found["steerpipe_num_requests_waiting"]:
            return found
        await asyncio.sleep(0.2)


async def run(target: Target, clients: int, seconds: float) -> dict[str, Any]:
    url = f"http://{target.host}:{target.port}"
    load = Load(url, {}, {}, 0.0)
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        for place in range(len(PROMPTS)):
            answer = await http.post("/v1/completions", json=load.body(place))
            load.expected[place] = answer.raise_for_status().json()["choices"][0]["text"]
            answer = await http.post("/v1/chat/completions", json=load.chat(place))
            load.chats[place] = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    before = await asyncio.to_thread(target.metrics)
    load.until = time.monotonic() + seconds
    await asyncio.gather(load.watch(target), *(load.client(number) for number in range(clients)))
    after = await settle(target)
    steps = after["steerpipe_engine_steps_total"] - before["steerpipe_engine_steps_total"]
    leaked = after["steerpipe_kv_cache_usage_perc"] - after["steerpipe_kv_cache_kept_perc"]
    tokens = after["steerpipe_generation_tokens_total"] - before["steerpipe_generation_tokens_total"]
    warm_seconds = min(60.0, seconds / 4)
    return {
        "clients": clients, "seconds": seconds, "counts": dict(load.counts), "strange": load.strange[:10],
        "steps": steps, "tokens": tokens, "tokens_per_second": tokens / seconds,
        "overhead_p50_below_seconds": quantile(before, after, 0.5),
        "overhead_p99_below_seconds": quantile(before, after, 0.99),
        "overhead_mean_seconds": (after[f"{OVERHEAD}_sum"] - before[f"{OVERHEAD}_sum"]) / steps,
        "overhead_wall_p99_below_seconds": quantile(before, after, 0.99, WALL),
        "waited_mean_seconds": (after[WAITED] - before[WAITED]) / steps,
        "memory": {name: growth(load.memory, name, warm_seconds) for name in ("server", "engine")},
        "pages": {name: value for name, value in after.items() if name.startswith("steerpipe_page")},
        "leaked_kv_share": leaked, "restarts": after["steerpipe_engine_restarts_total"],
    }  # fmt: skip


def is_good(found: dict[str, Any]) -> bool:
    bad = found["counts"].get("lost", 0) + found["counts"].get("crossed", 0) + found["restarts"]
    refused = [name for name in found["counts"] if name.startswith("status")]
    whole = not bad and not refused and found["leaked_kv_share"] == 0 and found["counts"].get("answers", 0) > 0
    return whole and found["overhead_p99_below_seconds"] <= MOST_OVERHEAD_SECONDS


def main() -> int:
    parser = argparse.ArgumentParser(description="Many clients at once.")
    parser.add_argument("--model", type=Path, help="folder; default: a tiny model with random weights")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tight", action="store_true", help="experts and keys and values share little memory")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or Path(folder) / "tiny"
        if given.model is None:
            write_tiny("qwen3_moe", model)
        with own_server([str(model), *SERVED, *(TIGHT if given.tight else ())]) as target:
            found = asyncio.run(run(target, given.clients, given.seconds))
    found |= {
        "tight": given.tight,
        "model": str(given.model.name if given.model else "tiny"),
        "machine": machine("cpu"),
    }
    write_json(given.json, found)
    print(json.dumps(found))
    return 0 if is_good(found) else 1


if __name__ == "__main__":
    sys.exit(main())
