"""Learns which experts answers begin with, and where tokens are routed: the table that a draft's forecast asks.

    python benchmarks/typing_openings.py CORPUS.jsonl.gz OUT.npz [--model MODEL] [--prompts 240]

Takes the first user's turn of each ChatML text, answers it (17 tokens, greedy, all experts resident), and counts.
"""

import argparse
import gzip
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.events import RoutingRecord
from steerpipe.engine.tokenizer import ChatMessage
from steerpipe.predict.openings import FIRST_TOKENS, OpeningTable, save_openings
from steerpipe.runtime.pipeline import Pipeline

TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
LEAST_MET = 8  # occurrences of a token that is worth a row
KEPT = 4  # experts per token and layer
TOKENS = range(75, 301)  # of a prompt, nano's system message (69) included

Answered = tuple[NDArray[np.int32], int, NDArray[np.uint8]]  # ids, of them the prompt's, routing [tokens, L, k]


class Routings:
    """A RoutingSink that keeps one answer's routing."""

    def __init__(self) -> None:
        self.layers: dict[int, list[NDArray[np.uint8]]] = {}

    def observe(self, record: RoutingRecord) -> None:
        self.layers.setdefault(record.layer, []).append(record.experts.astype(np.uint8))


def first_turns(file: Path) -> Iterator[str]:
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        for line in lines:
            found = TURN.search(json.loads(line)["text"])
            if found and 20 < len(found[1]) < 800:
                yield found[1]


def answer(model: str | None, texts: Iterable[str], wanted: int) -> Iterator[Answered]:
    sink = Routings()
    with Pipeline(
        model, dtype="float32", threads=1, predict="off", profile=False, fast_memory="100%", max_context=512, sink=sink
    ) as pipe:
        for text in texts:
            prompt = [ChatMessage("user", text)]
            if len(pipe.encode(prompt)) not in TOKENS:
                continue
            sink.layers.clear()
            done = pipe.generate(prompt, temperature=0.0, max_tokens=FIRST_TOKENS + 1, ignore_eos=True)
            routing = np.stack([np.concatenate(sink.layers[layer]) for layer in sorted(sink.layers)], axis=1)
            ids = np.array([*done.prompt_token_ids, *done.token_ids], np.int32)[: len(routing)]
            yield ids, len(done.prompt_token_ids), routing
            wanted -= 1
            if not wanted:
                return


def count(answers: Iterable[Answered], experts: int) -> OpeningTable:
    """One pass; memory is tokens met x layers x experts."""
    begun: NDArray[np.float64] | None = None
    uses: dict[int, NDArray[np.uint16]] = {}
    met: dict[int, int] = {}
    number = 0
    for ids, prompt, routing in answers:
        layers = routing.shape[1]
        begun = np.zeros((layers, experts)) if begun is None else begun
        number += 1
        for layer in range(layers):
            begun[layer] += np.bincount(routing[prompt : prompt + FIRST_TOKENS, layer].ravel(), minlength=experts)
        for token, routed in zip(ids.tolist(), routing, strict=True):
            own = uses.setdefault(token, np.zeros((layers, experts), np.uint16))
            own[np.arange(layers)[:, None], routed] += 1
            met[token] = met.get(token, 0) + 1
    assert begun is not None, "no prompt had the right length"
    often = sorted(token for token, times in met.items() if times >= LEAST_MET)
    chosen = np.stack([np.argsort(-uses[token].astype(int), axis=1, kind="stable")[:, :KEPT] for token in often])
    shares = np.stack([np.take_along_axis(uses[t], c, axis=1) / met[t] for t, c in zip(often, chosen, strict=True)])
    answer_rates = (begun / (number * FIRST_TOKENS)).astype(np.float32)
    rates = np.round(255 * shares).astype(np.uint8)
    return OpeningTable(answer_rates, np.array(often, np.int32), chosen.astype(np.uint8), rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--experts", type=int, default=60)
    given = parser.parse_args()
    table = count(answer(given.model, first_turns(given.corpus), given.prompts), given.experts)
    save_openings(given.out, table)
    print(json.dumps({"tokens": len(table.tokens), "bytes": given.out.stat().st_size}))


if __name__ == "__main__":
    main()
