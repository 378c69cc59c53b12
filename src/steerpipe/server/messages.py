"""What the server and the engine process say to each other: frozen values, made by us from checked input.

They travel pickled through a private pipe between a parent and the child that it started. Nothing that came from the
network is unpickled: what a request holds has been parsed as JSON and is plain numbers and text by now.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from steerpipe.core.events import FinishReason, PromptEvent, Timings, TokenEvent
from steerpipe.core.pages import PageCounts
from steerpipe.core.quality import AnswerQuality, Substituted
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.engine import EngineLoad
from steerpipe.engine.request import Opening, Promise, Request
from steerpipe.engine.tokenizer import ChatMessage
from steerpipe.intake.edits import DraftEdit
from steerpipe.runtime.drafts import Warmth
from steerpipe.runtime.memory import MemoryRow
from steerpipe.runtime.prediction_state import PredictionState
from steerpipe.transfer.counters import LadderCounters

Ticket = NewType("Ticket", int)  # one sequence, as the server calls it; never used twice
DraftName = NewType("DraftName", int)  # one unfinished prompt, likewise


# --- to the engine


@dataclass(frozen=True, slots=True)
class Submit:
    """`draft`: the request is what that draft has become, and ends it. `promise`: its first tokens are told already."""

    ticket: Ticket
    request: Request
    draft: DraftName | None = None
    promise: Promise | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a sequence early; nothing is said of it any more. One that has ended already is left alone."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Observe:
    """Asks for one Observed. `watching`: somebody looks at the map, so from now on routing is noted for a while."""

    watching: bool = False


@dataclass(frozen=True, slots=True)
class SwitchPrediction:
    """Experts are moved before they are needed, or are not."""

    on: bool


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """The user's next turn after `messages` is being typed; it will be answered with these settings."""

    name: DraftName
    scope: str
    messages: tuple[ChatMessage, ...]
    settings: SamplingSettings
    batched: bool


@dataclass(frozen=True, slots=True)
class EditDraft:
    """Edits that fit the text; their times are on `time.monotonic`, which both processes share."""

    name: DraftName
    edits: tuple[DraftEdit, ...]


@dataclass(frozen=True, slots=True)
class CloseDraft:
    """The draft is given up, and nothing of it stays."""

    name: DraftName


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the process: running sequences are dropped, what was learnt is saved."""


ToEngine = Submit | Cancel | Observe | SwitchPrediction | OpenDraft | EditDraft | CloseDraft | Stop


# --- from the engine


@dataclass(frozen=True, slots=True)
class Loading:
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded; what the server has to know of it."""

    folder: str
    max_context: int
    max_batch: int
    vocab: int
    end_tokens: frozenset[int]
    defaults: SamplingSettings
    settings: tuple[tuple[str, str], ...]  # device, dtype …, for people
    memory: tuple[MemoryRow, ...]
    experts_resident: bool


class FailureKind(StrEnum):
    """Whose fault it is; the server turns it into an HTTP status."""

    INPUT = "input"
    CAPACITY = "capacity"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Failure:
    """A SteerpipeError as plain text: an exception with keyword arguments does not survive pickling."""

    kind: FailureKind
    what: str
    fix: str
    exit_status: int = 1


@dataclass(frozen=True, slots=True)
class LoadFailed:
    failure: Failure


@dataclass(frozen=True, slots=True)
class Told:
    """One event of one sequence."""

    ticket: Ticket
    event: TokenEvent | PromptEvent


@dataclass(frozen=True, slots=True)
class Ended:
    """The last word about a sequence that ended as it should.

    `experts` is what the memory ladder did between its submission and its end, for whomever; None: all are resident.
    `quality`: of its own expert uses; None: the engine is exact.
    """

    ticket: Ticket
    reason: FinishReason
    timings: Timings
    experts: LadderCounters | None
    quality: AnswerQuality | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The last word about a sequence that could not go on, or could never run."""

    ticket: Ticket
    failure: Failure


@dataclass(frozen=True, slots=True)
class Stepped:
    """All that came of one step."""

    told: tuple[Told | Ended | Failed, ...]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the engine's own time goes. `overhead`: everything in a step but forward passes and choosing tokens, in
    seconds in which its thread ran; what it waited meanwhile (for the pipe, for a core) is apart; `wall`: both."""

    steps: int
    compute_seconds: float
    waited_seconds: float
    overhead_seconds: float
    overhead_counts: tuple[int, ...]  # steps per bucket of OVERHEAD_SECONDS, and above
    wall_counts: tuple[int, ...]  # likewise


OVERHEAD_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


@dataclass(frozen=True, slots=True)
class Observed:
    """`map`: see `runtime.view`. `prediction`: None where nothing is ever predicted."""

    load: EngineLoad
    experts: LadderCounters | None
    times: StepTimes
    map: tuple[str, ...]
    prediction: PredictionState | None
    pages: PageCounts | None  # None: keys and values have memory of their own
    substituted: Substituted | None  # None: every answer is exact


@dataclass(frozen=True, slots=True)
class Warmed:
    """How well a draft is prepared now."""

    name: DraftName
    warmth: Warmth


@dataclass(frozen=True, slots=True)
class Begun:
    """How the answer to a draft begins, if it is sent as it stands: to be told then without asking the engine."""

    name: DraftName
    opening: Opening


FromEngine = Loading | Ready | LoadFailed | Stepped | Observed | Warmed | Begun
