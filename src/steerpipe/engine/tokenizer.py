"""Text ↔ token ids through the tokenizer of a checkpoint folder. transformers does the work and is imported late."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steerpipe.core.errors import RequestError, TokenizerError
from steerpipe.engine.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # any one of them; fast, sentencepiece, BPE
_FETCH_AGAIN = "fetch the tokenizer files of the released model again; tokenizer.json is enough by itself"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; which roles exist, and in which order, is the chat template's business."""

    role: str
    content: str


class TextCodec:
    """Encodes, decodes and renders chats. Never reaches the network and never runs code from the folder."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> "TextCodec":
        """Reads the tokenizer of a checkpoint folder. Raises TokenizerError."""
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise TokenizerError(
                f"no tokenizer in {folder}: looked for {', '.join(TOKENIZER_FILES)}",
                fix="copy the tokenizer files of the released model into the folder",
            )
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raises bare Exception; whatever it is, the files are not usable
            raise TokenizerError(f"the tokenizer in {folder} cannot be loaded: {error}", fix=_FETCH_AGAIN) from error
        codec = cls(tokenizer)
        if not codec._text_ids:  # transformers takes an empty vocabulary, and turns every text into nothing
            raise TokenizerError(
                f"the tokenizer in {folder} cannot be used: it has no tokens for text", fix=_FETCH_AGAIN
            )
        return codec

    def encode(self, text: str, add_special: bool, first: int | None = None) -> list[int]:
        """`add_special`: with the tokens that the tokenizer puts around a text (BOS in most families, none in Qwen).

        `first`: so many alone, without a look at what lies far behind them: 40 MB take 43 s.
        """
        if first is not None:
            room = 2 * first * self._longest  # where a text is cut, its last tokens are others
            while len(found := self.encode(text[:room], add_special)) <= first and room < len(text):
                room *= 4  # a normaliser may leave out any number of characters
            return found[:first]
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"character {error.start} of the text is half a character (a lone surrogate)", fix="send valid Unicode"
            ) from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special, verbose=False)["input_ids"]
        return ids

    def encode_part(self, text: str) -> list[int]:
        """As `encode` without special tokens, for text that is valid; 5 us instead of 20: drafts call it per key."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return self.encode(text, add_special=False)
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens skipped, spaces as they are."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "decode of one sequence is one string"
        return text

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def apply_chat(self, messages: Sequence[ChatMessage], first: int | None = None) -> list[int]:
        """The ids of the conversation, up to where the assistant's answer begins. Raises RequestError.

        The template writes BOS itself where the model wants one, so none is added.
        """
        return self.encode(self.render_chat(messages), add_special=False, first=first)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation as text, up to where the assistant's answer begins. Raises RequestError."""
        if not self.has_chat_template:
            raise RequestError("the model has no chat template", fix="complete the text as it is: --raw")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of the checkpoint: it may raise anything
            raise RequestError(
                f"the chat template refuses these messages: {error}",
                fix="change the messages as it says, or complete the text as it is: --raw",
            ) from error
        assert isinstance(text, str), "a template renders one conversation to one string"
        return text

    def definition(self) -> dict[str, Any] | None:
        """The tokenizer as it works here, in the form of a tokenizer.json; None where it has no such form."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else json.loads(backend.to_str())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end token, if any. A checkpoint's generation_config may name more."""
        eos = self._tokenizer.eos_token_id
        return (eos,) if isinstance(eos, int) else ()

    def stream(
        self, stop: Sequence[str] = (), *, stop_token_ids: Sequence[int] = (), after: Sequence[int] = ()
    ) -> TextStream:
        """The text of one answer, without end and stop tokens. `after`: the prompt, where the text continues it."""
        return TextStream(self, stop, hidden=frozenset((*self.eos_token_ids, *stop_token_ids)), after=after)

    def is_text(self, token_id: int) -> bool:
        """False for special tokens and for ids that the tokenizer does not know (rows that pad the embedding)."""
        return token_id in self._text_ids

    def byte_of(self, token_id: int) -> int | None:
        """The byte behind a byte-fallback token such as `<0xE4>`; None for every other token."""
        return self._bytes.get(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, which may be a part of a character; a special token's are its name."""
        byte = self.byte_of(token_id)
        if byte is not None:
            return bytes([byte])
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):  # an id that the tokenizer does not know
            return b""
        if not self.is_text(token_id):
            return piece.encode()
        if self._byte_alphabet and all(character in self._byte_alphabet for character in piece):
            return bytes(self._byte_alphabet[character] for character in piece)
        return piece.replace("\u2581", " ").encode()  # sentencepiece's sign for a space

    @cached_property
    def _byte_alphabet(self) -> dict[str, int]:
        """Character → byte, in vocabularies that spell every byte as one printable character; else empty."""
        space = self._tokenizer.get_vocab().get("\u0120")
        if space is None or self.decode([space]) != " ":
            return {}
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        moved = {chr(256 + place): byte for place, byte in enumerate(others)}  # in GPT-2's order
        return {chr(byte): byte for byte in printable} | moved

    @cached_property
    def _text_ids(self) -> frozenset[int]:
        special = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset(self._tokenizer.get_vocab().values()) - special - frozenset(self._tokenizer.all_special_ids)

    @cached_property
    def _longest(self) -> int:
        """Most characters that a token stands for."""
        return max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def _bytes(self) -> dict[int, int]:
        """Only where the decoder turns them into bytes: elsewhere `<0xE4>` is six characters."""
        vocabulary = self._tokenizer.get_vocab()
        lone = vocabulary.get("<0x80>")
        if lone is None or self.decode([lone]) != "\ufffd":
            return {}
        named = ((vocabulary.get(f"<0x{byte:02X}>"), byte) for byte in range(256))
        return {token_id: byte for token_id, byte in named if token_id is not None}
