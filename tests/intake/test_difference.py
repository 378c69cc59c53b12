"""The edit between two texts makes one of the other."""

from hypothesis import given
from hypothesis import strategies as st

from steerpipe.intake.difference import edit_between
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import paste

texts = st.text(alphabet="ab日\n", max_size=12)


@given(texts, texts)
def test_the_edit_makes_the_second_text_of_the_first(before: str, after: str) -> None:
    edit = edit_between(before, after, 1.0)
    draft = Draft()
    draft.apply(paste(0, before, 0.0))
    if edit is not None:
        draft.apply(edit)
    assert draft.text == after
    assert (edit is None) == (before == after)


def test_only_what_differs_is_replaced() -> None:
    edit = edit_between("one two three", "one 2 three", 1.0)
    assert edit is not None and (edit.at, edit.removed, edit.text) == (4, 3, "2")


def test_a_letter_that_is_typed_twice_is_one_letter() -> None:
    edit = edit_between("lel", "lell", 1.0)
    assert edit is not None and (edit.removed, edit.text) == (0, "l")
