"""The words of `/v1/chat/completions`: a whole answer, or chunks of it."""

from collections.abc import Iterator, Sequence
from typing import Any

from steerpipe.core.events import FinishReason, TokenEvent
from steerpipe.server.asking import Asked
from steerpipe.server.outcomes import Outcome, figures_json, usage_json
from steerpipe.server.pieces import TokenTexts
from steerpipe.server.think import Split, ThinkSplitter


class ChatWriter:
    """Writes one HTTP request's answers in OpenAI's form. `head` is what every object begins with (id, created …)."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, asked: Asked, texts: TokenTexts, hidden: frozenset[int], head: dict[str, Any]) -> None:
        self._asked = asked
        self._texts = texts
        self._hidden = hidden
        self._head = head
        self._splitters = [ThinkSplitter(inside=asked.thinks) for _ in asked.requests]
        self._reasoning_tokens = 0

    def whole(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        choices = [self._choice(place, outcome) for place, outcome in enumerate(outcomes)]
        usage = usage_json(self._asked, outcomes, self._reasoning_tokens)
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage, **figures_json(outcomes)}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks before the first token."""
        for place in range(len(self._asked.requests)):
            yield self._chunk(place, {"role": "assistant", "content": ""})

    def token(self, place: int, event: TokenEvent) -> Iterator[dict[str, Any]]:
        """Chunks of one token: none where it has nothing to show yet."""
        split = self._split(place, event)
        logprobs = self._logprobs([event])
        if split.reasoning:
            yield self._chunk(place, {"reasoning_content": split.reasoning})
        if split.content or logprobs is not None:
            yield self._chunk(place, {"content": split.content}, logprobs)

    def prompt(self, place: int, outcome: Outcome) -> Iterator[dict[str, Any]]:
        yield from ()

    def end(self, place: int, outcome: Outcome) -> dict[str, Any]:
        return self._chunk(place, {}, finish_reason=outcome.finish_reason)

    def closing(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """The chunk with `usage`, where it was asked for."""
        usage = usage_json(self._asked, outcomes, self._reasoning_tokens)
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}

    def _choice(self, place: int, outcome: Outcome) -> dict[str, Any]:
        parts = [self._split(place, event) for event in outcome.tokens]
        reasoning = "".join(part.reasoning for part in parts)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(part.content for part in parts)}
        if reasoning:
            message["reasoning_content"] = reasoning
        return {
            "index": place,
            "message": message,
            "logprobs": self._logprobs(outcome.tokens),
            "finish_reason": outcome.finish_reason,
        }

    def _split(self, place: int, event: TokenEvent) -> Split:
        splitter = self._splitters[place]
        split = splitter.push(event.text)
        self._reasoning_tokens += splitter.thinks
        if event.finish_reason is None:
            return split
        rest = splitter.finish()
        return Split(split.reasoning + rest.reasoning, split.content + rest.content)

    def _logprobs(self, events: Sequence[TokenEvent]) -> dict[str, Any] | None:
        shown = [event for event in events if event.logprob is not None and not is_end(event, self._hidden)]
        if self._asked.requests[0].settings.logprobs is None:
            return None
        entries = [self._texts.chat_entry(e.logprob, e.top_logprobs) for e in shown if e.logprob is not None]
        return {"content": entries, "refusal": None}

    def _chunk(
        self,
        place: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "object": self.chunk_kind, "choices": [choice]}


def is_end(event: TokenEvent, hidden: frozenset[int]) -> bool:
    """Whether the token is the one that ended the answer, and no part of its text."""
    return event.finish_reason is FinishReason.STOP and event.token_id in hidden
