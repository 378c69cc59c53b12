"""Which prompts a predictor has learnt from: a short digest of each, enough to refuse a test on one of them."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_BYTES = 4  # of a digest: 4,000 prompts take 21 KB in a file, and one of 1,000 others is taken for one of them in .1 %


class Prompted(Protocol):
    """A text or a window of one."""

    @property
    def prompt(self) -> str: ...  # its id
    @property
    def tokens(self) -> Sequence[int] | NDArray[np.int32]: ...
    @property
    def prompt_tokens(self) -> int: ...  # the first of them; the rest was generated


def prompt_digest(tokens: Sequence[int] | NDArray[np.int32]) -> str:
    """Of a prompt's token ids, the answer left out."""
    whole = np.asarray(tokens, dtype="<i4").tobytes()
    return hashlib.blake2b(whole, digest_size=_BYTES).hexdigest()


def prompt_digests(sequences: Iterable[Prompted]) -> dict[str, str]:
    """Of whole prompts, by their ids: windows of one prompt are joined, so that it is the same however it was cut.

    A prompt's windows come in their order. A piece of an answer is no prompt.
    """
    parts: dict[str, list[NDArray[np.int32]]] = {}
    for each in sequences:
        if each.prompt_tokens:
            parts.setdefault(each.prompt, []).append(np.asarray(each.tokens[: each.prompt_tokens], dtype="<i4"))
    return {prompt: prompt_digest(np.concatenate(pieces)) for prompt, pieces in parts.items()}


def pack_digests(digests: Iterable[str]) -> str:
    """As text for a file's metadata."""
    return base64.b64encode(bytes.fromhex("".join(sorted(digests)))).decode()


def unpack_digests(text: str) -> frozenset[str]:
    """ValueError: no such text."""
    whole = base64.b64decode(text, validate=True).hex()
    width = 2 * _BYTES
    if len(whole) % width:
        raise ValueError(f"{len(whole) // 2} bytes are no whole number of digests")
    return frozenset(whole[start : start + width] for start in range(0, len(whole), width))
