r"""Where a byte-level tokenizer must cut a text, whatever is typed after it.

Such a tokenizer cuts at added tokens, then by a regular expression without lookbehind, left to right, and turns each
piece into tokens by itself. So a place between x and y is final (what stands before it becomes the same tokens as if
the text ended there, what stands after it the same as if the text began there, whatever follows y) if no match can
hold x and y together, and none that ends there asks what comes next. These pairs were checked for each of the
expressions below, alternative by alternative:

    letter | ASCII that is no letter   runs of letters end at y; only o200k goes on, with an apostrophe
    digit  | ASCII that is no digit    runs of digits end at y
    punctuation | space or digit       runs of punctuation end at y; line breaks, or in o200k slashes, would go on
    line break  | visible ASCII        the white space ends at y; o200k goes on with a slash, after punctuation; GPT-2
                                       asks what comes next, so there it is no such place

Only characters whose class is beyond doubt count: y is ASCII, or one of a few marks of Chinese and Japanese, and so
never joins what stands before it under NFC either; x is ASCII or a letter since Unicode 3.2.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_letters, digits, punctuation
from typing import Any

from steerpipe.intake.added_tokens import AddedTokens, Judgement, read_added_tokens
from steerpipe.intake.pieces import read_piece_rule
from steerpipe.intake.rules import BoundaryRule

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_END}": "qwen",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_END}": "cl100k",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|{_END}".replace(
        r"[^\s\p{L}", r"[^\s\p{L}\p{M}"
    ): "qwen3.5",
    _O200K: "o200k",
}
_ASCII = frozenset(map(chr, range(128)))
_MARKS = frozenset("，。！？；：、（）「」『』《》")  # punctuation that NFC leaves as it is
_AFTER_LETTER = (_ASCII - set(ascii_letters)) | _MARKS
_AFTER_DIGIT = (_ASCII - set(digits)) | _MARKS
_AFTER_PUNCTUATION = frozenset(" " + digits)
_AFTER_BREAK = frozenset(ascii_letters + digits + punctuation)
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SplitRule:
    """`name`: of the expression."""

    name: str
    added: AddedTokens

    def cuts(self, before: str, after: str) -> bool:
        return after in _followers(self.name, before)

    def judge(self, left: str, right: str) -> Judgement:
        return self.added.judge(left, right)

    def part(self, text: str) -> str:
        return text


def read_rule(definition: Mapping[str, Any]) -> BoundaryRule | None:
    """The rule of a tokenizer, from its tokenizer.json; None where nothing was proved about it."""
    added = read_added_tokens(definition)
    model = definition.get("model") or {}
    if added is None or model.get("type") != "BPE" or model.get("dropout"):
        return None
    name = _pattern(definition.get("pre_tokenizer"))
    if name is None:
        return read_piece_rule(definition, added)
    plain = definition.get("normalizer") in (None, {"type": "NFC"})
    return SplitRule(name, added) if plain else None


def _pattern(splitter: Any) -> str | None:
    """Which expression cuts the text: the byte-level splitter's own (GPT-2's), or one that stands before it."""
    stages: Sequence[Any] = [splitter]
    if isinstance(splitter, Mapping) and splitter.get("type") == "Sequence":
        stages = splitter["pretokenizers"]
    if not stages or not all(isinstance(stage, Mapping) for stage in stages):
        return None
    first, last = stages[0], stages[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    own = last.get("use_regex", True)
    if len(stages) == 1:
        return "gpt2" if own else None
    if len(stages) > 2 or first.get("invert") or first.get("behavior", "Isolated") != "Isolated":
        return None
    if first.get("type") == "Digits" and first.get("individual_digits"):
        return "gpt2" if own else None
    regex = first.get("pattern", {}).get("Regex") if first.get("type") == "Split" else None
    return None if own else _PATTERNS.get(str(regex))


@lru_cache(maxsize=4096)
def _followers(name: str, before: str) -> frozenset[str]:
    """What `before` can never share a piece with."""
    if before in digits:
        return _AFTER_DIGIT
    if before in punctuation:
        return _AFTER_PUNCTUATION
    if before in "\r\n":
        return {"gpt2": _NONE, "o200k": _AFTER_BREAK - {"/"}}.get(name, _AFTER_BREAK)
    if _is_letter(before):
        return _AFTER_LETTER - {"'"} if name == "o200k" else _AFTER_LETTER
    return _NONE


def _is_letter(character: str) -> bool:
    old, new = unicodedata.ucd_3_2_0.category(character), unicodedata.category(character)
    return old[0] == new[0] == "L" and unicodedata.is_normalized("NFC", character)
