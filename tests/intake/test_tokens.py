"""Stable tokens: whatever is typed, nothing typed at the end later changes them."""

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from steerpipe.intake.boundaries import read_rule
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import delete, insert, move, replace
from steerpipe.intake.frame import PromptFrame, fill
from steerpipe.intake.keystrokes import read_sessions
from steerpipe.intake.tokens import _WINDOW, StablePrefix
from tests.intake.tokenizers_made import FRAMES, KINDS, made, sentencepiece, sentences, texts, tokens_of

NANO = Path(__file__).parents[2] / "src/steerpipe/assets/nano/tokenizer.json"
LOGS = Path(__file__).parents[3] / "shared" / "keystrokes" / "events.jsonl.gz"
examples = settings(max_examples=30, deadline=None)


def prefix_of(tokenizer: Tokenizer, frame: PromptFrame) -> StablePrefix:
    rule = read_rule(json.loads(tokenizer.to_str()))
    assert rule is not None
    return StablePrefix(frame, rule, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


def any_kind(kind: str) -> Tokenizer:
    return made(kind) if kind in KINDS else sentencepiece(kind)


def check_typing(tokenizer: Tokenizer, frame: PromptFrame, pieces: list[str]) -> None:
    """Every stable token on the way is a token of what the text becomes, with and without more behind it."""
    draft, prefix, passed = Draft(), prefix_of(tokenizer, frame), []
    for piece in pieces:
        before = prefix.ids
        change = prefix.follow(draft, draft.apply(insert(len(draft), piece, 0.0)).changed_at)
        assert prefix.ids[: change.kept] == before[: change.kept] and change.total == len(prefix.ids)
        passed.append((draft.text, prefix.ids))
    final = tokens_of(tokenizer, frame, draft.text)
    for text, stable in passed:
        assert final[: len(stable)] == stable, (text, draft.text)


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("kind", KINDS)
@examples
@given(text=texts | sentences)
def test_no_character_typed_at_the_end_changes_a_stable_token(kind: str, frame: PromptFrame, text: str) -> None:
    check_typing(made(kind), frame, list(text))


@pytest.mark.parametrize("kind", KINDS)
@examples
@given(pieces=st.lists(texts | sentences, max_size=6))
def test_nor_does_a_paste(kind: str, pieces: list[str]) -> None:
    check_typing(made(kind, nfc=False), FRAMES["chat"], pieces)


@pytest.mark.parametrize("kind", ["qwen", "gpt2"])
@examples
@given(text=texts)
def test_added_tokens_that_take_their_surroundings_are_waited_for(kind: str, text: str) -> None:
    check_typing(made(kind, greedy=True), FRAMES["chat"], list(text))


@examples
@given(pieces=st.lists(texts | sentences, max_size=6))
def test_the_embedded_tokenizer_keeps_its_stable_tokens(pieces: list[str]) -> None:
    check_typing(Tokenizer.from_file(str(NANO)), FRAMES["chat"], pieces)


@pytest.mark.parametrize("joining", [False, True], ids=["released", "joining"])
@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("kind", ["prepended", "first", "always", "never"])
@examples
@given(pieces=st.lists(texts | sentences, max_size=4))
def test_sentencepiece_without_a_splitter_keeps_its_stable_tokens(
    kind: str, frame: PromptFrame, joining: bool, pieces: list[str]
) -> None:
    check_typing(sentencepiece(kind, joining=joining), frame, pieces)
    check_typing(sentencepiece(kind, joining=joining), frame, list("".join(pieces)))


def edit_scripts() -> st.SearchStrategy[list[tuple[str, int, int, str]]]:
    """(what, where, how much, text) with places that are taken modulo the length of the text."""
    step = st.tuples(
        st.sampled_from(["insert", "insert", "delete", "replace", "move"]),
        st.integers(0, 999),
        st.integers(0, 9),
        texts,
    )
    return st.lists(step, max_size=12)


def apply_step(draft: Draft, step: tuple[str, int, int, str]) -> int:
    what, where, count, text = step
    at = where % (len(draft) + 1)
    count = min(count, len(draft) - at)
    if what == "insert":
        return draft.apply(insert(at, text, 0.0)).changed_at
    if what == "delete":
        return draft.apply(delete(at, count, 0.0)).changed_at
    if what == "replace":
        return draft.apply(replace(at, count, text, 0.0)).changed_at
    return draft.apply(move(at, count, (where * 7) % (len(draft) - count + 1), 0.0)).changed_at


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("kind", [*KINDS, "prepended"])
@examples
@given(steps=edit_scripts(), more=texts)
def test_edits_anywhere_take_back_what_they_may_change(
    kind: str, frame: PromptFrame, steps: list[tuple[str, int, int, str]], more: str
) -> None:
    tokenizer, draft = any_kind(kind), Draft()
    prefix = prefix_of(tokenizer, frame)
    for step in steps:
        before = prefix.ids
        change = prefix.follow(draft, apply_step(draft, step))
        assert prefix.ids[: change.kept] == before[: change.kept]
        for text in (draft.text, draft.text + more):
            assert tokens_of(tokenizer, frame, text)[: change.total] == prefix.ids, text
    head, typed = frame.head, fill(frame, draft.text)[: -len(frame.tail) or None]
    assert prefix.tail == "" or typed.endswith(prefix.tail)
    assert len(prefix.tail) <= len(head) + len(draft)


@pytest.mark.parametrize("kind", [*KINDS, "prepended", "first"])
def test_the_stable_tokens_follow_a_word_behind(kind: str) -> None:
    tokenizer, frame, draft = any_kind(kind), FRAMES["chat"], Draft()
    prefix = prefix_of(tokenizer, frame)
    text = "Can you tell me what 12 dogs said to the cats? They said nothing, I think"
    for character in text:
        prefix.follow(draft, draft.apply(insert(len(draft), character, 0.0)).changed_at)
        assert len(prefix.tail.split()) <= 2 or not prefix.tail_begins  # a template's head may end inside of a word
    assert prefix.tail == " think" and prefix.tail_begins == len(text) - len(" think")


def test_half_an_added_token_holds_its_place_open_until_it_is_none() -> None:
    tokenizer, draft = made("qwen"), Draft()
    prefix = prefix_of(tokenizer, FRAMES["plain"])
    tails = []
    for character in "so <|im_end| x <|im_end|> y":
        prefix.follow(draft, draft.apply(insert(len(draft), character, 0.0)).changed_at)
        tails.append(prefix.tail)
    assert " <|im_end|" in tails and "|> y" not in tails  # never cut inside of what could become, or is, one token
    assert prefix.ids == tuple(tokenizer.encode("so <|im_end| x <|im_end|>", add_special_tokens=False).ids)


def test_a_letter_put_where_a_word_ended_takes_the_word_back() -> None:
    tokenizer, draft = Tokenizer.from_file(str(NANO)), Draft()
    prefix = prefix_of(tokenizer, FRAMES["chat"])
    for character in "not the end now":
        prefix.follow(draft, draft.apply(insert(len(draft), character, 0.0)).changed_at)
    before = prefix.ids
    change = prefix.follow(draft, draft.apply(insert(7, "m", 0.0)).changed_at)  # "not them end now"
    assert change.kept == len(before) - 2 and before != prefix.ids
    assert tokens_of(tokenizer, FRAMES["chat"], draft.text)[: change.total] == prefix.ids


@pytest.mark.parametrize("kind", KINDS)
@examples
@given(steps=edit_scripts(), words=st.lists(st.sampled_from(["the", "story", "ends", "here"]), min_size=8, max_size=90))
def test_edits_do_not_leave_whole_words_behind_as_unstable(
    kind: str, steps: list[tuple[str, int, int, str]], words: list[str]
) -> None:
    draft, prefix = Draft(), prefix_of(made(kind), FRAMES["chat"])
    prefix.follow(draft, draft.apply(insert(0, " ".join(words), 0.0)).changed_at)
    for what, where, count, _ in steps:
        prefix.follow(draft, apply_step(draft, (what, where, count, "xy")))
        assert prefix.behind or len(prefix.tail.split()) <= 1


def test_white_space_that_the_template_strips_is_not_there() -> None:
    tokenizer, frame, draft = made("qwen"), FRAMES["words"], Draft()
    prefix = prefix_of(tokenizer, frame)
    for character in "hello there ":
        prefix.follow(draft, draft.apply(insert(len(draft), character, 0.0)).changed_at)
    assert prefix.tail == " there"  # at Enter, " ASSISTANT:" follows, not the space
    prefix.follow(draft, draft.apply(delete(5, 7, 0.0)).changed_at)
    assert (draft.text, prefix.tail) == ("hello", " hello")


def test_a_long_paste_is_looked_at_in_parts_and_then_is_as_if_typed() -> None:
    tokenizer, draft = made("qwen"), Draft()
    text = "Some words and 12 numbers, again and again. " * 200
    prefix = prefix_of(tokenizer, FRAMES["chat"])
    prefix.follow(draft, draft.apply(insert(0, text, 0.0)).changed_at)
    assert prefix.behind
    calls = 0
    while prefix.behind:
        prefix.advance()
        calls += 1
    assert calls == (len(text) - 1) // _WINDOW and prefix.tail == " "
    before = prefix.ids
    change = prefix.follow(draft, draft.apply(delete(4000, 1, 0.0)).changed_at)
    whole = tokens_of(tokenizer, FRAMES["chat"], draft.text)
    assert before[: change.kept] == whole[: change.kept]
    assert len(tokenizer.encode(text[:3500]).ids) < change.kept < len(tokenizer.encode(text[:4010]).ids)


@pytest.mark.slow
@pytest.mark.skipif(not LOGS.exists(), reason="the KLiCKe logs are not beside the project")
def test_what_real_writers_type_delete_and_move_keeps_its_stable_tokens() -> None:
    tokenizer, frame = Tokenizer.from_file(str(NANO)), FRAMES["chat"]
    for session in islice(read_sessions(LOGS), 12):
        draft, prefix = Draft(), prefix_of(tokenizer, frame)
        for number, edit in enumerate(session.edits[:3000]):
            before = prefix.ids
            change = prefix.follow(draft, draft.apply(edit).changed_at)
            assert prefix.ids[: change.kept] == before[: change.kept]
            if number % 5 == 0:
                assert tokens_of(tokenizer, frame, draft.text)[: change.total] == prefix.ids, session.writer
                assert prefix.behind or len(prefix.tail.split()) <= 2
