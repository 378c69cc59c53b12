"""How long do drafts hold up an answer? Gaps between the tokens of an answer that runs, alone and beside people who
type; and the longest step of a draft, which is what an answer waits for at most when it comes in the middle of one.

PYTHONPATH=src python benchmarks/draft_delay.py --drafts 40 --json FILE
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from steerpipe import Pipeline
from steerpipe.core.events import TokenEvent
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.request import Request
from steerpipe.intake.edits import insert, paste

LINE = "is the number that I had in mind when I wrote this long line to you, my friend, before you answered it"
TOKENS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=int, default=40)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with Pipeline(fast_memory="25%", threads=1, profile=False, kv_memory="256MB") as pipe:
        desk = Desk(pipe)
        alone = desk.answer(typing=False)
        for number in range(given.drafts):
            desk.open(f"{number} {LINE}")
        steps = desk.work()
        beside = desk.answer(typing=True)
    found = {
        "drafts": given.drafts,
        "steps_of_drafts_ms": _spread(steps),
        "gaps_alone_ms": _spread(alone),
        "gaps_beside_ms": _spread(beside),
    }
    print(json.dumps(found))
    if given.json is not None:
        given.json.write_text(json.dumps(found) + "\n")


class Desk:
    def __init__(self, pipe: Pipeline) -> None:
        self._pipe, self._engine, self._drafts = pipe, pipe.engine, pipe.drafts()
        self._settings = SamplingSettings(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        self._open: list[Any] = []

    def open(self, text: str) -> None:
        draft = self._drafts.open(f"person {len(self._open) % 8}", settings=self._settings)
        self._drafts.edit(draft, [paste(0, text, time.perf_counter())])
        self._open.append(draft)

    def work(self) -> list[float]:
        """Seconds of every step until the drafts want nothing more."""
        spent, until = [], time.perf_counter() + 60
        while time.perf_counter() < until:
            self._drafts.tend(time.perf_counter())
            if self._engine.idle:
                wake = self._drafts.next_wake()
                if wake is None:
                    break
                time.sleep(max(0.0, min(wake - time.perf_counter(), 0.05)))
                continue
            begin = time.perf_counter()
            self._engine.step()
            spent.append(time.perf_counter() - begin)
        return spent

    def answer(self, *, typing: bool) -> list[float]:
        """Seconds between the tokens of one answer; with `typing` a key in every draft after each of them."""
        prompt = self._pipe.encode("Tell me something about dogs.")
        sequence = self._engine.submit(Request(prompt, self._settings, scope="somebody else"))
        gaps: list[float] = []
        last = 0.0
        while self._engine.runs(sequence):
            self._drafts.tend(time.perf_counter())
            if any(isinstance(event, TokenEvent) for event in self._engine.step()):
                now = time.perf_counter()
                gaps += [now - last] if last else []
                last = now
                for draft in self._open if typing else ():
                    self._drafts.edit(draft, [insert(0, "a", now)])
        self._engine.take_completion(sequence)
        return gaps


def _spread(seconds: list[float]) -> dict[str, float]:
    ms = sorted(1e3 * each for each in seconds)
    return {"n": len(ms), "median": round(statistics.median(ms), 1), "largest": round(ms[-1], 1)}


if __name__ == "__main__":
    main()
