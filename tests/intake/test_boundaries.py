"""Which pairs are always cut, which tokenizers have a rule, and what the others get."""

import json

import pytest
from hypothesis import given, settings

from steerpipe.intake.boundaries import read_rule
from steerpipe.intake.draft import Draft
from steerpipe.intake.edits import insert
from steerpipe.intake.frame import PromptFrame
from steerpipe.intake.tokens import StablePrefix
from tests.intake.tokenizers_made import ADDED, KINDS, made, texts, tokens_of


@pytest.mark.parametrize(
    ("pair", "kinds"),
    [
        ("t ", KINDS),
        ("t'", ("gpt2", "digits", "qwen", "qwen3.5", "cl100k")),  # o200k's words go on with 's
        ("7a", KINDS),
        ("77", ()),
        (". ", KINDS),
        (".\n", ()),  # line breaks belong to the punctuation before them
        (".a", ()),
        ("\na", ("qwen", "qwen3.5", "cl100k", "o200k")),  # GPT-2's white space looks ahead
        ("\n/", ("qwen", "qwen3.5", "cl100k")),
        ("\n ", ()),
        (" a", ()),
        ("é ", KINDS),
        ("e\u0301", ()),  # NFC joins them
        ("好，", KINDS),
        ("😀 ", ()),  # newer than Unicode 3.2: not beyond doubt
    ],
)
def test_these_pairs_are_always_cut_and_those_are_not(pair: str, kinds: tuple[str, ...]) -> None:
    for kind in KINDS:
        rule = read_rule(json.loads(made(kind).to_str()))
        assert rule is not None and rule.cuts(pair[0], pair[1]) == (kind in kinds), kind


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"type": "Unigram"}},
    ],
    ids=str,
)
def test_no_rule_is_made_for_a_tokenizer_that_was_not_proved(change: dict[str, object]) -> None:
    definition = json.loads(made("gpt2").to_str())
    assert read_rule(definition) is not None and read_rule(definition | change) is None


def test_an_unknown_expression_has_no_rule() -> None:
    definition = json.loads(made("qwen").to_str())
    definition["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+$|\S+"
    assert read_rule(definition) is None


@settings(max_examples=30, deadline=None)
@given(text=texts)
def test_without_a_rule_the_head_up_to_its_last_special_token_is_stable(text: str) -> None:
    tokenizer = made("qwen")
    rule = read_rule(json.loads(tokenizer.to_str()))
    assert rule is not None
    frame = PromptFrame("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", "<|im_end|>")
    prefix = StablePrefix(frame, None, lambda part: tokenizer.encode(part).ids, added=rule.added)
    draft = Draft()
    prefix.follow(draft, draft.apply(insert(0, text, 0.0)).changed_at)
    whole = tokens_of(tokenizer, frame, text)
    assert prefix.ids == whole[: len(prefix.ids)]
    assert tokenizer.decode(list(prefix.ids), skip_special_tokens=False).endswith("<|im_end|>\n<|im_start|>")
    assert not prefix.behind


def test_a_special_token_that_another_continues_is_not_the_end_of_the_head() -> None:
    rule = read_rule(json.loads(made("qwen").to_str()))
    assert rule is not None and set(ADDED) <= set(rule.added.contents)
    assert rule.added.last_end("<|im_end|>x<|a b|>") == len("<|im_end|>")  # " c" may follow, and make another of it
    assert rule.added.last_end("<|im_end|>x<|a b|>y") == len("<|im_end|>x<|a b|>")
    assert rule.added.last_end("no token") == 0
