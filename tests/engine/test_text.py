"""Streams of text: whole characters, nothing taken back, stop strings wherever tokens end, linear cost."""

import codecs
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.engine.text import TextStream
from steerpipe.engine.tokenizer import TextCodec
from tests.engine import tiny_tokenizers

KINDS = {
    "byte_level": tiny_tokenizers.byte_level(),
    "byte_fallback": tiny_tokenizers.byte_fallback(),
    "metaspace": tiny_tokenizers.metaspace(),
}
UNICODE = [
    "👩‍👩‍👧‍👦",
    "🇪🇺",
    "日本語",
    "é",
    "e\u0301\u0323",
    "नमस्ते",
    "\u200d",
    "\ufffd",
    "the cat",
    "  ",
    "\n",
    "€€",
    "𝔘",
    "a",
    ".",
]
TEXT = st.lists(st.sampled_from(UNICODE) | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join)

_codecs: dict[str, TextCodec] = {}


@pytest.fixture(scope="module", autouse=True)
def _saved_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, tokenizer in KINDS.items():
        _codecs[name] = TextCodec.load(tiny_tokenizers.save(tokenizer, tmp_path_factory.mktemp(name)))


def _id(kind: str, token: str) -> int:
    found = KINDS[kind].token_to_id(token)
    assert found is not None, f"{token!r} is no token of {kind}"
    return found


def _byte_level_alphabet() -> dict[int, int]:
    """Byte → id, as GPT-2 numbers them: printable Latin-1 stands for itself, the rest is shifted to U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {byte: _id("byte_level", character) for byte, character in characters.items()}


_ALPHABET = _byte_level_alphabet()


def _byte(kind: str, byte: int) -> int:
    return _ALPHABET[byte] if kind == "byte_level" else _id(kind, f"<0x{byte:02X}>")


def _pieces(stream: TextStream, ids: Sequence[int]) -> list[str]:
    pieces = []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if stream.stop_string is not None:
            break
    return [*pieces, stream.finish()]


def _one_per_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("one-per-byte", _one_per_byte)


def _expected(kind: str, ids: Sequence[int]) -> str:
    """`decode(ids)`; a byte-fallback run keeps its valid characters (the stream's one stated exception)."""
    codec = _codecs[kind]
    shown = [i for i in ids if codec.is_text(i)]
    runs: list[bytearray] = []
    marked: list[int] = []
    for i in shown:
        byte = codec.byte_of(i)
        if byte is None:
            marked.append(i)
        elif marked and marked[-1] < 0:
            runs[-1].append(byte)
        else:
            runs.append(bytearray([byte]))
            marked.append(-len(runs))
    if not runs:
        return codec.decode(shown)
    mark = _id(kind, "日")
    assert mark not in marked, "the mark stands for runs here"
    text = codec.decode([mark if i < 0 else i for i in marked])
    for n, run in enumerate(runs):
        start = run[1:] if n == 0 and marked[0] < 0 and run[:1] == b" " else run  # decode strips a first space
        text = text.replace("日", start.decode(errors="one-per-byte"), 1)
    return text


# --- characters


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=150, derandomize=True, deadline=None)
@given(text=TEXT)
def test_pieces_of_any_text_join_to_its_decode_without_a_half_character(kind: str, text: str) -> None:
    codec = _codecs[kind]
    ids = codec.encode(text, add_special=False)
    pieces = _pieces(codec.stream(), ids)
    assert "".join(pieces) == codec.decode(ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=150, derandomize=True, deadline=None)
@given(choices=st.data())
def test_pieces_of_any_ids_join_to_their_decode(kind: str, choices: st.DataObject) -> None:
    size = KINDS[kind].get_vocab_size()
    mark = KINDS[kind].token_to_id("日")
    ids = choices.draw(st.lists(st.integers(0, size + 3).filter(lambda i: i != mark), max_size=60))
    assert "".join(_pieces(_codecs[kind].stream(), ids)) == _expected(kind, ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=150, derandomize=True, deadline=None)
