"""The words of `/v1/completions`: a whole answer, or chunks of it."""

from collections.abc import Iterator, Sequence
from typing import Any

from steerpipe.core.events import PromptEvent, TokenEvent, TokenLogprob
from steerpipe.server.asking import Asked
from steerpipe.server.chat import is_end
from steerpipe.server.outcomes import Outcome, figures_json, usage_json
from steerpipe.server.pieces import TokenTexts

_Scored = tuple[int, TokenLogprob | None, tuple[TokenLogprob, ...]]  # token id, its log probability, the likeliest


class CompletionWriter:
    """Writes one HTTP request's answers in OpenAI's form. `head` is what every object begins with (id, created …)."""

    kind = chunk_kind = "text_completion"

    def __init__(self, asked: Asked, texts: TokenTexts, hidden: frozenset[int], head: dict[str, Any]) -> None:
        self._asked = asked
        self._texts = texts
        self._hidden = hidden
        self._head = head
        self._written = [0] * len(asked.requests)  # characters that each choice has shown

    def whole(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        choices = []
        for place, outcome in enumerate(outcomes):
            prompt = self._prompt_tokens(place, outcome.prompt)
            scored = [*prompt, *(token for event in outcome.tokens for token in self._scored(event))]
            text = self._echo(place) + outcome.text
            choices.append(self._choice(place, text, self._logprobs(scored, 0), outcome.finish_reason))
        usage = usage_json(self._asked, outcomes)
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage, **figures_json(outcomes)}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks before the first token: the prompt, where it is to be repeated and nothing has to be known of it."""
        if self._asked.prompt_texts and self._asked.requests[0].prompt_logprobs is None:
            for place in range(len(self._asked.requests)):
                yield self._chunk(place, self._echo(place), None)

    def prompt(self, place: int, outcome: Outcome) -> Iterator[dict[str, Any]]:
        """The prompt is computed: it is repeated with its log probabilities."""
        if self._asked.prompt_texts and self._asked.requests[0].prompt_logprobs is not None:
            logprobs = self._logprobs(self._prompt_tokens(place, outcome.prompt), 0)
            yield self._chunk(place, self._echo(place), logprobs)

    def token(self, place: int, event: TokenEvent) -> Iterator[dict[str, Any]]:
        """Chunks of one token: none where it has nothing to show yet."""
        logprobs = self._logprobs(self._scored(event), self._written[place])
        if event.text or logprobs is not None:
            yield self._chunk(place, event.text, logprobs)

    def end(self, place: int, outcome: Outcome) -> dict[str, Any]:
        return self._chunk(place, "", None, outcome.finish_reason)

    def closing(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """The chunk with `usage`, where it was asked for."""
        usage = usage_json(self._asked, outcomes)
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}

    def _echo(self, place: int) -> str:
        return self._asked.prompt_texts[place // self._asked.choices] if self._asked.prompt_texts else ""

    def _prompt_tokens(self, place: int, event: PromptEvent | None) -> list[_Scored]:
        """Every token of a prompt that is repeated; nothing comes before the first, so it has no probability."""
        request = self._asked.requests[place]
        if event is None or request.prompt_logprobs is None:
            return []
        scores = zip(request.prompt_ids[1:], event.logprobs, event.top_logprobs, strict=True)
        return [(request.prompt_ids[0], None, ()), *scores]

    def _scored(self, event: TokenEvent) -> list[_Scored]:
        if event.logprob is None or is_end(event, self._hidden):
            return []
        return [(event.token_id, event.logprob, event.top_logprobs)]

    def _logprobs(self, scored: Sequence[_Scored], start: int) -> dict[str, Any] | None:
        if self._asked.requests[0].settings.logprobs is None:
            return None
        return {
            "tokens": [self._texts.label(token_id) for token_id, _, _ in scored],
            "token_logprobs": [chosen and chosen.logprob for _, chosen, _ in scored],
            "top_logprobs": [chosen and self._texts.likeliest(chosen, top) for _, chosen, top in scored],
            "text_offset": self._texts.offsets([token_id for token_id, _, _ in scored], start),
        }

    def _chunk(
        self, place: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        self._written[place] += len(text)
        choice = self._choice(place, text, logprobs, finish_reason)
        return {**self._head, "object": self.chunk_kind, "choices": [choice]}

    @staticmethod
    def _choice(place: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
