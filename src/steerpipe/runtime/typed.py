"""Joins a tokenizer and a draft: the stable tokens of a prompt that is still being typed."""

from collections.abc import Sequence

from steerpipe.engine.tokenizer import ChatMessage, TextCodec
from steerpipe.intake.added_tokens import read_added_tokens
from steerpipe.intake.boundaries import read_rule
from steerpipe.intake.frame import PLAIN, PromptFrame, find_frame
from steerpipe.intake.rules import BoundaryRule
from steerpipe.intake.tokens import StablePrefix

_TRIED = "a"


class TypedPrompts:
    """Makes a StablePrefix for each draft; what it needs to know of the tokenizer it reads once (some milliseconds)."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        definition = codec.definition()
        self.rule: BoundaryRule | None = None if definition is None else read_rule(definition)
        self._added = None if definition is None else read_added_tokens(definition)

    def begin(self, history: Sequence[ChatMessage] = (), *, raw: bool = False) -> StablePrefix:
        """For a draft that will be the next user's turn after `history`; `raw`: that goes to the model as it is."""
        if raw or not self._codec.has_chat_template:
            return self._begin(PLAIN, self._lead())
        frame = find_frame(lambda text: self._codec.render_chat([*history, ChatMessage("user", text)]))
        return self._begin(frame, ())

    def encode(self, text: str) -> list[int]:
        """Tokens of a part of a prompt, without those that a tokenizer puts around a whole one."""
        return self._codec.encode_part(text)

    def _begin(self, frame: PromptFrame | None, lead: Sequence[int] | None) -> StablePrefix:
        if frame is None or lead is None:  # the template or the tokenizer does something of its own to a text
            return StablePrefix(PLAIN, None, self.encode)
        return StablePrefix(frame, self.rule, self.encode, added=self._added, lead=lead)

    def _lead(self) -> list[int] | None:
        """What the tokenizer puts before a text: often BOS or nothing. None if it is not that simple."""
        whole, part = self._codec.encode(_TRIED, add_special=True), self.encode(_TRIED)
        count = len(whole) - len(part)
        return whole[:count] if count >= 0 and whole[count:] == part else None
