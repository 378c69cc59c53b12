"""Trains the character model that ships with steerpipe.

    python -m recipes.ngram --corpus CORPUS --out src/steerpipe/assets/ngram.npz

CORPUS holds train-*.jsonl.gz (and heldout.jsonl.gz, to score the result on), lines of {"src", "text"}, chats in ChatML.
Takes two minutes of one core and 5 GB of memory for 72 million characters; --share 0.1 is a try.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

from recipes.ngram.corpus import encode_texts, read_texts
from recipes.ngram.count import Level, count_levels
from recipes.ngram.fit import fit
from recipes.ngram.store import packed_model
from steerpipe.intake.alphabet import Alphabet
from steerpipe.intake.ngram import CharacterModel

_ROUNDS = 9  # of halving the interval of thresholds


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m recipes.ngram", description=__doc__, allow_abbrev=False)
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    top.add_argument("--corpus", type=Path, required=True)
    top.add_argument("--out", type=Path, required=True)
    top.add_argument("--most-bytes", type=int, default=1_750_000, help="of the file (default: %(default)s)")
    top.add_argument("--orders", type=int, default=12, help="characters of the longest n-gram (default: %(default)s)")
    top.add_argument("--least", type=int, default=10, help="occurrences of an n-gram of four characters or more")
    top.add_argument("--share", type=float, default=1.0, help="of the corpus to read (default: %(default)s)")
    top.add_argument("--seed", type=int, default=0, help="of which documents that is")
    return top


def fit_within(levels: list[Level], alphabet: Alphabet, most_bytes: int) -> tuple[bytes, float]:
    """The largest model that is no larger than that, and the threshold in bits that made it."""
    low, high = 0.0, 14.0  # binary logarithms of the threshold
    best: tuple[bytes, float] | None = None
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        packed = packed_model(alphabet, fit(levels, 2.0**middle))
        if len(packed) <= most_bytes:
            best, high = (packed, 2.0**middle), middle
        else:
            low = middle
    if best is None:
        raise ValueError(f"no model of these n-grams fits in {most_bytes} bytes")
    return best


def bits_per_character(model: CharacterModel, texts: list[str]) -> float:
    bits, characters = 0.0, 0
    for text in texts:
        context = model.context("")
        for code in model.alphabet.encode(text):
            bits -= math.log2(model.probability(context, code))
            context = model.follow(context, code)
        characters += len(text)
    return bits / max(1, characters)


def main(arguments: list[str]) -> int:
    given = parser().parse_args(arguments)
    texts = list(read_texts(given.corpus, "train-*.jsonl.gz", given.share, given.seed))
    codes, alphabet = encode_texts(texts)
    print(f"{len(texts):,} texts, {len(codes):,} characters", file=sys.stderr)
    levels = count_levels(codes, given.orders, given.least)
    print(f"{sum(map(len, levels)):,} n-grams of up to {len(levels)} characters", file=sys.stderr)
    packed, threshold = fit_within(levels, alphabet, given.most_bytes)
    partial = given.out.with_suffix(".partial")
    partial.write_bytes(packed)
    os.replace(partial, given.out)
    model = CharacterModel.load(given.out)
    figures = {"bytes": len(packed), "ngrams": model.ngrams, "order": model.order, "threshold_bits": threshold}
    if (given.corpus / "heldout.jsonl.gz").exists():
        held_out = [text[:500] for text, ends in read_texts(given.corpus, "heldout.jsonl.gz", 1.0, 0) if ends][:2000]
        figures["heldout_turns_bits_per_character"] = bits_per_character(model, held_out)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
