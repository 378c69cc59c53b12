"""Training and test texts must have nothing in common: a predictor that saw the test is not tested."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from steerpipe.core.errors import InputError
from steerpipe.predict.records import States, TracedSequence
from steerpipe.predict.seen import prompt_digests
from steerpipe.predict.stored import StoredPredictor


def check_apart(train: Sequence[TracedSequence], test: Sequence[TracedSequence]) -> None:
    """InputError if a prompt id, or a text (its token ids), stands in both."""
    for what, one, other in (
        ("prompt ids", {each.prompt for each in train}, {each.prompt for each in test}),
        ("texts, token for token", set(_texts(train)), set(_texts(test))),
    ):
        shared = sorted(one & other)
        if shared:
            raise InputError(
                f"training and test share {len(shared)} {what}, {_prompts_of(shared[0], test)} among them",
                fix="split by prompt (steerpipe.trace.split.split_prompts), and leave duplicates out",
            )


def check_unseen(predictor: StoredPredictor, file: Path, test: Sequence[TracedSequence]) -> None:
    """InputError if the predictor in `file` learnt from a prompt of the test. Files of before digests do not tell."""
    seen = predictor.seen or frozenset()
    shared = [prompt for prompt, digest in prompt_digests(test).items() if digest in seen]
    if shared:
        raise InputError(
            f"{file} was trained on {len(shared)} of the held-out prompts, {shared[0]} among them",
            fix="train it with the arena's --held-out and --seed, test it on other prompts, or leave it out",
        )


def without_repeats(train: Sequence[TracedSequence], test: Sequence[TracedSequence]) -> list[TracedSequence]:
    """`test` without the texts that `train` has under another prompt id: people ask the same thing twice."""
    known = set(_texts(train))
    return [each for each, text in zip(test, _texts(test), strict=True) if text not in known]


def without_openings(
    train: Iterable[TracedSequence], test: Sequence[TracedSequence]
) -> tuple[list[TracedSequence], int]:
    """`test` without the tokens up to which a training text is the same, and how many those were.

    The same tokens from the start are routed the same way: the opening of a chat template, in every chat, is known by
    heart. What is left of a text begins where it is its own.
    """
    known = {opening for each in train for opening in _openings(each)}
    kept, left_out = [], 0
    for each in test:
        shared = next(
            (length for length, opening in enumerate(_openings(each)) if opening not in known), len(each.tokens)
        )
        left_out += shared
        if shared < len(each.tokens):
            kept.append(_from(each, shared))
    return kept, left_out


def _openings(sequence: TracedSequence) -> Iterator[int]:
    """A number for the first token, the first two, the first three ...; equal for equal tokens."""
    opening = 0
    for token in sequence.tokens.tolist():
        opening = hash((opening, token))  # 64 bits of integers: the same in every process
        yield opening


def _from(sequence: TracedSequence, first: int) -> TracedSequence:
    states = sequence.states
    if states is not None:
        shared = None if states.shared is None else states.shared[first:]
        states = States(states.entering[first:], states.residual[first:], shared)
    return TracedSequence(
        sequence.prompt,
        sequence.tokens[first:],
        max(0, sequence.prompt_tokens - first),
        sequence.experts[first:],
        None if sequence.weights is None else sequence.weights[first:],
        states,
    )


def _texts(sequences: Iterable[TracedSequence]) -> Iterable[str]:
    for each in sequences:
        yield hashlib.sha256(each.tokens.astype("<i4").tobytes()).hexdigest()


def _prompts_of(shared: str, sequences: Sequence[TracedSequence]) -> str:
    """The prompt id behind an id or a text's hash."""
    for each, text in zip(sequences, _texts(sequences), strict=True):
        if shared in (each.prompt, text):
            return each.prompt
    return shared
