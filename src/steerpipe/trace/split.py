"""Which prompts are held out. By prompt, never by token: tokens of one prompt know each other."""

import hashlib
from collections.abc import Iterable

from steerpipe.core.errors import InputError


def split_prompts(prompts: Iterable[str], held_out: float = 0.15, seed: int = 0) -> tuple[list[str], list[str]]:
    """(train, test), each in the given order, without repeats. A prompt's side depends on its id and the seed alone:
    more prompts move nobody. InputError: a side would be empty."""
    if not 0 < held_out < 1:
        raise InputError(f"a share of {held_out} cannot be held out", fix="give a share between 0 and 1, such as .15")
    train: list[str] = []
    test: list[str] = []
    for prompt in dict.fromkeys(prompts):
        (test if _draw(prompt, seed) < held_out else train).append(prompt)
    if not train or not test:
        raise InputError(
            f"of {len(train) + len(test)} prompts {len(test)} would be held out",
            fix="give more prompts, or another seed",
        )
    return train, test


def _draw(prompt: str, seed: int) -> float:
    """Even over [0, 1)."""
    digest = hashlib.blake2b(f"{seed}:{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
