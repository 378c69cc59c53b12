"""From a checked body to requests for the engine: prompts as token ids, settings, one request per choice.

Tokenising and chat templates run in a thread of their own, never on the event loop and never in the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from steerpipe.core.errors import RequestError
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import ChatMessage, TextCodec
from steerpipe.server.faults import ApiError, api_error
from steerpipe.server.messages import Ready
from steerpipe.server.schema import ChatRequest, CompletionRequest, Message, PrewarmRequest, Sampling
from steerpipe.server.think import OPEN

_COMPLETION_TOKENS = 16  # where a text completion sets no limit; OpenAI's default
_SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
    "stop_token_ids", "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request, ready for the engine: `requests` are all choices of the first prompt, then of the next."""

    requests: tuple[Request, ...]
    choices: int  # per prompt
    prompt_texts: tuple[str, ...] = ()  # to echo; one per prompt
    stream: bool = False
    include_usage: bool = False
    thinks: bool = False  # the chat template has opened the model's thinking

    @property
    def prompts(self) -> tuple[Request, ...]:
        """One request per prompt."""
        return self.requests[:: self.choices]


@dataclass(frozen=True, slots=True)
class Asker:
    """Knows the model. Its methods may take as long as the text is: call them in the tokeniser's thread."""

    codec: TextCodec
    facts: Ready

    def chat(self, body: ChatRequest, scope: str) -> Asked:
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        limits = {body.max_completion_tokens, body.max_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
        settings = self._settings(
            body, max_tokens=next(iter(limits), None), logprobs=(body.top_logprobs or 0) if body.logprobs else None
        )
        text = self._rendered(body.messages)
        request = Request(self._encoded(text, add_special=False), settings, continues=False, scope=scope)
        return self._asked(body, [request], thinks=text.rstrip().endswith(OPEN))

    def completion(self, body: CompletionRequest, scope: str) -> Asked:
        scored = body.logprobs if body.echo else None
        limit = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        settings = self._settings(body, max_tokens=limit or None, logprobs=body.logprobs)
        prompts = _prompts(body)
        requests = [
            Request(self._ids(prompt), settings, scope=scope, prompt_logprobs=scored, prompt_only=not limit)
            for prompt in prompts
        ]
        if not body.echo:
            return self._asked(body, requests)
        texts = tuple(prompt if isinstance(prompt, str) else self.codec.decode(prompt) for prompt in prompts)
        return self._asked(body, requests, texts)

    def prewarm(self, body: PrewarmRequest, scope: str) -> Asked:
        if (body.messages is None) == (body.prompt is None):
            raise ApiError(400, "send either messages or prompt", param="messages")
        if body.messages is not None:
            ids = self._encoded(self._rendered(body.messages), add_special=False)
        else:
            ids = self._ids(body.prompt or "")
        return Asked((Request(ids, self.facts.defaults, scope=scope, prompt_only=True, background=True),), choices=1)

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The token ids of a conversation."""
        return self._encoded(self._rendered(messages), add_special=False, limited=False)

    def encode(self, text: str, *, add_special: bool) -> tuple[int, ...]:
        return self._encoded(text, add_special=add_special, limited=False)

    def _asked(
        self, body: Sampling, prompts: Sequence[Request], texts: tuple[str, ...] = (), *, thinks: bool = False
    ) -> Asked:
        options = body.prompt_cache_options
        if options is not None and options.prewarm:
            prompts = [replace(each, prompt_only=True, prompt_logprobs=None, background=True) for each in prompts]
        choices = body.n or 1
        batched = self.facts.max_batch > 1  # else nothing is ever decoded together, and one row alone is faster
        requests = [
            replace(prompt, batched=batched, settings=_reseeded(prompt.settings, body.seed, place))
            for prompt in prompts
            for place in range(choices)
        ]
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        return Asked(tuple(requests), choices, texts, bool(body.stream), usage, thinks)

    def _settings(self, body: Sampling, *, max_tokens: int | None, logprobs: int | None) -> SamplingSettings:
        """The model's defaults with what the body says in their place."""
        given = {name: getattr(body, name) for name in _SETTINGS} | {"max_tokens": max_tokens, "logprobs": logprobs}
        settings = self.facts.defaults
        for name, value in given.items():
            try:
                settings = settings.override(**{name: value})
            except RequestError as error:
                raise api_error(error, param=name) from None
        unknown = [token for token in settings.stop_token_ids if token >= self.facts.vocab]
        if unknown:
            raise ApiError(400, f"stop token {unknown[0]} is not in the vocabulary", param="stop_token_ids")
        return settings

    def _rendered(self, messages: Sequence[Message]) -> str:
        try:
            return self.codec.render_chat([ChatMessage(message.role, message.text) for message in messages])
        except RequestError as error:
            raise api_error(error, param="messages") from None

    def _ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._encoded(prompt, add_special=True)
        strange = next((token for token in prompt if token >= self.facts.vocab), None)
        if strange is not None:
            what = f"token id {strange} is not in the vocabulary of {self.facts.vocab}"
            raise ApiError(400, f"{what}; tokenise with this model", param="prompt")
        return self._fitting(tuple(prompt))

    def _encoded(self, text: str, *, add_special: bool, limited: bool = True) -> tuple[int, ...]:
        try:
            ids = tuple(self.codec.encode(text, add_special=add_special))
        except RequestError as error:
            raise api_error(error, param="prompt") from None
        return self._fitting(ids) if limited else ids

    def _fitting(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        if not ids:
            raise ApiError(400, "the prompt is empty; give at least one token of text", param="prompt")
        limit = self.facts.max_context
        if len(ids) >= limit:
            what = f"the prompt has {len(ids)} tokens; the context holds {limit}, answer included"
            raise ApiError(400, f"{what}; shorten the prompt", param="messages", code="context_length_exceeded")
        return ids


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """A list of numbers is one prompt; a list of anything else is several."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    tokens = [token for token in prompt if isinstance(token, int)]
    return [tokens] if tokens else [each for each in prompt if not isinstance(each, int)]


def _reseeded(settings: SamplingSettings, seed: int | None, place: int) -> SamplingSettings:
    """Choices of one seed differ from each other, and each is the same again next time."""
    return settings if seed is None else replace(settings, seed=(seed + place) % 2**64)
