"""What may be given as a prompt, made into one of two things: a conversation or token ids."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from steerpipe.core.errors import RequestError
from steerpipe.engine.tokenizer import ChatMessage, TextCodec

Prompt = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Mapping[str, str]]

_KINDS = "give text, a list of token ids, or a list of chat messages"


def is_chat(prompt: Prompt, codec: TextCodec, *, raw: bool) -> bool:
    """Whether the prompt goes through the chat template."""
    if isinstance(prompt, str):
        return codec.has_chat_template and not raw
    return any(isinstance(turn, ChatMessage | Mapping) for turn in prompt)


def encode_prompt(prompt: Prompt, codec: TextCodec, *, raw: bool, first: int | None = None) -> tuple[int, ...]:
    """The token ids that the model will see; `first`: of a text so many. Raises RequestError."""
    if isinstance(prompt, str):
        if is_chat(prompt, codec, raw=raw):
            return tuple(codec.apply_chat([ChatMessage("user", prompt)], first))
        return tuple(codec.encode(prompt, add_special=True, first=first))
    if isinstance(prompt, bytes | bytearray | memoryview) or not hasattr(prompt, "__iter__"):
        raise RequestError(f"a prompt of type {type(prompt).__name__}", fix=f"{_KINDS}; decode bytes first")
    if not is_chat(prompt, codec, raw=raw):
        return tuple(_token_id(i) for i in prompt)
    if raw:
        raise RequestError("chat messages with raw=True", fix="messages need the chat template: drop raw, or give text")
    return tuple(codec.apply_chat([_message(turn) for turn in prompt], first))


def _token_id(value: Any) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise RequestError(f"{value!r} in the prompt is no token id", fix=_KINDS)


def _message(turn: Any) -> ChatMessage:
    if isinstance(turn, ChatMessage):
        return turn
    if not isinstance(turn, Mapping):
        raise RequestError(f"{turn!r} among chat messages", fix=_KINDS)
    if turn.keys() != {"role", "content"} or not all(isinstance(value, str) for value in turn.values()):
        raise RequestError(f"a chat message {dict(turn)!r}", fix='a message is {"role": "user", "content": "text"}')
    return ChatMessage(turn["role"], turn["content"])
