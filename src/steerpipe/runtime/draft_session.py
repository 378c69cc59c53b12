"""One prompt that is being typed: its text, the tokens of it that are certain, and what was computed of it so far."""

from dataclasses import dataclass, field
from typing import NewType

from steerpipe.core.ids import SequenceId
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import ChatMessage
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import DraftEdit
from steerpipe.intake.pauses import before_enter
from steerpipe.intake.tokens import StablePrefix
from steerpipe.model.cells import CELL
from steerpipe.runtime.draft_routing import Routing

DraftId = NewType("DraftId", int)
AHEAD_TOKENS = 8  # of an answer that is begun in a pause


@dataclass(frozen=True, slots=True)
class DraftWork:
    """What is done for drafts. `ahead_tokens` 0: no answer is begun before Enter. `forecast`: experts are moved, and
    `guess`: as the unfinished end of the text says, too. `promote`: likely ones come from the disk into RAM first."""

    prefill: bool = True
    ahead_tokens: int = AHEAD_TOKENS
    forecast: bool = True
    guess: bool = True
    promote: bool = True


@dataclass(frozen=True, slots=True)
class Cell:
    """A request for the tokens up to the end of one cell."""

    sequence: SequenceId
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """An answer that is computed before anybody asked for it."""

    sequence: SequenceId
    request: Request


@dataclass(slots=True)
class DraftSession:
    """State only: `runtime.drafts` acts on it. Every token here is of the whole prompt, the turns before included."""

    id: DraftId
    scope: str
    messages: tuple[ChatMessage, ...]
    settings: SamplingSettings | None  # of the answer, where they are known
    batched: bool
    prefix: StablePrefix
    base: int  # tokens that were computed before the draft was opened: not its own
    most_characters: int  # of a text that is worked on: more cannot fit into the context
    typed: Draft = field(default_factory=Draft)
    computed: tuple[int, ...] = ()  # tokens whose keys and values are kept, in whole cells
    seconds: dict[int, float] = field(default_factory=dict)  # what each of its own cells took, by its last position
    routing: dict[int, Routing] = field(default_factory=dict)  # and where it was routed
    foreseen: tuple[int, int] | None = None  # version of the text, and tokens computed, at the last forecast
    filling: Cell | None = None
    begun: BegunAnswer | None = None
    failed: bool = False  # nothing more is tried until the text changes
    changed: bool = False  # since an answer was begun
    last_seconds: float = 0.0
    followed: int = 0  # version of the text that `prefix` knows
    counted: tuple[tuple[int, int], int] | None = None  # tokens of the tail, of this version and these stable tokens

    def apply(self, edit: DraftEdit) -> None:
        """To the text alone: `follow` is due. Raises RequestError as `Draft.apply` does."""
        self.typed.apply(edit)
        self.failed = False
        self.changed = True
        self.last_seconds = edit.seconds

    def follow(self) -> int:
        """Looks at what all edits since the last time have changed: how many of the stable tokens are so still."""
        changed_at = self.typed.unchanged_since(self.followed)
        self.followed = self.typed.version
        return self.prefix.follow(self.typed, changed_at).kept

    @property
    def too_long(self) -> bool:
        """Nothing is done for it until it is shorter."""
        return len(self.typed) > self.most_characters

    @property
    def next_cell(self) -> int | None:
        """Where the next cell ends that can be computed; None: there is none."""
        end = len(self.computed) + CELL
        return None if self.failed or end > len(self.prefix) else end

    @property
    def may_begin(self) -> bool:
        """Whether there is a text whose answer has not been begun."""
        open_question = self.changed and self.begun is None and not self.failed and self.settings is not None
        return open_question and bool(self.typed.slice(0, 256).strip())

    @property
    def pause_ends(self) -> float:
        """When the text may be taken as complete if no key comes."""
        end = self.typed.slice(max(0, len(self.typed) - 8), len(self.typed))
        return self.last_seconds + before_enter(end).quiet_seconds

    def fill(self, cell: Cell, seconds: float, routing: Routing | None) -> None:
        """A cell has been computed."""
        self.computed = cell.ids
        self.seconds[len(cell.ids)] = seconds
        if routing is not None:
            self.routing[len(cell.ids)] = routing

    def forget_from(self, length: int) -> None:
        """Only the first `length` tokens are as they were computed."""
        self.computed = self.computed[: length // CELL * CELL]
        self.seconds = {end: spent for end, spent in self.seconds.items() if end <= len(self.computed)}
        self.routing = {end: routed for end, routed in self.routing.items() if end <= len(self.computed)}
