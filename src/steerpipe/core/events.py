"""Frozen values that stages exchange. A recorded list of these is a replayable test."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from steerpipe.core.cover import Covered
    from steerpipe.core.errors import SteerpipeError
    from steerpipe.core.ids import SequenceId
    from steerpipe.core.quality import Substituted


class FinishReason(StrEnum):
    """Why a sequence ended. `STOP`: end token, stop token or stop string; `LENGTH`: token or context limit."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log probability (natural, before temperature and penalties)."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token of one sequence.

    `text` is what became printable with it: possibly nothing (an unfinished character, or the
    beginning of what may be a stop string), possibly more than one token's text.
    """

    sequence: "SequenceId"
    token_id: int
    text: str
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptEvent:
    """The prompt of a sequence is computed: told where its log probabilities, or the prompt alone, were asked for.

    `logprobs` are of every prompt token but the first, which nothing comes before. With a `finish_reason` the prompt
    was all that was wanted, and no token follows.
    """

    sequence: "SequenceId"
    logprobs: tuple[TokenLogprob, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """A sequence that cannot go on; it is answered with the error while the others continue."""

    sequence: "SequenceId"
    error: "SteerpipeError"


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """What one layer's router decided for the rows of one step; published to a RoutingSink.

    Rows are in the order of the step's batch; `experts` and `weights` are in the router's own rank order.
    """

    layer: int
    sequences: "tuple[SequenceId, ...]"  # one per row
    positions: "NDArray[np.int64]"  # [rows]
    experts: "NDArray[np.int64]"  # [rows, top_k]
    weights: "NDArray[np.float32]"  # [rows, top_k]


@dataclass(frozen=True, slots=True)
class Forecast:
    """How likely a layer is to need each of its experts, and when. Arrays: no object per expert on the hot path."""

    layer: int
    probability: "NDArray[np.float32]"  # [experts]
    needed_by_seconds: float  # on `time.perf_counter`


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one answer's time went; names as llama-server gives them, but for `queued_ms`."""

    prompt_n: int  # prompt tokens that were computed
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    cache_n: int = 0  # prompt tokens that an earlier request had computed
    queued_ms: float = 0.0  # before the first step


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    timings: Timings
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token when asked for
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = field(default=())
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of every prompt token but the first, when asked for
    prompt_top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    substituted: "Substituted | None" = None  # of its expert uses; None: the engine is exact
    covered: "Covered | None" = None  # its first tokens, where they did not wait for experts
