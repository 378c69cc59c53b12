"""The edit between two states of a text field: for whoever sees the text and not the keys."""

from steerpipe.intake.edits import DraftEdit, replace
from steerpipe.intake.prefixes import common_length


def edit_between(before: str, after: str, seconds: float) -> DraftEdit | None:
    """The shortest single replacement that makes `after` of `before`; None: they are the same."""
    if before == after:
        return None
    start = common_length(before, after)
    end = common_length(before[start:][::-1], after[start:][::-1])
    return replace(start, len(before) - start - end, after[start : len(after) - end], seconds)
