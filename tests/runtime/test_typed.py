"""Stable tokens through real tokenizers and chat templates: what the engine will see begins with them."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.engine.tokenizer import ChatMessage, TextCodec
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import insert
from steerpipe.intake.frame import PromptFrame, find_frame
from steerpipe.runtime.models import EMBEDDED
from steerpipe.runtime.prompts import Prompt, encode_prompt
from steerpipe.runtime.typed import TypedPrompts
from tests.engine import tiny_tokenizers

HISTORY = [ChatMessage("user", "Hello there! "), ChatMessage("assistant", "Hi, how are you?")]
TRIMMED = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] | trim }}</s>{% endfor %}<s>assistant:"
LOUD = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
PIECES = ["Can", "you", " ", "\n", "it's", "12", ".", "<|im_", "end|>", "é", "日本", "the", "</s>"]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@cache
def nano() -> TextCodec:
    return TextCodec.load(EMBEDDED)


def codec_of(tmp_path: Path, kind: str, template: str | None) -> TextCodec:
    return TextCodec.load(tiny_tokenizers.save(getattr(tiny_tokenizers, kind)(), tmp_path / kind, template))


def follow(codec: TextCodec, text: str, prompt: Prompt, history: list[ChatMessage], raw: bool) -> int:
    """Types `text`, and demands that the stable tokens always begin `prompt`; how many there are at last."""
    whole = encode_prompt(prompt, codec, raw=raw)
    draft, prefix = Draft(), TypedPrompts(codec).begin(history, raw=raw)
    assert prefix.ids == whole[: len(prefix.ids)]
    for character in text:
        prefix.follow(draft, draft.apply(insert(len(draft), character, 0.0)).changed_at)
        assert prefix.ids == whole[: len(prefix.ids)]
    return len(prefix.ids)


@settings(max_examples=40, deadline=None)
@given(text=texts)
def test_nanos_chat_prompt_begins_with_the_stable_tokens(text: str) -> None:
    turns = [*HISTORY, ChatMessage("user", text)]
    follow(nano(), text, turns, HISTORY, raw=False)
    follow(nano(), text, [ChatMessage("user", text)], [], raw=False)
    follow(nano(), text, text, [], raw=True)


def test_all_of_the_conversation_before_a_draft_is_stable_at_once() -> None:
    prefix = TypedPrompts(nano()).begin(HISTORY)
    whole = encode_prompt([*HISTORY, ChatMessage("user", "x")], nano(), raw=False)
    assert len(whole) - len(prefix.ids) <= 8  # the line break after "user", the text and the template's end


@pytest.mark.parametrize("template", [tiny_tokenizers.TEMPLATE, TRIMMED], ids=["plain", "trimmed"])
@settings(max_examples=25, deadline=None)
@given(text=texts)
def test_a_gpt2_like_tokenizer_is_followed_through_templates(
    template: str, text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    codec = codec_of(tmp_path_factory.mktemp("gpt2"), "byte_level", template)
    follow(codec, text, [ChatMessage("user", text)], [], raw=False)
    follow(codec, text, text, [], raw=True)


def test_a_beginning_that_the_tokenizer_adds_is_stable_from_the_start(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, "byte_level", None)
    assert TypedPrompts(codec).begin(raw=True).ids == tuple(codec.encode("", add_special=True)) != ()
    assert follow(codec, "the cat the", "the cat the", [], raw=True) > 5


def test_a_sentencepiece_tokenizer_gives_the_head_and_no_more(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, "byte_fallback", TRIMMED)
    prompts = TypedPrompts(codec)
    assert prompts.rule is None
    count = follow(codec, "the cat stops a cat.", [ChatMessage("user", "the cat stops a cat.")], [], raw=False)
    assert prompts.begin().ids == tuple(codec.encode_part("<s>")) and count == 1
    longer = prompts.begin([ChatMessage("user", "the cat"), ChatMessage("assistant", "stop")])
    assert codec.decode(longer.ids) and len(longer.ids) > 8


def test_a_template_that_rewrites_the_text_makes_nothing_stable(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, "byte_level", LOUD)
    assert follow(codec, "the cat stops", [ChatMessage("user", "the cat stops")], [], raw=False) == 0


def test_frames_are_found_by_trying() -> None:
    assert find_frame(lambda text: f"<u>{text.strip()}</u>") is not None
    frame = find_frame(lambda text: f"<u>{text.lstrip()}</u>")
    assert frame == PromptFrame("<u>", "</u>", strips_left=True, strips_right=False)
    assert find_frame(lambda text: text.replace("\n", " ")) is None
    assert find_frame(lambda text: f"{len(text)}: {text}") is None
    assert find_frame(lambda text: f"{text} {text}") is None


@pytest.mark.parametrize("text", ["", " the cat", "日本 é\n\n", "<|im_end|> <s>", "a" * 999])
def test_a_part_is_encoded_as_a_whole_text_would_be(text: str) -> None:
    assert nano().encode_part(text) == nano().encode(text, add_special=False)
