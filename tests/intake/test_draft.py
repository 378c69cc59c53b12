"""A draft is what its edits make of it, at a cost that does not grow with the text."""

import gc
import tracemalloc
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.core.errors import RequestError
from steerpipe.intake import chunks
from steerpipe.intake.chunks import ChunkedText
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import DraftEdit, EditKind, delete, insert, move, paste, replace

KINDS = st.sampled_from(["insert", "delete", "replace", "move"])
STEPS = st.tuples(KINDS, st.integers(0, 10**6), st.integers(0, 40), st.text(max_size=30))


def edit_of(step: tuple[str, int, int, str], length: int) -> DraftEdit:
    what, where, count, text = step
    at = where % (length + 1)
    count = min(count, length - at)
    return {
        "insert": insert(at, text, 0.0),
        "delete": delete(at, count, 0.0),
        "replace": replace(at, count, text, 0.0),
        "move": move(at, count, (where // 7) % (length - count + 1), 0.0),
    }[what]


def plainly(text: str, edit: DraftEdit) -> str:
    span = text[edit.at : edit.at + edit.removed]
    rest = text[: edit.at] + text[edit.at + edit.removed :]
    if edit.to is not None:
        return rest[: edit.to] + span + rest[edit.to :]
    return rest[: edit.at] + edit.text + rest[edit.at :]


@settings(deadline=None)
@given(steps=st.lists(STEPS, max_size=40), full=st.sampled_from([4, 9, 4096]))
def test_the_text_is_what_plain_strings_would_be(steps: list[tuple[str, int, int, str]], full: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_FULL", full)
        patch.setattr(chunks, "_NEW", full // 2)
        draft, text, versions = Draft(), "", [""]
        for step in steps:
            edit = edit_of(step, len(text))
            text = plainly(text, edit)
            change = draft.apply(edit)
            assert draft.text == text and len(draft) == len(text) == change.length
            assert text[: change.changed_at] == versions[-1][: change.changed_at]
            versions.append(text)
            begin = step[1] % (len(text) + 1)
            assert draft.slice(begin, begin + 5) == text[begin : begin + 5]
        assert draft.version == len(steps)
        for version, old in enumerate(versions):
            same = draft.unchanged_since(version)
            assert text[:same] == old[:same]
        assert draft.unchanged_since(draft.version) == len(text)


def test_how_much_is_unchanged_is_told_for_every_version() -> None:
    draft = Draft()
    draft.apply(insert(0, "one two three", 0.0))
    draft.apply(insert(13, "!", 0.1))
    draft.apply(delete(4, 4, 0.2))
    draft.apply(insert(len(draft), "?", 0.3))
    assert [draft.unchanged_since(version) for version in range(5)] == [0, 4, 4, 10, 11]


@pytest.mark.parametrize(
    "edit",
    [insert(4, "x", 0.0), delete(2, 2, 0.0), replace(3, 1, "x", 0.0), move(0, 2, 2, 0.0), paste(9, "x", 0.0)],
    ids=lambda edit: str(edit.kind),
)
def test_an_edit_outside_the_text_is_refused_and_changes_nothing(edit: DraftEdit) -> None:
    draft = Draft()
    draft.apply(insert(0, "abc", 0.0))
    with pytest.raises(RequestError) as refused:
        draft.apply(edit)
    assert "draft of 3" in str(refused.value) and refused.value.fix
    assert (draft.text, draft.version) == ("abc", 1)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (EditKind.INSERT, {"at": -1, "seconds": 0.0}),
        (EditKind.INSERT, {"at": 0, "seconds": float("nan")}),
        (EditKind.INSERT, {"at": 0, "seconds": 0.0, "removed": 1}),
        (EditKind.DELETE, {"at": 0, "seconds": 0.0, "text": "x"}),
        (EditKind.DELETE, {"at": 0, "seconds": 0.0, "removed": -1}),
        (EditKind.MOVE, {"at": 0, "seconds": 0.0, "removed": 1}),
        (EditKind.REPLACE, {"at": 0, "seconds": 0.0, "to": 1}),
        (EditKind.PASTE, {"at": 0, "seconds": 0.0, "text": "half a \ud83d"}),
    ],
)
def test_an_edit_that_means_nothing_is_refused(kind: EditKind, fields: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        DraftEdit(kind, **fields)  # type: ignore[arg-type]


def pieces_passed(monkeypatch: pytest.MonkeyPatch, edits: int, jump: bool) -> float:
    """Pieces that were walked past per edit, in a draft of `edits` insertions."""
    passed = 0
    find = ChunkedText._find

    def counted(self: ChunkedText, at: int) -> tuple[int, int]:
        nonlocal passed
        before = self._index
        found = find(self, at)
        passed += abs(found[0] - before)
        return found

    random = Random(7)
    with monkeypatch.context() as patch:
        patch.setattr(ChunkedText, "_find", counted)
        draft = Draft()
        for number in range(edits):
            at = random.randrange(len(draft) + 1) if jump else len(draft)
            draft.apply(insert(at, "ab"[number % 2], 0.0))
    return passed / edits


def test_typing_costs_the_same_however_long_the_text_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pieces_passed(monkeypatch, 60_000, jump=False) < 0.01
    assert pieces_passed(monkeypatch, 60_000, jump=True) < 60_000 / chunks._NEW


def test_no_piece_outgrows_its_size_whatever_is_pasted() -> None:
    text = ChunkedText()
    for _ in range(20):
        text.insert(len(text) // 2, "x" * 3000)
    text.insert(100, "y" * 50_000)
    assert max(map(len, text._pieces)) <= chunks._FULL and len(text) == 110_000
    text.remove(0, 110_000)
    assert text._pieces == [""] and str(text) == ""


def test_what_was_typed_and_deleted_leaves_nothing_behind() -> None:
    draft = Draft()
    for _ in range(300):
        draft.apply(insert(0, "some words that go again", 0.0))
        draft.apply(delete(0, len(draft), 0.0))
    assert draft.text == "" and len(draft._floors) <= 1 and draft._text._pieces == [""]


def test_a_thousand_abandoned_drafts_leave_no_memory_behind() -> None:
    def abandon(count: int) -> None:
        for number in range(count):
            draft = Draft()
            for at in range(40):
                draft.apply(insert(at, "x", at / 10))
            draft.apply(paste(0, str(number) * 200, 9.0))

    abandon(50)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        abandon(1000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000  # one such draft holds 2 kB of text and some 4 kB around it
