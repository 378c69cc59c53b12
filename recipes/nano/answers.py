"""Answers to chat openers through steerpipe's engine: how they read (do they end, do they loop) and how they route."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steerpipe import Pipeline
from steerpipe.core.events import Completion, FinishReason, RoutingRecord

Trace = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Answer:
    prompt: str
    text: str
    ids: tuple[int, ...]  # without the token that ended it
    ended: bool


class Route:
    """A RoutingSink that keeps the experts of every position, layer after layer."""

    def __init__(self) -> None:
        self.chosen: defaultdict[tuple[int, int], list[npt.NDArray[np.int64]]] = defaultdict(list)

    def observe(self, record: RoutingRecord) -> None:
        for sequence, position, experts in zip(
            record.sequences, record.positions.tolist(), record.experts, strict=True
        ):
            self.chosen[int(sequence), position].append(experts)

    def trace(self, prompts: Sequence[tuple[int, ...]]) -> Trace:
        """`routing` [tokens, layers, k] and `sequence` [tokens] of what was decoded, answer after answer, as
        `steerpipe replay` reads them; `prompt_routing` and `prompt_sequence` of what was read.

        The beginning that all prompts share is routed alike in each (the row rule), and kept with the first one.
        """
        shared = len(list(takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))))
        places = sorted(self.chosen)
        decoded = [(sequence, at) for sequence, at in places if at >= len(prompts[sequence])]
        read = [(s, at) for s, at in places if at < len(prompts[s]) and (s == 0 or at >= shared)]
        return {
            "routing": np.array([self.chosen[place] for place in decoded], np.uint8),
            "sequence": np.array([sequence for sequence, _ in decoded], np.int32),
            "prompt_routing": np.array([self.chosen[place] for place in read], np.uint8),
            "prompt_sequence": np.array([sequence for sequence, _ in read], np.int32),
        }


def read_openers(path: Path) -> list[str]:
    """First turns of a JSONL file of `{"turns": [...]}`."""
    return [json.loads(line)["turns"][0] for line in path.read_text().splitlines() if line]


def answer_all(
    model: Path | None, openers: list[str], seed: int, sampling: dict[str, Any], threads: int = 1
) -> tuple[list[Answer], Trace]:
    """One answer each, with the model's own sampling where `sampling` says nothing else, and the routing of all.

    None is the embedded model. The i-th answer is drawn with seed + i, alone, as one person would see it.
    """
    route = Route()
    with Pipeline(model, sink=route, threads=threads) as pipe:
        given = [pipe.generate(opener, **{"seed": seed + i} | sampling) for i, opener in enumerate(openers)]
        ends = pipe.defaults.end_tokens
    answers = [_answer(opener, each, ends) for opener, each in zip(openers, given, strict=True)]
    return answers, route.trace([each.prompt_token_ids for each in given])


def _answer(opener: str, given: Completion, ends: frozenset[int]) -> Answer:
    ids = tuple(token for token in given.token_ids if token not in ends)
    return Answer(opener, given.text, ids, given.finish_reason is FinishReason.STOP)


def repeats(ids: tuple[int, ...], length: int = 4, times: int = 4) -> bool:
    """Whether any run of `length` tokens occurs `times` times."""
    grams = Counter(ids[i : i + length] for i in range(len(ids) - length + 1))
    return bool(grams) and max(grams.values()) >= times


def answer_figures(answers: list[Answer]) -> dict[str, float]:
    lengths = sorted(len(answer.ids) for answer in answers)
    return {
        "answers": len(answers),
        "ended": round(sum(answer.ended for answer in answers) / len(answers), 4),
        "repeating": round(sum(repeats(answer.ids) for answer in answers) / len(answers), 4),
        "empty": round(sum(not answer.text.strip() for answer in answers) / len(answers), 4),
        "median_tokens": lengths[len(lengths) // 2],
    }
