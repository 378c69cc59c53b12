"""What a chat template puts around a text that is still being typed."""

from collections.abc import Callable
from dataclasses import dataclass

from steerpipe.intake.prefixes import common_length

_ONE, _OTHER = "steerpipe draft", "Qx7"  # they share neither their first nor their last character
_LINES = "Qx7\n\n  a  b\n7"


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """The whole prompt is `head`, the text (without white space at an end that is stripped), and `tail`."""

    head: str
    tail: str
    strips_left: bool = False
    strips_right: bool = False


PLAIN = PromptFrame("", "")  # a text that goes to the model as it is


def find_frame(render: Callable[[str], str]) -> PromptFrame | None:
    """By trying: `render` makes the prompt of a text. None if it does more to a text than strip it."""
    one, other = render(_ONE), render(_OTHER)
    head = one[: common_length(one, other)]
    tail = one[len(one) - common_length(one[::-1], other[::-1]) :]
    strips_left = render(f" \n{_OTHER}") == other
    strips_right = render(f"{_OTHER}\n ") == other
    frame = PromptFrame(head, tail, strips_left, strips_right)
    tried = (_ONE, _OTHER, _LINES, f" \n{_OTHER}", f"{_OTHER}\n ")
    return frame if all(render(text) == fill(frame, text) for text in tried) else None


def fill(frame: PromptFrame, text: str) -> str:
    """The prompt of a finished text."""
    text = text.lstrip() if frame.strips_left else text
    text = text.rstrip() if frame.strips_right else text
    return frame.head + text + frame.tail
