"""Prompts as people type them: the openings of keystroke logs, or the timing of such logs laid over given texts."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from steerpipe.core.errors import InputError
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import DraftEdit, EditKind, insert
from steerpipe.intake.keystrokes import KeystrokeSession, read_sessions

LEAST_TOKENS, MOST_TOKENS = 30, 200
LONGEST_PAUSE_SECONDS = 10.0  # before Enter: a writer who thinks for a minute is not waiting for an answer
END_SECONDS = 1.0  # before Enter, where a log ends with the prompt
_ENDS = ".?!"

Count = Callable[[str], int]  # tokens of a text


@dataclass(frozen=True, slots=True)
class TypedPrompt:
    """`edits` begin at 0 s and make `text` of what is there `already`; Enter comes at `enter_seconds`."""

    name: str
    edits: tuple[DraftEdit, ...]
    enter_seconds: float
    text: str
    tokens: int
    already: str = ""

    @property
    def last_pause_seconds(self) -> float:
        return self.enter_seconds - self.edits[-1].seconds

    def last(self, seconds: float) -> "TypedPrompt":
        """The same, but what was typed earlier than that before Enter is there already."""
        begin = self.enter_seconds - seconds
        late = [replace(edit, seconds=edit.seconds - begin) for edit in self.edits if edit.seconds >= begin]
        late = late or [replace(self.edits[-1], seconds=0.0)]
        early = Draft()
        for edit in self.edits[: len(self.edits) - len(late)]:
            early.apply(edit)
        return replace(self, edits=tuple(late), enter_seconds=seconds, already=early.text) if len(early) else self


def read_prompts(log: Path, count: Count, wanted: int, seed: int = 0) -> list[TypedPrompt]:
    """One from each session of a log, until there are enough; lengths are drawn between 30 and 200 tokens."""
    random = Random(seed)
    found = [
        prompt
        for session in read_sessions(log)
        if (prompt := _opening(session, count, random.randint(LEAST_TOKENS, MOST_TOKENS))) is not None
    ]
    if not found:
        raise InputError(f"{log} has no text of {LEAST_TOKENS} tokens", fix="give a log in which somebody writes more")
    return found[:wanted]


def lay_over(log: Path, texts: Sequence[str], count: Count, seed: int = 0) -> list[TypedPrompt]:
    """Each text typed straight on, with the gaps between the keys of one session of the log."""
    sessions = [session for session in read_sessions(log) if len(session.edits) > 50]
    if not sessions:
        raise InputError(f"{log} has no session of more than 50 edits", fix="give a log in which somebody writes more")
    random = Random(seed)
    return [_typed_like(random.choice(sessions), text, count, number) for number, text in enumerate(texts)]


def read_texts(file: Path) -> list[str]:
    """From JSON lines: the first of `turns`, or `prompt`, or `text`."""
    try:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}", fix="give JSON lines with a prompt in each") from error
    return [text for record in records if (text := _text_of(record))]


def _text_of(record: object) -> str:
    if not isinstance(record, dict):
        return ""
    first = record["turns"][0] if record.get("turns") else record.get("prompt", record.get("text"))
    return first if isinstance(first, str) else ""


def _opening(session: KeystrokeSession, count: Count, wanted: int) -> TypedPrompt | None:
    """Up to the end of the sentence with which the text has `wanted` tokens, or nearly."""
    typed, best = Draft(), 0
    ends: list[int] = []  # numbers of edits after which a sentence is complete
    for number, edit in enumerate(session.edits):
        typed.apply(edit)
        if edit.kind is EditKind.INSERT and edit.text in _ENDS and edit.at == len(typed) - 1:
            ends.append(number)
            if count(typed.text) >= wanted:
                break
    for number in reversed(ends):
        text = _text_after(session.edits[: number + 1])
        if LEAST_TOKENS <= count(text) <= MOST_TOKENS:
            best = number
            break
    if not best:
        return None
    start = session.edits[0].seconds
    edits = tuple(replace(edit, seconds=edit.seconds - start) for edit in session.edits[: best + 1])
    later = [edit.seconds for edit in session.edits[best + 1 : best + 2]] or [session.edits[best].seconds + END_SECONDS]
    pause = min(later[0] - session.edits[best].seconds, LONGEST_PAUSE_SECONDS)
    text = _text_after(edits)
    return TypedPrompt(session.writer, edits, edits[-1].seconds + max(0.0, pause), text, count(text))


def _typed_like(session: KeystrokeSession, text: str, count: Count, number: int) -> TypedPrompt:
    gaps = _gaps(session)
    seconds, edits = 0.0, []
    for place, character in enumerate(text):
        edits.append(insert(place, character, seconds))
        seconds += min(next(gaps), LONGEST_PAUSE_SECONDS)
    return TypedPrompt(f"{number} as {session.writer}", tuple(edits), seconds, text, count(text))


def _gaps(session: KeystrokeSession) -> Iterator[float]:
    """Between the edits of a session, over and over."""
    times = [edit.seconds for edit in session.edits]
    while True:
        yield from (max(0.0, later - sooner) for sooner, later in itertools.pairwise(times))


def _text_after(edits: Sequence[DraftEdit]) -> str:
    typed = Draft()
    for edit in edits:
        typed.apply(edit)
    return typed.text
