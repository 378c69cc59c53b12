"""Prompts from a JSONL file: one object per line, with a "prompt", a "text", "messages" or "turns"; .gz too.

{"prompt": "Why is the sky blue?"}                          a user's turn, through the chat template where there is one
{"text": "It was the best of times, ..."}                   a document, as it is
{"messages": [{"role": "user", "content": "Hello"}, ...]}   a conversation
{"turns": ["Write a poem.", "Now shorter."]}                a user's turns; the first is taken, the others need answers
An "id" names the prompt; without one its name is made from its text, so that the same text has the same name anywhere.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steerpipe.core.errors import InputError
from steerpipe.engine.tokenizer import ChatMessage, TextCodec
from steerpipe.runtime.prompts import encode_prompt

_FIX = 'a line is {"prompt": "..."}, {"text": "..."}, {"messages": [...]} or {"turns": [...]}, perhaps with an "id"'


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """`content` is text or a conversation; `document`: text that is no one's turn."""

    id: str
    source: str  # name of the file
    content: str | tuple[ChatMessage, ...]
    document: bool = False

    def encode(self, codec: TextCodec, *, raw: bool, first: int | None = None) -> tuple[int, ...]:
        """The token ids that a model sees; `raw`: a prompt as it is, without the chat template. `first`: so many."""
        raw = self.document or (raw and isinstance(self.content, str))
        return encode_prompt(self.content, codec, raw=raw, first=first)


def read_prompts(file: Path, limit: int | None = None) -> list[FilePrompt]:
    """The first `limit` prompts, each once. InputError names the line that is not one."""
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}", fix="give 1 or more; without it every prompt of the file is taken")
    found: dict[str, FilePrompt] = {}
    for number, line in enumerate(_lines(file), start=1):
        if limit is not None and len(found) >= limit:
            break
        if not line.strip():
            continue
        prompt = _parse(line, file, number)
        if found.setdefault(prompt.id, prompt) != prompt:
            raise InputError(
                f"line {number} of {file}: another prompt has the id {prompt.id!r}", fix="give each prompt its own id"
            )
    if not found:
        raise InputError(f"{file} has no prompts", fix=_FIX)
    return list(found.values())


def _lines(file: Path) -> Iterator[str]:
    if not file.is_file():
        raise InputError(f"{file} does not exist", fix="give a JSONL file of prompts, plain or as .gz")
    opened: Any = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8") as lines:
            yield from lines
    except (OSError, EOFError, UnicodeError) as problem:
        raise InputError(f"{file} cannot be read: {problem}", fix="give UTF-8 text, plain or as .gz") from None


def _parse(line: str, file: Path, number: int) -> FilePrompt:
    try:
        raw = json.loads(line)
        if not isinstance(raw, dict):
            raise TypeError("not an object")
        content, document = _content(raw)
    except (ValueError, TypeError, KeyError, RecursionError) as problem:
        raise InputError(f"line {number} of {file} is not a prompt: {problem}", fix=_FIX) from None
    stem = file.name.partition(".")[0]
    named = raw.get("id")
    name = f"{stem}-{_digest(content, document)}" if named is None else str(named)
    return FilePrompt(name, stem, content, document)


def _content(raw: Mapping[str, Any]) -> tuple[str | tuple[ChatMessage, ...], bool]:
    """(what is said, whether it is a document). ValueError, TypeError or KeyError: not a prompt."""
    kinds = [kind for kind in ("prompt", "text", "messages", "turns") if kind in raw]
    if len(kinds) != 1:
        raise ValueError(f"it has {' and '.join(kinds) or 'none of the four'}")
    value = raw[kinds[0]]
    if kinds[0] == "messages":
        return _conversation(value), False
    if kinds[0] == "turns":
        value = value[0] if isinstance(value, list) and value else None
    if not isinstance(value, str) or not value:
        raise ValueError(f"{kinds[0]} is no text")
    return value, kinds[0] == "text"


def _conversation(value: object) -> tuple[ChatMessage, ...]:
    if not isinstance(value, Sequence) or not value or isinstance(value, str):
        raise ValueError("messages is no list of messages")
    for each in value:
        if not isinstance(each["role"], str) or not isinstance(each["content"], str):
            raise ValueError("role and content of a message are to be text")
    return tuple(ChatMessage(each["role"], each["content"]) for each in value)


def _digest(content: str | tuple[ChatMessage, ...], document: bool) -> str:
    turns = [("user", content)] if isinstance(content, str) else [(each.role, each.content) for each in content]
    said = json.dumps(["document", content] if document else turns)
    return hashlib.blake2b(said.encode(), digest_size=6).hexdigest()
