from dataclasses import replace

import numpy as np
import pytest

from steerpipe.arena.apart import check_apart, without_openings, without_repeats
from steerpipe.core.errors import InputError
from steerpipe.predict.records import TracedSequence
from tests.arena.traces import draw


def test_a_shared_prompt_is_refused_by_name() -> None:
    sequences = draw(prompts=4)
    other = [replace(sequences[3], tokens=sequences[3].tokens + 1)]
    with pytest.raises(InputError, match=r"share 1 prompt ids, prompt 3 among them"):
        check_apart(sequences, other)


def test_the_same_text_under_another_name_is_refused_too() -> None:
    sequences = draw(prompts=4)
    with pytest.raises(InputError, match=r"share 1 texts, token for token, other name among them"):
        check_apart(sequences, [replace(sequences[3], prompt="other name")])


def test_sets_apart_pass_and_repeats_can_be_left_out() -> None:
    train, test = draw(prompts=4), draw(prompts=2, seed=9, first=10)
    check_apart(train, test)
    repeated = replace(train[0], prompt="again")
    assert without_repeats(train, [repeated, *test]) == test


def test_tokens_that_a_training_text_begins_with_too_are_left_out() -> None:
    train, (text,) = draw(prompts=3), draw(prompts=1, seed=9, first=10, states=True)
    opened = replace(text, tokens=np.concatenate([train[1].tokens[:7], text.tokens[7:] + 100]))
    kept, left_out = without_openings(train, [opened, replace(train[2], prompt="again"), text])
    assert left_out == 7 + len(train[2].tokens) + _common(train, text)
    assert [each.prompt for each in kept] == ["prompt 10", "prompt 10"]
    own = kept[0]
    assert own.tokens.tolist() == (text.tokens[7:] + 100).tolist()
    assert own.prompt_tokens == text.prompt_tokens - 7
    assert own.weights is not None and own.states is not None and text.states is not None
    assert len(own.experts) == len(own.weights) == 13
    assert own.states.residual.equal(text.states.residual[7:])


def _common(train: list[TracedSequence], text: TracedSequence) -> int:
    """Tokens that the text happens to begin with as one of `train` does."""
    longest = 0
    for each in train:
        pairs = zip(each.tokens.tolist(), text.tokens.tolist(), strict=True)
        longest = max(longest, next((place for place, (one, other) in enumerate(pairs) if one != other), 20))
    return longest
