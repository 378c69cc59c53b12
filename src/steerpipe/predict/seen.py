"""Which prompts a predictor has learnt from: a short digest of each, enough to refuse a test on one of them."""

import base64
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_BYTES = 4  # of a digest: 4,000 prompts take 21 KB in a file, and one of 1,000 others is taken for one of them in .1 %


def prompt_digest(tokens: Sequence[int] | NDArray[np.int32]) -> str:
    """Of a prompt's token ids, the answer left out."""
    whole = np.asarray(tokens, dtype="<i4").tobytes()
    return hashlib.blake2b(whole, digest_size=_BYTES).hexdigest()


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
