"""What prediction costs and gains on a CPU: nano behind slow links, one thread; ms per token, and of it stall.

    PYTHONPATH=src:. python benchmarks/steer_on_cpu.py [--json FILE] [--rounds 3]

Nobody predicts; trained heads 1, 2 and 3 layers ahead; as many as a block takes (what the engine does). Then the
microseconds of prediction in a layer, asked with numpy (what the engine does) and with torch. Ways take turns.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steerpipe.demo.ways import PROMPT, SEED
from steerpipe.predict.quick import InSight
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.runtime.steering import Steering

LINKS, SHARES, TOKENS = ("6MB", "12MB", "20MB", "40MB"), ("25%", "50%"), 24
ENGINE = Steering._horizons  # noqa: SLF001
ASKED: dict[str, Any] = {"raw": True, "seed": SEED, "max_tokens": TOKENS, "ignore_eos": True}


def ahead(most: int) -> Callable[..., list[int]]:
    return lambda _, predictor: [each for each in predictor.horizons if 1 <= each <= most]


WAYS = {"none": ENGINE, **{f"{most} ahead": ahead(most) for most in (1, 2, 3)}, "as needed": ENGINE}


def opened(way: str, link: str, share: str) -> Pipeline:
    predict = "off" if way == "none" else "on"
    return Pipeline(fast_memory=share, pace=link, predict=predict, dtype="float32", threads=1, profile=False)


def run(way: str, link: str, share: str) -> tuple[float, float]:
    """ms per token after the first, and of it stall."""
    Steering._horizons = WAYS[way]  # type: ignore[method-assign]  # noqa: SLF001
    with opened(way, link, share) as pipe:
        answer = pipe.stream(PROMPT, **ASKED)
        events = iter(answer)
        next(events)
        before = pipe.counters()
        assert before is not None and len(list(events)) == TOKENS - 1, "an answer over a ladder"
        after = pipe.counters()
        assert after is not None, "it is still there"
        stall = (after - before).stall_seconds + (after - before).late_seconds
        return answer.completion.timings.predicted_ms / (TOKENS - 1), stall * 1e3 / (TOKENS - 1)


def microseconds(rounds: int) -> dict[str, float]:
    """Of prediction per layer, two layers ahead."""
    Steering._horizons = ahead(2)  # type: ignore[method-assign]  # noqa: SLF001
    spent, found, routed = [0.0], {"numpy": list[float](), "torch": list[float]()}, Steering.routed

    def timed(steering: Steering, probe: Any) -> None:
        begin = time.perf_counter()
        routed(steering, probe)
        spent[0] += time.perf_counter() - begin

    Steering.routed = timed  # type: ignore[method-assign]
    with opened("2 ahead", "40MB", "50%") as pipe:
        steering: Any = pipe.prediction and pipe.prediction.steering
        ways = {"numpy": steering._quick, "torch": {e.name: InSight(e) for e in steering._predictors}}  # noqa: SLF001
        for number in range(2 * rounds):
            for name in ("numpy", "torch") if number % 2 else ("torch", "numpy"):
                steering._quick, spent[0] = ways[name], 0.0  # noqa: SLF001
                pipe.generate(PROMPT, **ASKED)
                found[name].append(spent[0] * 1e6 / (TOKENS - 1) / len(pipe.spec.moe_layers))
    return {name: round(statistics.median(each), 1) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, Any] = {"microseconds": microseconds(options.rounds)}
    print(found, flush=True)
    for link in LINKS:
        for share in SHARES:
            runs: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for number in range(options.rounds):
                for way in list(WAYS)[:: -1 if number % 2 else 1]:
                    runs[way].append(run(way, link, share))
            line = {
                way: [round(statistics.median(each), 2) for each in zip(*own, strict=True)] for way, own in runs.items()
            }
            found[f"{link}, {share}"] = line
            print(link, share, line, flush=True)
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
