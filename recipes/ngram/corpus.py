"""Documents → one array of character codes.

A chat is cut into its turns, each a text that a person (or something that answers one) wrote from START to END; any
other document is one text without END, since nobody pressed Enter there.
"""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steerpipe.intake.alphabet import END, OTHER, START, Alphabet

Codes = npt.NDArray[np.uint8]

# The share of each source's documents that is read. What people type is chat: books and code are there for their words.
SHARES = {"books": 0.5, "python": 0.2, "code_python": 0.2}
_TURN = re.compile(r"<\|im_start\|>\w+\n(.*?)<\|im_end\|>", re.DOTALL)
_COMMON = 28  # characters beyond ASCII that get a code


def read_texts(corpus: Path, pattern: str, share: float, seed: int) -> Iterator[tuple[str, bool]]:
    """(text, whether it ends with Enter). `share` scales the share of every source."""
    random = np.random.default_rng(seed)
    paths = sorted(corpus.glob(pattern))
    if not paths:
        raise FileNotFoundError(f"no {pattern} in {corpus}; a corpus is train-*.jsonl.gz of lines with src and text")
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                if random.random() >= share * SHARES.get(record["src"], 1.0):
                    continue
                if turns := _TURN.findall(record["text"]):
                    yield from ((turn, True) for turn in turns)
                else:
                    yield record["text"], False


def choose_alphabet(points: npt.NDArray[np.uint32]) -> Alphabet:
    """ASCII, and the commonest characters beyond it."""
    found, counts = np.unique(points[points > 126], return_counts=True)
    printable = np.array([chr(point).isprintable() for point in found], dtype=bool)
    found, counts = found[printable], counts[printable]
    common = found[np.argsort(-counts, kind="stable")][:_COMMON]
    return Alphabet("".join(map(chr, sorted(common.tolist()))))


def encode_texts(texts: list[tuple[str, bool]]) -> tuple[Codes, Alphabet]:
    """All texts, each between two STARTs, in one array."""
    # U+0001 and U+0002 stand for START and END until there is an alphabet; no text that people write has them.
    joined = "".join(f"\x01{text}\x02" if ends else f"\x01{text}" for text, ends in texts) + "\x01"
    points = np.frombuffer(joined.encode("utf-32-le", "replace"), dtype=np.uint32)
    alphabet = choose_alphabet(points)
    table = np.full(int(points.max()) + 1, OTHER, dtype=np.uint8)
    for character, code in alphabet.codes.items():
        if ord(character) < len(table):
            table[ord(character)] = code
    table[1], table[2] = START, END
    return table[points], alphabet