@given(content=st.binary(max_size=60))
def test_pieces_of_any_bytes_valid_or_not_join_to_their_decode(kind: str, content: bytes) -> None:
    ids = [_byte(kind, byte) for byte in content]
    joined = "".join(_pieces(_codecs[kind].stream(), ids))
    assert joined == _expected(kind, ids)
    if kind == "byte_level":
        assert joined == content.decode(errors="replace")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_comes_whole_with_its_last_byte(kind: str) -> None:
    ids = [_byte(kind, byte) for byte in "😀é".encode()]
    assert _pieces(_codecs[kind].stream(), ids) == ["", "", "", "😀", "", "é", ""]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_lone_byte_becomes_a_replacement_character_only_when_nothing_can_complete_it(kind: str) -> None:
    lone = [_byte(kind, 0xE2)]
    letter = _id(kind, "a")
    assert _pieces(_codecs[kind].stream(), lone) == ["", "\ufffd"]
    assert _pieces(_codecs[kind].stream(), [*lone, letter]) == ["", "\ufffda", ""]


def test_ids_that_all_begin_and_end_inside_a_character_still_flow() -> None:
    shifted = _id("byte_level", "Ĥ¬â")  # 82 AC E2: the end of one € and the beginning of the next
    pieces = _pieces(_codecs["byte_level"].stream(), [_ALPHABET[0xE2], *[shifted] * 50])
    assert pieces == ["", *["€"] * 50, "\ufffd"]


def test_a_space_before_a_token_survives_every_window_of_a_metaspace_tokenizer() -> None:
    ids = [_id("metaspace", "▁cat")] * 50
    assert _pieces(_codecs["metaspace"].stream(), ids) == ["cat", *[" cat"] * 49, ""]


def test_a_space_after_byte_tokens_survives() -> None:
    ids = [_byte("byte_fallback", 0x0A), _id("byte_fallback", "▁a"), _byte("byte_fallback", 0xFF)]
    ids.append(_id("byte_fallback", "▁b"))
    assert _pieces(_codecs["byte_fallback"].stream(), ids) == ["\n", " a", "\ufffd", " b", ""]


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace"])
def test_text_that_continues_a_prompt_keeps_the_space_between_them(kind: str) -> None:
    codec, ids = _codecs[kind], [_id(kind, "▁cat"), _id(kind, "s")]
    prompt = [_id(kind, "<s>"), _id(kind, "▁the")]
    assert "".join(_pieces(codec.stream(after=prompt), ids)) == " cats"
    assert "".join(_pieces(codec.stream(), ids)) == "cats"


def test_special_hidden_and_unknown_ids_have_no_text_and_do_not_part_a_character() -> None:
    codec = _codecs["byte_level"]
    first, *rest = (_ALPHABET[byte] for byte in "€".encode())
    letter = _ALPHABET[ord("z")]
    ids = [1, first, 2, 99_999, letter, *rest, 0]
    assert _pieces(codec.stream(stop_token_ids=[letter]), ids) == ["", "", "", "", "", "", "€", "", ""]


# --- stop strings


