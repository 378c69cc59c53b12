"""Sampling settings: every field has a type and a range, and says so before a step is computed."""

import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest

from steerpipe.core.errors import RequestError
from steerpipe.core.sampling import SamplingSettings

WRONG: list[tuple[str, object, str]] = [
    *(("temperature", v, "a finite number, 0 or more") for v in (-0.1, float("nan"), float("inf"), "0.7", True, [1])),
    ("temperature", 10**400, "a finite number, 0 or more"),
    ("temperature", 1j, "a finite number, 0 or more"),
    *(("top_k", v, "a whole number, 0 (off) or more") for v in (-1, 2.5, 2.0, "5", True, None)),
    *(("top_p", v, "a number above 0 and at most 1") for v in (0, 1.1, float("nan"), "1", True, None)),
    *(("min_p", v, "a number between 0 and 1") for v in (-0.1, 1.1, float("nan"), False, "0")),
    *(("repetition_penalty", v, "a finite number above 0") for v in (0, -1, float("inf"), float("nan"), "1", True)),
    *(("presence_penalty", v, "a number between -2 and 2") for v in (-2.1, 2.1, float("nan"), "1", False)),
    *(("frequency_penalty", v, "a number between -2 and 2") for v in (-2.1, 2.1, float("nan"), "1", False)),
    *(("seed", v, "a whole number between 0 and 2**64 - 1") for v in (-1, 2**64, 1.5, "7", True)),
    *(("max_tokens", v, "a whole number, 1 or more") for v in (0, -1, 2.5, 2.0, "9", True)),
    *(("stop", v, "a string or a list of strings") for v in ("", [""], ["a", ""], [1], 5, b"ab", {"a": 1}, [["a"]])),
    *(("stop_token_ids", v, "a list of token ids") for v in (7, "12", [-1], [1.5], [True], ["1"], b"ab", {1: 2})),
    *(("ignore_eos", v, "True or False") for v in ("no", "true", 1, 0, None, [])),
    *(("logprobs", v, "a whole number between 0 and 20") for v in (-1, 21, 2.0, "3", True, False)),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG, ids=lambda v: repr(v)[:30])
def test_a_wrong_value_is_told_with_its_field_and_what_it_must_be(name: str, value: object, expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingSettings(**{name: value})  # type: ignore[arg-type]
    assert f"{name} is {value!r} ({type(value).__name__})" in str(caught.value)
    assert f"{name} must be {expected}" in caught.value.fix


def test_no_field_is_left_without_a_test() -> None:
    assert {name for name, _, _ in WRONG} == {field.name for field in fields(SamplingSettings)}


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("stop", "abc", ("abc",)),
        ("stop", ["a", "bc"], ("a", "bc")),
        ("stop", (), ()),
        ("stop_token_ids", [3, 4], (3, 4)),
        ("stop_token_ids", np.array([3, 4]), (3, 4)),
        ("temperature", 1, 1.0),
        ("temperature", np.float32(0.5), 0.5),
        ("top_p", np.int64(1), 1.0),
        ("top_k", np.int32(5), 5),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("seed", None, None),
        ("max_tokens", None, None),
        ("logprobs", 0, 0),
        ("ignore_eos", True, True),
    ],
    ids=repr,
)
def test_a_value_is_kept_in_the_form_of_its_field(name: str, given: object, kept: object) -> None:
    settings = SamplingSettings(**{name: given})  # type: ignore[arg-type]
    found = getattr(settings, name)
    assert found == kept
    assert type(found) is type(kept)
    assert hash(settings) == hash(SamplingSettings(**{name: kept}))  # type: ignore[arg-type]


def test_override_puts_in_what_is_not_none_and_checks_it() -> None:
    base = SamplingSettings(temperature=0.5, seed=3)
    changed = base.override(stop="END", max_tokens=4, seed=None)
    assert changed == SamplingSettings(temperature=0.5, seed=3, stop=("END",), max_tokens=4)
    with pytest.raises(RequestError, match=r"max_tokens is 2\.5 \(float\)"):
        base.override(max_tokens=2.5)


@pytest.mark.parametrize(("name", "near"), [("temprature", "temperature"), ("stops", "stop"), ("zzz", "")])
def test_an_unknown_setting_names_the_nearest(name: str, near: str) -> None:
    given: dict[str, Any] = {name: 1}
    with pytest.raises(RequestError) as caught:
        SamplingSettings().override(**given)
    assert f"{name} is not a sampling setting" in str(caught.value)
    assert (f"did you mean {near}? " if near else "the settings are temperature") in caught.value.fix


def test_settings_are_frozen_and_travel() -> None:
    settings = SamplingSettings(stop=("a",))
    with pytest.raises(FrozenInstanceError):
        settings.seed = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(settings)) == settings  # noqa: S301
