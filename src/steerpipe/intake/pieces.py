"""Where a tokenizer without a splitter must cut: sentencepiece's BPE, as Mixtral has it, in which a space is a ▁.

BPE joins two neighbours only into a token of its vocabulary. If no token holds x right before ▁, nothing ever joins
across that place, and the two sides become tokens as if each stood alone, whatever follows. Which characters x do
occur before a ▁ inside a token is read from the vocabulary; in released ones they are few or none.

Some of these tokenizers put a ▁ before every text. A part that begins at a cut begins with a space, so there the space
is left out, and the one that is put before the part takes its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steerpipe.intake.added_tokens import AddedTokens, Judgement, Verdict

_SPACE = "▁"
_PREPENDED = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": _SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    ],
}


@dataclass(frozen=True, slots=True)
class PieceRule:
    """`joined`: characters that stand before a ▁ inside some token. `prepends`: a ▁ is put before every text."""

    added: AddedTokens
    joined: frozenset[str]
    prepends: bool

    def cuts(self, before: str, after: str) -> bool:
        return after == " " and before not in self.joined

    def judge(self, left: str, right: str) -> Judgement:
        """Where a ▁ is put before every text: no added token may end before the space, or begin right after it."""
        judged = self.added.judge(left, right)
        if not self.prepends or judged.verdict is not Verdict.CLEAR:
            return judged
        if self.added.ends(left):  # another ▁ is put before the space there
            return Judgement(Verdict.CROSSED, judged.reach)
        after = self.added.begins(right[1:])
        return Judgement(after.verdict, max(judged.reach, 1 + after.reach))

    def part(self, text: str) -> str:
        return text.removeprefix(" ") if self.prepends else text


def read_piece_rule(definition: Mapping[str, Any], added: AddedTokens) -> PieceRule | None:
    """From a tokenizer.json; None if it is of another kind."""
    normalizer, splitter = definition.get("normalizer"), definition.get("pre_tokenizer")
    prepends = normalizer == _PREPENDED and splitter is None
    kept = {"type": "Metaspace", "replacement": _SPACE, "split": False}.items()  # whatever its prepend_scheme
    replaced = isinstance(splitter, Mapping) and kept <= splitter.items() and normalizer is None
    # Tokens that are looked for in the normalized text would have to be looked for with a ▁ put before them.
    normalized = any(token.get("normalized", True) for token in definition.get("added_tokens") or ())
    if not (prepends or replaced) or normalized:
        return None
    vocabulary = definition["model"]["vocab"]
    joined = {
        token[at - 1] for token in vocabulary if _SPACE in token for at in range(1, len(token)) if token[at] == _SPACE
    }
    return PieceRule(added, frozenset(joined | {" ", _SPACE}), prepends)
