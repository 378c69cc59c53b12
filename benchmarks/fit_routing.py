"""Fits the strengths of synthetic routing to published hit rates of Qwen3-30B-A3B (128 experts, top-8).

    python benchmarks/fit_routing.py [--tries 100] [--layers 8] [--tokens 800] [--seed 0]

Draws strengths at random, measures LRU at 25 % and LFRU and Belady at 40 % residency by the simulator, and prints the
best by their largest distance from the published points. The numbers in steerpipe.bench.routing are the best of
`--tries 60`, rounded. The last line is JSON.
"""

import argparse
import json

import numpy as np

from steerpipe.bench.routing import PUBLISHED, hit_rate
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.synthetic import SyntheticRouting


def draw(random: np.random.Generator) -> dict[str, float]:
    return {
        "zipf": float(random.uniform(0.9, 1.5)),
        "topic": float(random.uniform(0.2, 1.0)),
        "topic_tokens": float(random.choice([128, 192, 400])),
        "passage": float(random.uniform(0.4, 1.6)),
        "passage_tokens": float(random.choice([8, 16, 24, 32])),
    }


def measure(strengths: dict[str, float], layers: int, tokens: int) -> dict[tuple[str, float], float]:
    plan = SyntheticRouting(
        tokens=tokens, layers=layers, experts=128, top_k=8, sequence_tokens=1024, **strengths
    )  # type: ignore[arg-type]  # fmt: skip
    recording = draw_recording(plan)
    return {point: hit_rate(recording, *point) for point in PUBLISHED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    found = []
    for _ in range(options.tries):
        strengths = draw(random)
        rates = measure(strengths, options.layers, options.tokens)
        found.append((max(abs(rates[point] - PUBLISHED[point]) for point in PUBLISHED), strengths, rates))
    found.sort(key=lambda each: each[0])
    for apart, strengths, rates in found[:8]:
        shown = ", ".join(f"{name} {value:.2f}" for name, value in strengths.items())
        hits = ", ".join(f"{policy}@{share:.0%} {rate:.3f}" for (policy, share), rate in rates.items())
        print(f"{apart:.4f}  {shown}  →  {hits}")
    print(json.dumps({"apart": found[0][0], "strengths": found[0][1], "tries": options.tries}))


if __name__ == "__main__":
    main()
