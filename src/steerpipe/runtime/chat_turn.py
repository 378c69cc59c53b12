"""A turn of a chat: what is asked, the words of its answer, and how it went."""

import queue
from dataclasses import dataclass
from typing import Self, TypeAlias

from steerpipe.core.cover import Covered
from steerpipe.core.events import FinishReason
from steerpipe.core.ids import SequenceId
from steerpipe.core.quality import Substituted
from steerpipe.engine.request import Opening
from steerpipe.runtime.drafts import Warmth
from steerpipe.transfer.counters import LadderCounters


@dataclass(frozen=True, slots=True)
class TurnReport:
    """How one answer went. `experts`: what the memory ladder did from Enter on; None: every expert is resident."""

    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_token_seconds: float
    seconds: float  # from the first token to the last
    ahead_tokens: int
    saved_seconds: float
    finish_reason: FinishReason
    experts: LadderCounters | None
    covered: Covered | None = None  # its first tokens, where they did not wait for experts
    substituted: Substituted | None = None  # of its expert uses; None: the engine is exact


Words: TypeAlias = queue.SimpleQueue[str | TurnReport | Exception]


@dataclass(frozen=True, slots=True)
class Known:
    """How the answer to a text begins. One value, put in its place whole: the front reads it without a lock."""

    turn: int  # Enters and resets that the engine's thread had obeyed
    text: str
    opening: Opening


@dataclass(frozen=True, slots=True)
class Asked:
    """Enter. Times are `time.perf_counter`."""

    text: str
    words: Words
    entered: float
    opening: Opening | None = None  # was told at once
    first: float = 0.0  # when that was


@dataclass(slots=True)
class Turn:
    """The answer that is being given."""

    sequence: SequenceId
    asked: Asked
    warmth: Warmth
    experts: LadderCounters | None
    first: float  # when its first token was told; 0: not yet

    @property
    def told_tokens(self) -> int:
        """That were told at Enter, before the engine heard of it."""
        return 0 if self.asked.opening is None else len(self.asked.opening.events)

    @property
    def ahead_tokens(self) -> int:
        """That were there at Enter."""
        return max(self.told_tokens, self.warmth.speculated_tokens)


class Answer:
    """The text of one answer as it comes, and last how it went. Raises what it failed with.

    It is no generator: an interrupt while it waits does not end it.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str | TurnReport:
        if self._ended:
            raise StopIteration
        word = self._words.get()
        self._ended = not isinstance(word, str)
        if isinstance(word, Exception):
            raise word
        return word
