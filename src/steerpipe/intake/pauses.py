"""When to act on a draft, and how fast a person types. Pure: `now` is an argument, on the clock of the edits."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from steerpipe.intake.edits import DraftEdit, EditKind

# Above this a gap is thinking, not typing. Of the gaps between keys of 4,992 writers 90 % were under 0.61 s.
_THINKING_SECONDS = 2.0
_SENTENCE_ENDS = frozenset(".?!。？！")
_HALF_LIFE_SECONDS = 60.0  # of typing: a person's speed is that of the last minutes


@dataclass(frozen=True, slots=True)
class Debounce:
    """Acts when nothing was typed for `quiet_seconds`, and at the latest `longest_seconds` after the first new key."""

    quiet_seconds: float
    longest_seconds: float = math.inf

    def __post_init__(self) -> None:
        assert 0 <= self.quiet_seconds <= self.longest_seconds, f"{self}"

    def seconds_left(self, first_seconds: float, last_seconds: float, now: float) -> float:
        """Until it is time; 0 when it is. `first` and `last`: of the edits that were not acted on."""
        due = min(last_seconds + self.quiet_seconds, first_seconds + self.longest_seconds)
        return max(0.0, due - now)


SPECULATIVE_ENTER = Debounce(0.25)  # a pause in which the text may be complete
# After a mark that ends a sentence Enter often comes within a quarter of a second, as the next key does.
COMPLETE_SENTENCE = Debounce(0.03)
FORECAST = Debounce(0.03, 0.25)  # keys of one word come 0.08 to 0.17 s apart: one forecast each, none twice


def before_enter(end: str) -> Debounce:
    """How long to wait before a text that ends like that is taken as complete."""
    return COMPLETE_SENTENCE if end.rstrip()[-1:] in _SENTENCE_ENDS else SPECULATIVE_ENTER


# The median of 159 writers of the KLiCKe corpus at the end of an essay, with 4.2 characters to a token of nano's; a
# tenth of them were below 0.4, a tenth above 1.07.
USUAL_TOKENS_PER_SECOND = 0.65
USUAL_CHARACTERS_PER_TOKEN = 4.2


@dataclass(frozen=True, slots=True)
class TypingPace:
    """How fast a person types: characters that stay, over the time in which keys came. Starts without an opinion."""

    characters: float = 0.0
    seconds: float = 0.0

    def after(self, gap_seconds: float, characters: int) -> "TypingPace":
        """With one more edit, `gap_seconds` after the one before, that made the text longer by `characters`.

        A pause counts as no longer than two seconds; what was deleted counts against; a paste is not typing, so leave
        it out.
        """
        gap = min(max(0.0, gap_seconds), _THINKING_SECONDS)
        kept = 0.5 ** (gap / _HALF_LIFE_SECONDS)
        return TypingPace(max(0.0, self.characters * kept + characters), self.seconds * kept + gap)

    @classmethod
    def of(cls, edits: Iterable[DraftEdit]) -> "TypingPace":
        """Of a whole session."""
        pace = cls()
        last_seconds: float | None = None
        for edit in edits:
            if last_seconds is not None and edit.kind is not EditKind.PASTE:
                removed = 0 if edit.kind is EditKind.MOVE else edit.removed
                pace = pace.after(edit.seconds - last_seconds, len(edit.text) - removed)
            last_seconds = edit.seconds
        return pace

    def tokens_per_second(self, characters_per_token: float) -> float | None:
        """None before anything was typed."""
        assert characters_per_token > 0, f"{characters_per_token} characters per token"
        if not self.seconds or not self.characters:
            return None
        return self.characters / self.seconds / characters_per_token
