"""Random numbers as a function of (seed, position): nothing is stored, so nothing has to be kept in step.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the seed is the key, the position
is the low half of the counter, the high half is 0. A kernel gets the same words from `tl.philox(seed, lo, hi, 0, 0)` or
from curand; on the host it is plain integers, because one token needs one block (about 5 µs).
"""

import secrets

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block: four 32-bit words from a 128-bit counter and a 64-bit key, all as 32-bit words, lowest first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left = _MULTIPLIERS[0] * c0
        right = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _WORD, (left >> 32) ^ c3 ^ k1, left & _WORD
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def random_word(seed: int, position: int) -> int:
    """64 random bits for one position: `floor(total * word / 2**64)` is a draw below `total` in integers alone.

    Integers rather than a float because a GPU repeats them exactly (`umulhi`), whatever its rounding, and because the
    24 bits of fp32 (steps of 6e-8) are coarser than the rare tokens of a vocabulary of 150,000.
    """
    assert 0 <= seed < 2**64, f"a seed has 64 bits, not {seed}"
    assert 0 <= position < 2**64, f"a position has 64 bits, not {position}"
    low, high, _, _ = philox4x32((position & _WORD, position >> 32, 0, 0), (seed & _WORD, seed >> 32))
    return high << 32 | low


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: the top of the same word that `random_word` gives."""
    return (random_word(seed, position) >> 11) * 2.0**-53


def fresh_seed() -> int:
    """A 64-bit seed from the operating system, for a request that brings none."""
    return secrets.randbits(64)
