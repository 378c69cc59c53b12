"""From the unstable tail to tokens: only tokens that the text can have, likelier with every key and every draft."""

import gc
import json
import tracemalloc
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from steerpipe.intake.boundaries import read_rule
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import insert
from steerpipe.intake.frame import PromptFrame
from steerpipe.intake.guess import Guesser, token_shares
from steerpipe.intake.ngram import CharacterModel
from steerpipe.intake.person import PersonalModel
from steerpipe.intake.tokens import StablePrefix

NANO = Path(__file__).parents[2] / "src/steerpipe/assets/nano/tokenizer.json"
FRAME = PromptFrame("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(NANO))


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


@cache
def model() -> CharacterModel:
    return CharacterModel.load()


def guesser() -> Guesser:
    rule = read_rule(json.loads(tokenizer().to_str()))
    assert rule is not None
    return Guesser(model(), rule, encode)


def first_words(found: Guesser, before: str, tail: str) -> list[str]:
    return [tokenizer().decode([token]) for token, _ in found.guess(before, tail).first_tokens()]


def test_a_word_that_is_begun_is_finished() -> None:
    assert first_words(guesser(), "Can you tell me", " wha")[0] == " what"
    assert first_words(guesser(), "I would like to know how", " man")[0] == " many"
    assert " movie" in first_words(guesser(), "Do you have a favorite", " mov")[:3]


def test_probabilities_are_a_part_of_one_and_sorted() -> None:
    for before, tail in (
        ("", "W"),
        ("How are", " "),
        ("What is", " th"),
        ("zq", "xv"),
        ("It is 1", "2"),
        ("x\n", "\n"),
    ):
        found = guesser().guess(before, tail)
        shares = [guess.probability for guess in found.guesses]
        assert shares == sorted(shares, reverse=True) and 0 <= sum(shares) <= 1.1
        assert 0 <= found.enter <= 1
        assert sum(share for _, share in found.first_tokens()) == pytest.approx(sum(shares))


def test_every_guess_is_what_the_tokenizer_makes_of_a_text_that_goes_on_from_the_tail() -> None:
    for tail in (" unbel", " pre", "I'", " 12", " (so"):
        for guess in guesser().guess("", tail).guesses:
            text = tokenizer().decode(list(guess.token_ids))
            assert text.startswith(tail) and encode(text) == list(guess.token_ids)


def test_a_finished_sentence_is_more_likely_to_be_sent_than_half_a_word() -> None:
    found = guesser()
    whole, half = found.guess("How are you doing", "?"), found.guess("How are you", " doi")
    assert whole.enter > 10 * half.enter
    finished = {guess.token_ids: guess.probability for guess in whole.guesses}
    assert finished[tuple(encode("?"))] > 0.9 * whole.enter > 0.2  # Enter finishes a piece as a space does


def test_no_tail_or_one_that_is_no_word_gives_no_guess() -> None:
    assert guesser().guess("", "").guesses == ()
    assert guesser().guess("", "x" * 65).guesses == () and guesser().guess("", "x" * 64).guesses != ()


def test_characters_that_the_model_never_saw_do_no_harm() -> None:
    for tail in (" 你", "😀", "\x00", "é\u0301"):
        assert all(guess.token_ids for guess in guesser().guess("你好", tail).guesses)


def test_what_a_person_sent_before_is_expected_again() -> None:
    found = guesser()
    assert " Zanzibarqu" not in "".join(first_words(found, "Tell me about", " Zan"))
    before = found.guess("I live in Zanz", "ibar").guesses
    found.learn("Tell me about Zanzibarquist towns. I live in Zanzibarquist.")
    learnt = [tokenizer().decode(list(guess.token_ids)) for guess in found.guess("Tell me about", " Zanz").guesses]
    assert learnt[0] == " Zanzibarquist"
    found.forget()
    assert found.guess("I live in Zanz", "ibar").guesses == before


def test_what_is_learnt_has_a_limit_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steerpipe.intake.person._MOST_CONTEXTS", 60)
    person = PersonalModel()
    person.learn([10, 11, 12, 13, 14, 15])
    for start in range(20, 100):
        person.learn([start + step for step in range(12)])
    assert len(person) == 60
    assert person.blend((10, 11, 12, 13), [(14, 0.1), (50, 0.9)]) == [(14, 0.1), (50, 0.9)]
    person.learn([7] * 100_000)
    assert len(person) == 60


def test_blending_keeps_a_distribution_a_distribution() -> None:
    person = PersonalModel()
    person.learn([10, 11, 12, 13, 14, 10, 11, 12, 13, 15])
    blended = dict(person.blend((9, 10, 11, 12, 13), [(14, 0.5), (50, 0.5)]))
    assert sum(blended.values()) == pytest.approx(1.0) and blended[14] > blended[15] > 0 and 0 < blended[50] < 0.5


def test_the_expected_number_of_each_token_is_summed_over_guesses() -> None:
    found = guesser().guess("Do you like", " prefetchi")
    shares = token_shares(found.guesses)
    assert shares and all(share <= 1.5 for share in shares.values())
    first = found.guesses[0].token_ids[0]
    assert shares[first] >= found.guesses[0].probability


def test_the_guess_gets_more_certain_while_a_word_is_typed() -> None:
    found, text = guesser(), " important"
    shares = []
    for end in range(3, len(text) + 1):
        ranked = dict(found.guess("This is very", text[:end]).first_tokens())
        shares.append(ranked.get(encode(text)[0], 0.0))
    assert shares[-1] > 0.8 and shares[0] < shares[-1]


def test_a_thousand_abandoned_drafts_leave_no_memory_behind() -> None:
    found = guesser()
    rule = read_rule(json.loads(tokenizer().to_str()))
    assert rule is not None

    def abandon(count: int) -> None:
        for number in range(count):
            draft, prefix = Draft(), StablePrefix(FRAME, rule, encode)
            prefix.follow(draft, draft.apply(insert(0, f"What about {number} dogs and", 0.0)).changed_at)
            found.guess(draft.slice(0, prefix.tail_begins), prefix.tail)

    abandon(30)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        abandon(1000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 50_000
