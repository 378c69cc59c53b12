"""How much stall a forecast of an answer's first 16 tokens can save at best, on recorded routing and a virtual clock.

    python benchmarks/typing_bound.py LOG [--prompts 40] [--share 0.25] [--json OUT]

Routing is recorded from nano for the openings of a keystroke log. Then each answer's first 16 tokens run through the
product's table and policy (LFRU). Every miss is waited for: 0.69 ms, 17.3 MB (Qwen1.5-MoE) over PCIe 4 (25 GB/s), which
a layer's 0.1 ms of compute hardly hides. They begin with what the prompt's last tokens left ("prompt"), with what the
answer before left ("answer before"), with the forecast's experts, and with those that are used most ("oracle").
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.typing_openings import answer
from steerpipe.bench.typing_prompts import read_prompts
from steerpipe.core.ids import ExpertId
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.predict.openings import FIRST_TOKENS, OpeningTable, find_openings
from steerpipe.runtime.models import EMBEDDED
from steerpipe.store.policies import Lfru
from steerpipe.store.residency import SlotTable

BLOCK_SECONDS = 17.3e6 / 25e9
Routing = NDArray[np.uint8]  # [tokens, layers, k]


def uses(routing: Routing, experts: int) -> NDArray[np.float64]:
    """[layers, experts]"""
    return np.stack([np.bincount(routing[:, layer].ravel(), minlength=experts) for layer in range(routing.shape[1])])


def stall(routing: Routing, begin: NDArray[np.float64], counts: NDArray[np.float64], slots: int) -> tuple[float, int]:
    """Seconds waited and misses, with the experts of the highest `begin` there and the policy's `counts` as given."""
    layers, experts = begin.shape
    names = [ExpertId(layer, expert) for layer in range(layers) for expert in range(experts)]
    policy = Lfru(len(names))
    policy.restore(counts.ravel(), 0.0)
    table = SlotTable(names, slots, policy, transient_limit=2)
    for number in np.argsort(-begin.ravel(), kind="stable")[:slots]:
        table.begin(names[number], transient=False, now=0.0)
        table.finish(names[number])
    missed = 0
    for token, row in enumerate(routing, start=1):
        for layer, chosen in enumerate(row):
            wanted = [ExpertId(layer, int(expert)) for expert in chosen]
            there = table.ready(wanted)
            for expert in wanted:
                table.touch(expert, float(token))
            for expert in there:
                table.pin(expert)
            for expert in set(wanted) - set(there):
                table.begin(expert, transient=False, now=float(token))
                table.finish(expert)
                table.pin(expert)
                missed += 1
            for expert in wanted:
                table.unpin(expert)
    return missed * BLOCK_SECONDS, missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    codec = TextCodec.load(EMBEDDED)
    texts = [each.text for each in read_prompts(given.log, lambda text: len(codec.encode_part(text)), given.prompts)]
    table = find_openings(EMBEDDED)
    assert table is not None, "nano has a table of openings"
    rows = measure(table, list(answer(None, texts, given.prompts)), given.share)
    print(json.dumps(rows))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


def measure(table: OpeningTable, answered: list[Any], share: float) -> dict[str, dict[str, float]]:
    layers, experts = table.answer.shape
    slots = int(share * layers * experts)
    before = np.zeros((layers, experts))
    totals: dict[str, list[tuple[float, int]]] = {}
    for _, prompt, routing in answered:
        first = routing[prompt : prompt + FIRST_TOKENS]
        seen = uses(routing[:prompt], experts).astype(np.float64)
        told = table.forecast(seen, prompt).astype(np.float64) * FIRST_TOKENS
        kept = before * FIRST_TOKENS / 46.2
        oracle = uses(first, experts).astype(np.float64)
        none = np.zeros_like(told)
        cases = {
            "prompt": (uses(routing[prompt - 4 : prompt], experts) + seen / 1e3, none),
            "answer before": (before, before),
            "forecast": (np.maximum(told, kept), np.maximum(told, before)),
            "oracle": (oracle, oracle),
        }
        for name, (begin, counts) in cases.items():
            totals.setdefault(name, []).append(stall(first, begin, counts, slots))
        before = oracle
    return {
        name: {"stall_ms": 1e3 * float(np.mean([s for s, _ in found])), "misses": float(np.mean([m for _, m in found]))}
        for name, found in totals.items()
    }


if __name__ == "__main__":
    main()
