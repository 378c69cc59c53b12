"""The bodies of requests, strictly typed. What JSON type a field has is checked here; what values it may have, by
SamplingSettings, which the command line uses too.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steerpipe.server import fields
from steerpipe.server.faults import ApiError

MOST_CHOICES = 128  # per prompt, as in OpenAI's API
MOST_PROMPTS = 256
MOST_STOPS = 16
LONGEST_STOP = 256  # characters; each is looked for after every token, in the engine's own time

TokenId = Annotated[int, Field(ge=0, le=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(default=None, description="accepted; nothing is obfuscated")


class PromptCacheOptions(_Body):
    prewarm: bool | None = Field(default=None, description="compute the prompt and keep it; no output")
    mode: Literal["implicit", "explicit"] | None = Field(default=None, description="accepted; always implicit")
    ttl: str | None = Field(default=None, description="accepted; a prompt is kept while there is room")


class Sampling(_Body):
    """What chat and text completion share. `None`: the model's own default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOPS)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_options: PromptCacheOptions | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None


class PrewarmRequest(_Body):
    """Either `messages` or `prompt`."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    prompt: str | Annotated[list[TokenId], Field(min_length=1)] | None = None


class TokenizeRequest(_Body):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: list[TokenId]


class PredictionRequest(_Body):
    """Whether experts are moved before they are needed."""

    on: bool


Body = TypeVar("Body", bound=BaseModel)


def parse_chat(raw: Any) -> ChatRequest:
    kept = fields.applied_fields(_object(raw), ChatRequest, neutral=fields.NEUTRAL_CHAT, inert=fields.INERT_CHAT)
    return validate(ChatRequest, kept | {"messages": _messages(kept.get("messages"))})


def parse_completion(raw: Any) -> CompletionRequest:
    kept = fields.applied_fields(
        _object(raw), CompletionRequest, neutral=fields.NEUTRAL_COMPLETION, inert=fields.INERT_COMPLETION
    )
    return validate(CompletionRequest, kept)


def parse_plain(raw: Any, model: type[Body]) -> Body:
    """A body of our own, without inert or neutral fields but those of its messages."""
    kept = fields.applied_fields(_object(raw), model, neutral={})
    return validate(model, kept | {"messages": _messages(kept["messages"])} if "messages" in kept else kept)


def _messages(messages: Any) -> Any:
    """Each message without what changes nothing. What is no list of objects is left to the validation."""
    if not isinstance(messages, list):
        return messages
    return [
        fields.applied_fields(
            message, Message, neutral=fields.NEUTRAL_MESSAGE, inert=fields.INERT_MESSAGE, where=f"messages.{place}."
        )
        if isinstance(message, dict)
        else message
        for place, message in enumerate(messages)
    ]


def _object(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body is {_kind(raw)}; a JSON object is needed")
    return raw


def validate(model: type[Body], values: dict[str, Any]) -> Body:
    try:
        return model.model_validate(values)
    except ValidationError as problem:
        # of a union every branch complains; the complaint that lies deepest is of the branch that was meant
        found = problem.errors(include_url=False, include_context=False, include_input=False)
        first = max(found, key=lambda each: len(each["loc"]))
        place = [str(part) for part in first["loc"] if isinstance(part, int) or part in _NAMES]
        name = ".".join(place) or "the body"
        raise ApiError(400, f"{name}: {first['msg'].lower()}", param=name) from None


def _kind(value: object) -> str:
    return {list: "a list", str: "a string", bool: "true or false", type(None): "null"}.get(type(value), "a number")


# pydantic's places name the branches of unions too; of these, only the names of fields mean something to a client
_MODELS: tuple[type[BaseModel], ...] = (
    ChatRequest, CompletionRequest, Message, TextPart, StreamOptions, PromptCacheOptions, PrewarmRequest,
    TokenizeRequest, DetokenizeRequest, PredictionRequest,
)  # fmt: skip
_OF_DRAFTS = frozenset({"edits", "at", "remove", "insert", "text"})  # see `draft_schema`
_NAMES = _OF_DRAFTS.union(name for model in _MODELS for name in model.model_fields)
