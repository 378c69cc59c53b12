"""Keystroke logs: exact against their own text, and refused with their line."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from steerpipe.core.errors import InputError
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import EditKind
from steerpipe.intake.keystrokes import KeystrokeSession, read_sessions

EXAMPLES = Path(__file__).parents[2] / "examples"
REAL = Path(__file__).parents[3] / "shared" / "keystrokes" / "events.jsonl.gz"


def event(cursor: int, change: str, activity: str = "Input", down_ms: int = 1000) -> list[object]:
    return [down_ms, down_ms + 90, "key", cursor, change, activity]


def read(tmp_path: Path, *events: list[object]) -> KeystrokeSession:
    file = tmp_path / "log.jsonl"
    file.write_text(json.dumps({"writer": "w", "events": list(events)}) + "\n")
    (session,) = read_sessions(file)
    return session


def text_of(session: KeystrokeSession) -> str:
    draft = Draft()
    for edit in session.edits:
        draft.apply(edit)
    return draft.text


def test_every_activity_does_to_the_text_what_it_says(tmp_path: Path) -> None:
    session = read(
        tmp_path,
        event(5, "Hello"),
        event(5, "NoChange", "Nonproduction"),
        event(6, "\\n", down_ms=1200),
        event(14, 'say \\"hi\\"', "Paste"),
        event(0, "H", "Remove/Cut"),
        event(1, "e => J", "Replace"),
        event(13, "J", "Move From [0, 1] To [12, 13]"),
    )
    assert session.contradiction is None and text_of(session) == 'llo\nsay "hi"J'
    kinds = [edit.kind for edit in session.edits]
    assert kinds == [
        EditKind.INSERT, EditKind.INSERT, EditKind.PASTE, EditKind.DELETE, EditKind.REPLACE, EditKind.MOVE,
    ]  # fmt: skip
    assert [edit.seconds for edit in session.edits[:2]] == [1.0, 1.2]


def test_an_arrow_in_the_text_does_not_confuse_a_replacement(tmp_path: Path) -> None:
    session = read(tmp_path, event(6, "a => b"), event(9, "a => b => c => d", "Replace"))
    assert session.contradiction is not None  # "c => d" ends at 6, not at 9
    session = read(tmp_path, event(6, "a => b"), event(6, "a => b => c => d", "Replace"))
    assert text_of(session) == "c => d"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (event(2, "x", "Remove/Cut"), "takes 'x' from 2"),
        (event(9, "x"), "inserts at 8 of 3"),
        (event(1, "q => r", "Replace"), "replaces"),
        (event(3, "abc", "Move From [0, 3] To [1, 4]"), "moves 0 to 3"),
    ],
)
def test_a_log_that_disagrees_with_its_own_text_ends_there(tmp_path: Path, found: list[object], said: str) -> None:
    session = read(tmp_path, event(3, "abc"), found, event(4, "d"))
    assert text_of(session) == "abc"
    assert (
        session.contradiction is not None
        and session.contradiction.startswith("event 1")
        and said in session.contradiction
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "is not JSON"),
        ("[1, 2]", "no list of events"),
        ('{"writer": "w"}', "no list of events"),
        ('{"writer": "w", "events": [[1, 2, "a", 1, "a"]]}', "event 0"),
        ('{"writer": "w", "events": [["soon", 2, "a", 1, "a", "Input"]]}', "event 0"),
        ('{"writer": "w", "events": [[1, 2, "a", -1, "a", "Input"]]}', "event 0"),
        ('{"writer": "w", "events": [[1, 2, "a", 1, "a", "Dictated"]]}', "'Dictated'"),
        ('{"writer": "w", "events": [[1, 2, "a", 1, "\\ud83d", "Input"]]}', "half a character"),
    ],
)
def test_a_malformed_line_is_an_error_that_names_it(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"writer": "w", "events": []}\n\n' + line + "\n")
    with pytest.raises(InputError) as refused:
        list(read_sessions(file))
    assert "line 3" in str(refused.value) and said in str(refused.value) and refused.value.fix


def test_a_file_that_is_no_log_is_an_error(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"writer": "w", "events": []}\n' * 1000)[:60])
    for file in (tmp_path / "none.jsonl", tmp_path / "plain.gz", cut):
        if file.name == "plain.gz":
            file.write_text("{}")
        with pytest.raises(InputError):
            list(read_sessions(file))


def test_the_example_is_what_its_script_makes_and_reads_back_exactly() -> None:
    spec = importlib.util.spec_from_file_location("make_keystrokes", EXAMPLES / "make_keystrokes.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = script.sessions()
    lines = [json.loads(line) for line in (EXAMPLES / "keystrokes.jsonl").read_text().splitlines()]
    assert [line["events"] for line in lines] == [typist.events for _, typist in made]
    for session, (name, typist) in zip(read_sessions(EXAMPLES / "keystrokes.jsonl"), made, strict=True):
        assert session.writer == name and session.contradiction is None and text_of(session) == typist.text


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="the KLiCKe logs are not beside the project")
def test_real_logs_are_exact_but_for_a_few_that_contradict_themselves() -> None:
    sessions = list(read_sessions(REAL))
    assert len(sessions) == 160 and sum(session.contradiction is None for session in sessions) == 153
