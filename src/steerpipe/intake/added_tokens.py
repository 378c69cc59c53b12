"""Tokens that a tokenizer cuts out of a text before anything else, such as `<|im_end|>`: a person may type one."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from steerpipe.intake.prefixes import common_length


class Verdict(StrEnum):
    """What added tokens say of a place in a text. OPEN: one may still come to lie across it."""

    CLEAR = "clear"
    OPEN = "open"
    CROSSED = "crossed"


_ORDER = list(Verdict)


@dataclass(frozen=True, slots=True)
class Judgement:
    """`reach`: how many characters after the place it rests on."""

    verdict: Verdict
    reach: int


@dataclass(frozen=True)
class AddedTokens:
    """`greedy`: those that also take white space beside them, or ask what stands there."""

    contents: tuple[str, ...]
    greedy: frozenset[str]

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.contents), default=0)

    def judge(self, left: str, right: str) -> "Judgement":
        """Of the place between `left` and `right`, the text around it: `longest` characters each way are enough."""
        verdict, reach = Verdict.CLEAR, 1
        for content, split in self._pairs.get((left[-1:], right[:1]), ()):
            if left.endswith(content[:split]):
                found, used = _meets(right, content[split:])
                verdict, reach = max(verdict, found, key=_ORDER.index), max(reach, used)
        for content in self.greedy:
            found, used = _meets(right, content)
            if left.endswith(content) or found is not Verdict.CLEAR:
                return Judgement(Verdict.CROSSED, reach)
            reach = max(reach, used)
        return Judgement(verdict, reach)

    def begins(self, text: str) -> Judgement:
        """Whether one begins `text`: CROSSED; or may yet: OPEN."""
        verdict, reach = (Verdict.CLEAR, 1) if text else (Verdict.OPEN, 0)
        for content in self.contents:
            found, used = _meets(text, content)
            verdict, reach = max(verdict, found, key=_ORDER.index), max(reach, used)
        return Judgement(verdict, reach)

    def ends(self, text: str) -> bool:
        """Whether one ends `text`."""
        return text.endswith(self.contents)

    def last_end(self, text: str) -> int:
        """Where the last one in `text` ends for good, whatever follows; 0 without one."""
        for end in range(len(text), 0, -1):
            left = text[:end]
            if not any(left.endswith(content) for content in self.contents if content not in self.greedy):
                continue
            across = (
                left.endswith(content[:split]) and _meets(text[end:], content[split:])[0] is not Verdict.CLEAR
                for content in self.contents
                for split in range(1, len(content))
            )
            if not any(across):
                return end
        return 0

    @cached_property
    def _pairs(self) -> dict[tuple[str, str], list[tuple[str, int]]]:
        """By two neighbouring characters: which contents have them inside, and where."""
        pairs: dict[tuple[str, str], list[tuple[str, int]]] = {}
        for content in self.contents:
            for split in range(1, len(content)):
                pairs.setdefault((content[split - 1], content[split]), []).append((content, split))
        return pairs


def _meets(text: str, rest: str) -> tuple[Verdict, int]:
    """Whether `text` begins with `rest` (CROSSED), may once more is typed (OPEN), or cannot; how much of it says so."""
    same = common_length(text, rest)
    if same == len(rest):
        return Verdict.CROSSED, same
    return (Verdict.OPEN, same) if same == len(text) else (Verdict.CLEAR, same + 1)


def read_added_tokens(definition: Mapping[str, Any]) -> AddedTokens | None:
    """From a tokenizer.json; None if they are matched in a text that a normalizer may have changed before."""
    tokens = [token for token in definition.get("added_tokens") or () if token["content"]]
    if definition.get("normalizer") is not None and not all(
        token["content"].isascii() for token in tokens if token.get("normalized", True)
    ):
        return None
    return AddedTokens(
        contents=tuple(token["content"] for token in tokens),
        greedy=frozenset(
            token["content"] for token in tokens
            if token.get("lstrip") or token.get("rstrip") or token.get("single_word")
        ),
    )  # fmt: skip