class Letters:
    """A vocabulary where an id is a string of our choice."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tokens

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.tokens[i] for i in ids)

    def is_text(self, token_id: int) -> bool:
        return self.tokens[token_id] != "<special>"

    def byte_of(self, token_id: int) -> int | None:
        return None


def _stream(tokens: Sequence[str], *stop: str) -> tuple[list[str], TextStream]:
    stream = TextStream(Letters(tokens), stop)
    return _pieces(stream, range(len(tokens))), stream


def test_the_beginning_of_a_stop_string_is_held_until_decided() -> None:
    pieces, stream = _stream(["a", "b", "c", "x", "ab", "c", "d"], "abcd")
    assert pieces == ["", "", "", "abcx", "", "", "", ""]
    assert stream.stop_string == "abcd"
    assert stream.text_tokens == 4


def test_what_is_held_comes_at_the_end_when_no_stop_string_came() -> None:
    pieces, stream = _stream(["a", "b"], "abc")
    assert pieces == ["", "", "ab"]
    assert stream.stop_string is None
    assert stream.text_tokens == 2


def test_a_stop_string_inside_a_token_cuts_the_token() -> None:
    pieces, stream = _stream(["xSTOPy"], "STOP")
    assert pieces == ["x", ""]
    assert stream.text_tokens == 1


def test_a_false_start_that_overlaps_the_real_one_is_found() -> None:
    pieces, stream = _stream(list("aaab"), "aab")
    assert "".join(pieces) == "a"
    assert stream.text_tokens == 1


def test_tokens_that_begin_at_the_cut_do_not_belong_to_the_text() -> None:
    assert _stream(["hi", "<special>", "\n\n", "\n"], "\n\n\n")[1].text_tokens == 1
    assert _stream(["\n"], "\n")[1].text_tokens == 0


@pytest.mark.parametrize("tokens", [["abcd"], list("abcd"), ["ab", "cd"]])
def test_the_stop_string_complete_first_wins_however_the_text_is_split(tokens: list[str]) -> None:
    pieces, stream = _stream(tokens, "abcd", "bc")
    assert "".join(pieces) == "a"
    assert stream.stop_string == "bc"


@pytest.mark.parametrize("order", [("bc", "abc"), ("abc", "bc")])
def test_of_two_complete_with_the_same_character_the_longer_wins(order: tuple[str, str]) -> None:
    pieces, stream = _stream(["ab", "cd"], *order)
    assert "".join(pieces) == ""
    assert stream.stop_string == "abc"


def test_a_stop_string_of_characters_split_over_byte_tokens_is_found() -> None:
    ids = [_byte("byte_fallback", byte) for byte in "a日本".encode()] + [_id("byte_fallback", "s")]
    pieces = _pieces(_codecs["byte_fallback"].stream(["日本"]), ids)
    assert pieces == ["a", "", "", "", "", "", "", ""]


def test_a_newline_byte_token_stops_at_once() -> None:
    stream = _codecs["byte_fallback"].stream(["\n"])
    assert stream.push(_id("byte_fallback", "▁a")) == "a"
    assert stream.push(_byte("byte_fallback", 0x0A)) == ""
    assert stream.stop_string == "\n"


@settings(max_examples=400, derandomize=True, deadline=None)
@given(
    tokens=st.lists(st.text("ab<", max_size=4), max_size=12),
    stop=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
)
def test_pieces_join_to_the_text_before_the_first_complete_stop_string(tokens: list[str], stop: list[str]) -> None:
    text = "".join(tokens)
    ends = [(end, end - len(s)) for end in range(len(text) + 1) for s in stop if text[:end].endswith(s)]
    cut = min(ends)[1] if ends else len(text)
    pieces, stream = _stream(tokens, *stop)
    assert "".join(pieces) == text[:cut]
    assert (stream.stop_string is not None) == bool(ends)
    starts = [len("".join(tokens[:n])) for n in range(len(tokens))]
    assert stream.text_tokens == (sum(start < cut for start in starts) if ends else len(tokens))


def test_push_after_a_stop_string_or_after_finish_is_our_mistake() -> None:
    _, stream = _stream(["a", "b"], "b")
    with pytest.raises(AssertionError, match="push after finish"):
        stream.push(0)
    stopped = TextStream(Letters(["b"]), ["b"])
    stopped.push(0)
    with pytest.raises(AssertionError, match="push after the stop string 'b'"):
        stopped.push(0)


# --- cost


class Counting:
    """Counts the ids that a stream asks a codec to decode."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.calls = self.decoded = self.longest = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.calls += 1
        self.decoded += len(ids)
        self.longest = max(self.longest, len(ids))
        return self.codec.decode(ids)

    def is_text(self, token_id: int) -> bool:
        return self.codec.is_text(token_id)

    def byte_of(self, token_id: int) -> int | None:
        return self.codec.byte_of(token_id)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("sort", ["words", "lone bytes", "emoji"])
def test_cost_per_token_does_not_grow_with_the_answer(kind: str, sort: str) -> None:
    content = {"words": b"the cat ", "lone bytes": b"\x9f", "emoji": "😀".encode()}[sort]
    codec = _codecs[kind]
    if sort == "words":
        unit = codec.encode(content.decode(), add_special=False)
    else:
        unit = [_byte(kind, byte) for byte in content]
    counting = Counting(codec)
    ids = (unit * 1000)[:1000]
    _pieces(TextStream(counting, ["\n\n"]), ids)
    assert counting.longest <= 16
    assert counting.calls <= 1.2 * len(ids) + 2
    assert counting.decoded <= 11 * len(ids)


def test_a_loop_of_one_lone_byte_holds_back_one_character_at_most() -> None:
    stream = _codecs["byte_level"].stream()
    given_text = "".join(stream.push(_ALPHABET[0x9F]) for _ in range(200))
    assert len(given_text) == 199


def test_text_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys, steerpipe.engine.text, steerpipe.engine.tokenizer; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert found.stdout.strip() == "False"
