"""Prompts are held out by a hash of their id: the same ones whatever else is in the set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steerpipe.core.errors import InputError
from steerpipe.trace.split import split_prompts


def test_the_share_is_about_what_was_asked_for() -> None:
    prompts = [f"p{number}" for number in range(4000)]
    for share in (0.15, 0.5):
        train, test = split_prompts(prompts, share)
        assert abs(len(test) / 4000 - share) < 0.02 and len(train) + len(test) == 4000


@given(st.sets(st.text(), min_size=60, max_size=90), st.integers(0, 5))
def test_more_prompts_and_another_order_move_nobody(prompts: set[str], seed: int) -> None:
    ordered = sorted(prompts)
    try:
        train, test = split_prompts(ordered, 0.3, seed)
        again = split_prompts([*reversed(ordered), *(f"new-{i}-{i}" for i in range(50))], 0.3, seed)
    except InputError:
        return
    assert not set(train) & set(test) and set(train) | set(test) == prompts
    assert set(train) <= set(again[0]) and set(test) <= set(again[1])


def test_another_seed_holds_out_others() -> None:
    prompts = [f"p{number}" for number in range(200)]
    assert split_prompts(prompts, 0.3, 1) != split_prompts(prompts, 0.3, 2)
    assert split_prompts(prompts, 0.3, 1) == split_prompts(prompts, 0.3, 1)


def test_repeats_are_one_prompt() -> None:
    prompts = [f"p{number}" for number in range(40)]
    assert split_prompts(prompts + prompts, 0.3) == split_prompts(prompts, 0.3)


@pytest.mark.parametrize(("prompts", "share"), [([], 0.15), (["a"], 0.15), (["a", "b"], 0.0), (["a", "b"], 1.0)])
def test_a_split_with_an_empty_side_is_refused(prompts: list[str], share: float) -> None:
    with pytest.raises(InputError):
        split_prompts(prompts, share)
