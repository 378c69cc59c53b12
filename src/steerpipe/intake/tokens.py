"""The tokens of an unfinished prompt that nothing typed at its end can change.

They end at a place where the tokenizer must cut (`boundaries`), so they lag behind the text by a word or so. An edit
before that place takes back the tokens from there on. A tokenizer about which nothing was proved gives only what
stands before the text: the tokens of the prompt's head up to its last special token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steerpipe.intake.added_tokens import AddedTokens, Verdict
from steerpipe.intake.draft import Draft, TypedText
from steerpipe.intake.frame import PromptFrame
from steerpipe.intake.rules import BoundaryRule

_WINDOW = 512  # characters looked at in one call, some 0.2 ms: a paste does not stop the typing
_SEGMENT = 256  # characters between two places that are remembered, where the text is longer than a word

Encode = Callable[[str], Sequence[int]]  # without the tokens that a tokenizer puts around a text


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """The first `kept` tokens are as they were before the call; there are `total` now."""

    kept: int
    total: int


@dataclass(frozen=True, slots=True)
class _Cut:
    position: int  # in the prompt
    tokens: int  # before it
    reach: int  # characters of the prompt that this cut and those before it rest on


class StablePrefix:
    """Follows one draft. `lead`: tokens before the prompt's text, such as a BOS that the tokenizer adds."""

    def __init__(
        self, frame: PromptFrame, rule: BoundaryRule | None, encode: Encode,
        *, added: AddedTokens | None = None, lead: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Without a `rule`, `added` tells the head's special tokens; without either, no token is ever stable."""
        self._frame = frame
        self._rule = rule
        self._encode = encode
        self._typed: TypedText = Draft()
        self._ids = list(lead)
        self._cuts = [_Cut(0, len(self._ids), 0)]
        self._looked = 1  # places before this one, and after the last cut, are known to be none
        self._seen = 0  # characters of the prompt that were looked at
        self._skipped = 0  # characters of white space that the template strips from the beginning of the text
        self._end = len(frame.head)  # of the prompt as far as it is known: head and text, without what is stripped
        if rule is not None:
            while self.behind:
                self._look(rule)
        elif added is not None and (end := added.last_end(frame.head)):
            self._append(end, end)

    def __len__(self) -> int:
        """How many tokens are stable."""
        return len(self._ids)

    @property
    def ids(self) -> tuple[int, ...]:
        """All stable tokens."""
        return tuple(self._ids)

    def first(self, count: int) -> tuple[int, ...]:
        """The first `count` of them, or as many as there are."""
        return tuple(self._ids[:count])

    def ids_from(self, first: int) -> list[int]:
        """The stable tokens from number `first` on."""
        return self._ids[first:]

    @property
    def tail(self) -> str:
        """The prompt after the stable tokens, as far as it is typed: what is left of the head, and of the text."""
        return self._read(self._cuts[-1].position, self._end)

    @property
    def tail_length(self) -> int:
        """Characters of the tail."""
        return self._end - self._cuts[-1].position

    @property
    def tail_begins(self) -> int:
        """The character of the typed text with which the tail begins; 0 where it begins in the head."""
        return max(0, self._cuts[-1].position - len(self._frame.head) + self._skipped)

    @property
    def behind(self) -> bool:
        """Whether part of the text has not been looked at."""
        return self._rule is not None and self._seen < self._end

    def follow(self, typed: TypedText, changed_at: int) -> PrefixChange:
        """Call this after an edit, or after several with the first place that they have changed.

        Looks at 512 characters at most; `advance` goes on while `behind`.
        """
        self._typed = typed
        if self._rule is None:
            return PrefixChange(len(self._ids), len(self._ids))
        taken = self._take_back(changed_at)
        change = self.advance()
        again = self._ids[change.kept : change.kept + len(taken)]  # often the first of them come back as they were
        same = next((i for i, (old, new) in enumerate(zip(taken, again, strict=False)) if old != new), len(again))
        return PrefixChange(change.kept + same, change.total)

    def advance(self) -> PrefixChange:
        """Looks at the next 512 characters."""
        kept = len(self._ids)
        if self._rule is not None:
            self._look(self._rule)
        return PrefixChange(kept, len(self._ids))

    def _take_back(self, changed_at: int) -> list[int]:
        """Drops the cuts that rest on what has changed, and the tokens after them, which it gives back."""
        head = len(self._frame.head)
        if self._frame.strips_left and changed_at <= self._skipped:
            self._skipped, changed = self._leading_space(), head
        else:
            changed = head + changed_at - self._skipped
        self._end = head + max(0, len(self._typed) - self._skipped)
        if self._frame.strips_right:
            self._end = self._without_trailing_space(head)
        changed = min(changed, self._end)
        while len(self._cuts) > 1 and self._cuts[-1].reach > changed:
            self._cuts.pop()
        taken = self._ids[self._cuts[-1].tokens :]
        del self._ids[self._cuts[-1].tokens :]
        if changed < self._looked:  # also places that were passed over, or given up, may be good ones now
            self._looked = self._cuts[-1].position + 1
        self._seen = min(self._seen, changed)
        return taken

    def _look(self, rule: BoundaryRule) -> None:
        """Finds the places in the next window, and makes tokens of what lies before the last of them."""
        begin = max(self._cuts[-1].position + 1, self._looked)
        text = self._read(begin - 1, begin + _WINDOW)
        self._seen = begin - 1 + len(text)
        self._looked = max(begin, self._seen)
        found: tuple[int, int] | None = None  # the last place in the window, and its reach
        for place in range(begin, begin - 1 + len(text)):
            if not rule.cuts(text[place - begin], text[place - begin + 1]):
                continue
            around = rule.added.longest
            judged = rule.judge(self._read(place - around, place), self._read(place, place + around + 1))
            if judged.verdict is Verdict.OPEN:
                self._looked = min(self._looked, place)
            elif judged.verdict is Verdict.CLEAR:
                if found is not None and place - self._cuts[-1].position > _SEGMENT:
                    self._append(*found)
                found = place, place + judged.reach
        if found is not None:
            self._append(*found)

    def _append(self, place: int, reach: int) -> None:
        last = self._cuts[-1]
        text = self._read(last.position, place)
        part = text if self._rule is None or last.position == 0 else self._rule.part(text)
        self._ids.extend(self._encode(part))
        self._cuts.append(_Cut(place, len(self._ids), max(last.reach, reach)))

    def _read(self, begin: int, end: int) -> str:
        """Of the prompt."""
        head, begin, end = self._frame.head, max(0, begin), min(end, self._end)
        if begin >= end:
            return ""
        skipped = self._skipped - len(head)
        typed = self._typed.slice(max(begin, len(head)) + skipped, end + skipped) if end > len(head) else ""
        return head[begin:end] + typed

    def _leading_space(self) -> int:
        begin = 0
        while window := self._typed.slice(begin, begin + _WINDOW):
            if rest := window.lstrip():
                return begin + len(window) - len(rest)
            begin += len(window)
        return begin

    def _without_trailing_space(self, head: int) -> int:
        end = self._end
        while end > head:
            window = self._read(max(head, end - _WINDOW), end)
            if rest := window.rstrip():
                return end - len(window) + len(rest)
            end -= len(window)
        return head
