"""What the engine said of each choice, gathered, and the figures that go with an answer."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from steerpipe.core.events import PromptEvent, TokenEvent
from steerpipe.core.quality import AnswerQuality, Substituted
from steerpipe.server.answers import Word
from steerpipe.server.asking import Asked
from steerpipe.server.faults import api_error
from steerpipe.server.messages import Ended, Failed
from steerpipe.transfer.counters import LadderCounters


@dataclass(slots=True)
class Outcome:
    """One choice."""

    tokens: list[TokenEvent] = field(default_factory=list)
    prompt: PromptEvent | None = None
    ended: Ended | None = None

    def add(self, word: Word) -> None:
        """Raises ApiError for a failure."""
        if isinstance(word, Failed):
            raise api_error(word.failure)
        if isinstance(word, Ended):
            self.ended = word
        elif isinstance(word.event, PromptEvent):
            self.prompt = word.event
        else:
            self.tokens.append(word.event)

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def finish_reason(self) -> str | None:
        return None if self.ended is None else self.ended.reason.value


def usage_json(asked: Asked, outcomes: Sequence[Outcome], reasoning_tokens: int | None = None) -> dict[str, Any]:
    """A prompt counts once, however many choices it has; cached is what its first choice found."""
    prompt_tokens = sum(len(request.prompt_ids) for request in asked.prompts)
    completion_tokens = sum(len(outcome.tokens) for outcome in outcomes)
    first = [outcome.ended for outcome in outcomes[:: asked.choices]]
    cached = sum(ended.timings.cache_n for ended in first if ended is not None)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


def figures_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """`timings`, `experts` and `quality`. Of several choices: tokens are summed, times are those of the slowest."""
    timings = [outcome.ended.timings for outcome in outcomes if outcome.ended is not None]
    if not timings:
        return {}
    prompt_ms, predicted_ms = max(t.prompt_ms for t in timings), max(t.predicted_ms for t in timings)
    prompt_n, predicted_n = sum(t.prompt_n for t in timings), sum(t.predicted_n for t in timings)
    decoded = predicted_n - len(timings)  # the first token of each comes with its prompt
    experts = [outcome.ended.experts for outcome in outcomes if outcome.ended is not None]
    return {
        "timings": {
            "cache_n": sum(t.cache_n for t in timings),
            "prompt_n": prompt_n,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_second": round(prompt_n / prompt_ms * 1e3, 3) if prompt_ms else None,
            "predicted_n": predicted_n,
            "predicted_ms": round(predicted_ms, 3),
            "predicted_per_second": round(decoded / predicted_ms * 1e3, 3) if predicted_ms else None,
            "queued_ms": round(max(t.queued_ms for t in timings), 3),
        },
        "experts": experts_json(experts[-1]),
        "quality": quality_json([outcome.ended.quality for outcome in outcomes if outcome.ended is not None]),
    }


def quality_json(choices: Sequence[AnswerQuality | None]) -> dict[str, Any] | None:
    """The form of `generate --json`, all choices together; null: exact."""
    found = [each for each in choices if each is not None]
    if not found:
        return None
    return replace(found[0], counts=sum((each.counts for each in found), Substituted())).as_json()


def experts_json(counters: LadderCounters | None) -> dict[str, Any] | None:
    """What the ladder did while the answer waited and ran, for all that ran with it; null: all experts are resident."""
    if counters is None:
        return None
    return {
        "leased": counters.leased,
        "hits": counters.hits,
        "late": counters.late,
        "misses": counters.misses,
        "evictions": counters.evictions,
        "read_bytes": counters.read_bytes,
        "stall_ms": round(counters.stall_seconds * 1e3, 3),
        "late_ms": round(counters.late_seconds * 1e3, 3),
        "saved_ms": saved_ms(counters),
        "by_reason": {name: asdict(getattr(counters, name)) for name in ("demand", "prefetch", "draft")},
    }


def saved_ms(counters: LadderCounters) -> float | None:
    """An estimate: every guess that was there in time would have waited as long as a miss did, on average, meanwhile.

    Null where nobody knows what a miss costs.
    """
    if counters.miss_seconds is None:
        return None
    guessed = counters.prefetch.hits + counters.draft.hits
    return round(guessed * counters.miss_seconds * 1e3, 3)
