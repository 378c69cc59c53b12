"""Token ids in, text out, piece by piece: no half character, nothing taken back, no stop string.

ids → `_Characters` (whole characters) → `_StopGate` (no stop string) → the caller. No torch, no clock, no thread.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

_UNDECIDED = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet
_CONTEXT = 4  # ids kept before a new one: an unfinished UTF-8 character has at most 3 bytes, an id at least one
_WINDOW = 16  # ids decoded at most for one push


class Vocabulary(Protocol):
    """What a stream needs of a tokenizer. `engine.tokenizer.TextCodec` is one."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens skipped, spaces as they are."""
        ...

    def is_text(self, token_id: int) -> bool:
        """False for special tokens and for ids that the tokenizer does not know: they have no text."""
        ...

    def byte_of(self, token_id: int) -> int | None:
        """The byte behind a byte-fallback token such as `<0xE4>`; None for every other token."""
        ...


class TextStream:
    """The text of one sequence. All pieces joined are `decode(ids)`, cut before the first stop string.

    Ids in `hidden` (end and stop tokens) never show. `after` are the ids before the first one (a prompt that the text
    continues): with them a sentencepiece tokenizer keeps the space between prompt and text.

    The stop string that is complete first wins; of two complete with the same character, the longer. So the cut does
    not depend on how the text was split into tokens.

    One exception to "are `decode(ids)`": when an invalid byte follows valid ones, a byte-fallback decoder takes back
    the whole run of byte tokens. Characters already given stay, and the invalid byte alone becomes U+FFFD.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        *,
        hidden: frozenset[int] = frozenset(),
        after: Sequence[int] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._hidden = hidden
        self._characters = _Characters(vocabulary, [i for i in after if vocabulary.is_text(i)])
        self._gate = _StopGate(stop)
        self._starts: list[int] = []  # per pushed id: characters decided before it
        self._finished = False

    def push(self, token_id: int) -> str:
        """What became certain with this id: often nothing, sometimes more than its own text."""
        assert not self._finished, "push after finish"
        assert self.stop_string is None, f"push after the stop string {self.stop_string!r}"
        self._starts.append(self._gate.seen)
        if token_id in self._hidden or not self._vocabulary.is_text(token_id):
            return ""
        return self._gate.push(self._characters.push(token_id))

    def finish(self) -> str:
        """What was held back; an unfinished character becomes U+FFFD. Nothing after a stop string."""
        assert not self._finished, "finish after finish"
        self._finished = True
        if self.stop_string is not None:
            return ""
        return self._gate.push(self._characters.finish()) + self._gate.finish()

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, once there is one."""
        return self._gate.found

    @property
    def text_tokens(self) -> int:
        """How many of the pushed ids belong to the text: all, or those that begin before the stop string."""
        return len(self._starts) if self._gate.cut is None else bisect_left(self._starts, self._gate.cut)


class _Characters:
    """Decodes a window of the last ids. Cost per push: at most `_WINDOW` ids, whatever the length of the answer.

    All but the last U+FFFD of a text are decided (UTF-8 replaces an unfinished character by one); that one is held.
    In a run of byte-fallback tokens the decoder is not asked: it shows U+FFFD for the whole run until that is valid.
    """

    def __init__(self, vocabulary: Vocabulary, after: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._window = list(after[-_CONTEXT:])
        self._given = len(vocabulary.decode(self._window))  # characters of the window's text that were returned
        self._holds = False  # one more character, U+FFFD, is in the window's text and was not returned
        self._in_bytes = False  # the last id was a byte-fallback token: `_given` is behind the window
        self._bytes = bytearray()  # of that run: bytes that are no character yet

    def push(self, token_id: int) -> str:
        byte = self._vocabulary.byte_of(token_id)
        if byte is not None:
            return self._release() + self._push_byte(token_id, byte)
        return self._end_bytes() + self._push_token(token_id)

    def finish(self) -> str:
        return self._end_bytes() + self._release()

    def _push_token(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._vocabulary.decode(self._window)
        self._holds = text.endswith(_UNDECIDED)
        decided = len(text) - self._holds
        piece = text[self._given : decided]
        self._given = decided
        if len(self._window) >= _WINDOW:
            self._window = self._window[-_CONTEXT:]
            self._given = len(self._vocabulary.decode(self._window)) - self._holds
        return piece

    def _release(self) -> str:
        released = _UNDECIDED * self._holds
        self._given += self._holds
        self._holds = False
        return released

    def _push_byte(self, token_id: int, byte: int) -> str:
        first = not self._window
        self._window = [*self._window[1 - _WINDOW // 2 :], token_id]
        self._in_bytes = True
        if first and byte < 0x80:
            return self._vocabulary.decode(self._window)  # what strips a text's first space strips this one too
        self._bytes.append(byte)
        text = ""
        while self._bytes:
            try:
                text += self._bytes.decode()
                self._bytes.clear()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                text += _UNDECIDED * error.end  # one per byte, as tokenizers does
                del self._bytes[: error.end]
        return text

    def _end_bytes(self) -> str:
        if not self._in_bytes:
            return ""
        self._in_bytes = False
        self._given = len(self._vocabulary.decode(self._window))
        rest = _UNDECIDED * len(self._bytes)
        self._bytes.clear()
        return rest


class _StopGate:
    """Lets text through up to the first stop string; holds back an end that may still become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        assert all(stop), "an empty stop string would end every text"
        self._stop = tuple(stop)
        self._held = ""
        self.seen = 0  # characters pushed
        self.found: str | None = None
        self.cut: int | None = None  # where `found` begins, in characters pushed

    def push(self, piece: str) -> str:
        if not piece:
            return ""
        text = self._held + piece
        self.seen += len(piece)
        matches = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            _, at, self.found = min(matches)
            self.cut = self.seen - len(text) + at
            self._held = ""
            return text[:at]
        free = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[free:]
        return text[:free]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
