"""One prompt that is being typed: its text, the tokens of it that are certain, and what was computed of it so far."""

from dataclasses import dataclass, field
from typing import NewType

from steerpipe.core.ids import SequenceId
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.prefixes import as_bytes
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
PART_TOKENS = 4  # of a cell that is not complete are worth a step: what is left at Enter uses fewer experts


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
class Warmth:
    """How well a draft is prepared for Enter. Tokens are of the whole prompt, the turns before included."""

    typed_tokens: int  # as the text stands; estimated where more than a thousand characters of it are not stable
    stable_tokens: int  # of them, those that nothing typed at the end can change
    prefilled_tokens: int
    experts_ready: int  # of those that the answer's first tokens are expected to use
    experts_expected: int
    bytes_in_flight: int
    speculated_tokens: int  # of the answer, if Enter comes now
    saved_seconds: float  # spent on what is still good: what Enter would have to wait for otherwise
    too_long: bool = False  # for the context, by far: nothing is done for it
    crowded: bool = False  # other drafts hold the room: nothing more is computed of it until there is some


@dataclass(frozen=True, slots=True)
class Cell:
    """A request for the tokens up to the end of one cell, or so far as they are known."""

    sequence: SequenceId
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """What came of one."""

    tokens: int
    seconds: float
    routing: Routing | None


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
    parts: bool  # of a cell are computed too
    typed: Draft = field(default_factory=Draft)
    computed: tuple[int, ...] = ()  # tokens whose keys and values are kept
    computed_bytes: bytes = field(init=False)  # the same, to be compared with many prompts
    filled: dict[int, Filled] = field(default_factory=dict)  # its own cells, and parts of one, by where they end
    foreseen: tuple[int, int] | None = None  # version of the text, and tokens computed, at the last forecast
    filling: Cell | None = None
    begun: BegunAnswer | None = None
    failed: bool = False  # nothing more is tried until the text changes
    changed: bool = False  # since an answer was begun
    crowded: bool = False  # there was no room for more of it beside other drafts
    last_seconds: float = 0.0
    followed: int = 0  # version of the text that `prefix` knows
    counted: tuple[tuple[int, int], int] | None = None  # tokens of the tail, of this version and these stable tokens

    def __post_init__(self) -> None:
        self._compute(self.computed)

    def apply(self, edit: DraftEdit) -> None:
        """To the text alone: `follow` is due. Raises RequestError as `Draft.apply` does."""
        self.typed.apply(edit)
        self.failed = self.crowded = False
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
        """Where the next cell ends that can be computed, or the part of it that is known; None: there is none."""
        done = len(self.computed)
        end = min(done // CELL * CELL + CELL, len(self.prefix))
        whole = end % CELL == 0 and end > done
        part = self.parts and end - done >= PART_TOKENS
        return end if (whole or part) and not self.failed else None

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
        self.filled[len(cell.ids)] = Filled(len(cell.ids) - len(self.computed), seconds, routing)
        self._compute(cell.ids)

    def forget_from(self, length: int) -> None:
        """Only the first `length` tokens are as they were computed."""
        self._compute(self.computed[:length])
        self.filled = {end: filled for end, filled in self.filled.items() if end <= len(self.computed)}

    def _compute(self, ids: tuple[int, ...]) -> None:
        self.computed, self.computed_bytes = ids, as_bytes(ids)
