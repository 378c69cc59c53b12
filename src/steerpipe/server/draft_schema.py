"""What a client says over `/v1/drafts`: one JSON object per message, its `type` first of all."""

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from steerpipe.core.errors import RequestError
from steerpipe.intake.edits import DraftEdit, EditKind
from steerpipe.server.faults import ApiError, api_error, parse_json
from steerpipe.server.schema import ChatRequest, parse_chat, validate

MOST_EDITS = 1000  # in one message
_TYPES = ("open", "edit", "submit", "stop", "close")


class _Said(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class EditBody(_Said):
    """At `at`, `remove` characters (code points) go and `insert` comes."""

    at: Annotated[int, Field(ge=0, le=2**31)]
    remove: Annotated[int, Field(ge=0, le=2**31)] = 0
    insert: str = ""


class Edits(_Said):
    type: Literal["edit"]
    edits: Annotated[list[EditBody], Field(max_length=MOST_EDITS)]

    def stamped(self) -> tuple[DraftEdit, ...]:
        """As the engine wants them, as of now. Raises ApiError."""
        now = time.monotonic()
        try:
            return tuple(
                DraftEdit(EditKind.REPLACE, each.at, now, each.remove, each.insert) for each in self.edits
            )  # fmt: skip
        except RequestError as error:
            raise api_error(error, param="edits") from None


class Submitted(_Said):
    """`text`: the message as it is now, if the client wants to be sure."""

    type: Literal["submit"]
    text: str | None = None


class Plain(_Said):
    type: Literal["stop", "close"]


class Opened(_Said):
    """The conversation so far, and how its next turn is to be answered."""

    key: str | None
    body: ChatRequest  # its last message stands for what will be typed


Said = Opened | Edits | Submitted | Plain


def parse_said(text: str) -> Said:
    """One message. Raises ApiError."""
    raw = parse_json(text, "the message")
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind not in _TYPES:
        raise ApiError(400, f"a message is a JSON object whose type is one of {', '.join(_TYPES)}", param="type")
    if kind == "open":
        return _opening(raw)
    if kind == "edit":
        return validate(Edits, raw)
    return validate(Submitted, raw) if kind == "submit" else validate(Plain, raw)


def _opening(raw: dict[str, Any]) -> Opened:
    fields = {name: value for name, value in raw.items() if name not in ("type", "key")}
    before = fields.get("messages", [])
    if not isinstance(before, list):
        raise ApiError(400, "messages: a list is needed, of the turns before this one", param="messages")
    key = raw.get("key")
    if key is not None and not isinstance(key, str):
        raise ApiError(400, "key: a string is needed", param="key")
    body = parse_chat(fields | {"messages": [*before, {"role": "user", "content": ""}]})
    prewarms = body.prompt_cache_options is not None and body.prompt_cache_options.prewarm
    if (body.n or 1) > 1 or prewarms or body.stream is False:
        raise ApiError(400, "a draft has one answer, and it is streamed; leave n, stream and prewarm out", param="n")
    return Opened(key=key, body=body)
