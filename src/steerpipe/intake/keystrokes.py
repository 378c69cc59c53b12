r"""Keystroke logs of the KLiCKe form → drafts' edits, checked against what the log says of its own text.

One JSON object per line (the file may be gzipped): `{"writer": …, "events": [[down_ms, up_ms, key, cursor_after,
text_change, activity], …]}`. In `text_change`, `\n` is a line break, `\"` a quote and `\\` a backslash. Activities:

    Nonproduction                no change (the text_change is NoChange)
    Input, Paste                 text_change came, and ends at the cursor
    Remove/Cut                   text_change went, and began at the cursor
    Replace                      text_change is `old => new`; new ends at the cursor
    Move From [a, b] To [c, d]   characters a up to b lie at c up to d afterwards
"""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steerpipe.core.errors import InputError, RequestError
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import DraftEdit, delete, insert, move, paste, replace

_MOVE = re.compile(r"Move From \[(\d+), (\d+)\] To \[(\d+), (\d+)\]")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ARROW = " => "
_FORM = 'a line is {"writer": …, "events": [[down_ms, up_ms, key, cursor_after, text_change, activity], …]}'


@dataclass(frozen=True, slots=True)
class KeystrokeSession:
    """One writer's text. `edits` are exact: each was found where the log says it happened.

    `contradiction` says where a log disagrees with its own text; `edits` end before that event. None: they are all.
    """

    writer: str
    edits: tuple[DraftEdit, ...]
    contradiction: str | None


class _ContradictionError(Exception):
    pass


def read_sessions(file: Path) -> Iterator[KeystrokeSession]:
    """The sessions of a log, one at a time. Raises InputError that names the line of what cannot be understood."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _session(line, f"{file}, line {number}")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file} cannot be read: {error}", fix="give a keystroke log: JSON lines, or gzip of them"
        ) from error


def _session(line: str, where: str) -> KeystrokeSession:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON: {error.msg}", fix=_FORM) from error
    if not isinstance(record, dict) or not isinstance(record.get("events"), list) or "writer" not in record:
        raise InputError(f"{where} has no writer or no list of events", fix=_FORM)
    draft, edits, contradiction = Draft(), [], None
    for number, event in enumerate(record["events"]):
        try:
            edit = _edit(event, draft, f"{where}, event {number}")
            if edit is not None:
                draft.apply(edit)
                edits.append(edit)
        except RequestError as refused:
            raise InputError(f"{where}, event {number}: {refused.what}", fix=refused.fix) from refused
        except _ContradictionError as found:
            contradiction = f"event {number} {found}"
            break
    return KeystrokeSession(str(record["writer"]), tuple(edits), contradiction)


def _edit(event: Any, draft: Draft, where: str) -> DraftEdit | None:
    """What one event did to `draft`; None if nothing."""
    down_ms, cursor, changed, activity = _fields(event, where)
    seconds, text = down_ms / 1e3, _ESCAPE.sub(_unescaped, changed)
    if activity == "Nonproduction":
        return None
    if activity in ("Input", "Paste"):
        at = _within(cursor - len(text), draft)
        return paste(at, text, seconds) if activity == "Paste" else insert(at, text, seconds)
    if activity == "Remove/Cut":
        _demand(draft, cursor, text)
        return delete(cursor, len(text), seconds)
    if activity == "Replace" and _ARROW in text:
        return _replacement(text, cursor, draft, seconds)
    if found := _MOVE.fullmatch(activity):
        begin, end, to, _ = (int(group) for group in found.groups())
        if end < begin or to + (end - begin) > len(draft):
            raise _ContradictionError(f"moves {begin} to {end} in a text of {len(draft)} characters")
        _demand(draft, begin, text)
        return move(begin, end - begin, to, seconds)
    raise InputError(f"{where}: {activity!r} with {changed!r} is no activity", fix=__doc__.split("Activities:")[1])


def _fields(event: Any, where: str) -> tuple[float, int, str, str]:
    if isinstance(event, list) and len(event) == 6:
        down_ms, _, _, cursor, changed, activity = event
        numbers = isinstance(down_ms, int | float) and isinstance(cursor, int) and cursor >= 0
        if numbers and isinstance(changed, str) and isinstance(activity, str):
            return float(down_ms), cursor, changed, activity
    raise InputError(f"{where} is {event!r}", fix=_FORM)


def _replacement(text: str, cursor: int, draft: Draft, seconds: float) -> DraftEdit:
    """Either side may contain the arrow itself: the split that the text confirms is taken."""
    for arrow in re.finditer(re.escape(_ARROW), text):
        old, new = text[: arrow.start()], text[arrow.end() :]
        at = cursor - len(new)
        if at >= 0 and draft.slice(at, at + len(old)) == old:
            return replace(at, len(old), new, seconds)
    raise _ContradictionError(f"replaces {text!r} before {cursor}, where that does not stand")


def _within(at: int, draft: Draft) -> int:
    if not 0 <= at <= len(draft):
        raise _ContradictionError(f"inserts at {at} of {len(draft)} characters")
    return at


def _demand(draft: Draft, at: int, text: str) -> None:
    there = draft.slice(at, at + len(text))
    if there != text:
        raise _ContradictionError(f"takes {text!r} from {at}, where {there!r} stands")


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]
