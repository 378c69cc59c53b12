"""How the next token is chosen: settings only. The arithmetic is in `model.sampling`."""

import difflib
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

from steerpipe.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Order of application: penalties, temperature, top-k, top-p, min-p. `temperature=0` is greedy.

    The defaults change nothing: plain sampling from the model's own distribution. Every value is checked on creation
    and put into the form of its annotation: one stop string becomes a tuple of one, a whole number a float.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # over prompt and answer, as in Hugging Face
    presence_penalty: float = 0.0  # over the answer, as in OpenAI's API
    frequency_penalty: float = 0.0  # over the answer, as in OpenAI's API
    seed: int | None = None  # None: a fresh one per request
    max_tokens: int | None = None  # None: as far as the context reaches
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; 0: the chosen token only; n: and the n likeliest

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value is None and field.default is None):
                object.__setattr__(self, field.name, _RULES[field.name].read(field.name, value))

    def override(self, **given: Any) -> "SamplingSettings":
        """These settings with every given value that is not None put in its place."""
        known = [f.name for f in fields(self)]
        for name in given.keys() - set(known):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise RequestError(f"{name} is not a sampling setting", fix=f"{hint}the settings are {', '.join(known)}")
        return replace(self, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a value must be. `convert` raises TypeError, ValueError or OverflowError for what is of another kind."""

    expected: str
    convert: Callable[[Any], Any]
    holds: Callable[[Any], bool] = lambda _: True

    def read(self, name: str, value: object) -> object:
        try:
            converted = self.convert(value)
            if self.holds(converted):
                return converted
        except (TypeError, ValueError, OverflowError):  # overflow: an integer that no float holds
            pass
        raise RequestError(f"{name} is {value!r} ({type(value).__name__})", fix=f"{name} must be {self.expected}")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):  # numpy's scalars are Real; text is not
        raise TypeError
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool):  # True is an int to Python, but nobody means 1 by it
        raise TypeError
    return operator.index(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_text(item) for item in ([value] if isinstance(value, str) else _items(value)))


def _token_ids(value: Any) -> tuple[int, ...]:
    return tuple(_whole(item) for item in _items(value))


def _items(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | dict):  # they can be iterated over, but are not lists
        raise TypeError
    return tuple(value)


def _penalty() -> _Rule:
    return _Rule("a number between -2 and 2", _number, lambda v: -2 <= v <= 2)


_RULES: dict[str, _Rule] = {
    "temperature": _Rule("a finite number, 0 or more", _number, lambda v: math.isfinite(v) and v >= 0),
    "top_k": _Rule("a whole number, 0 (off) or more", _whole, lambda v: v >= 0),
    "top_p": _Rule("a number above 0 and at most 1", _number, lambda v: 0 < v <= 1),
    "min_p": _Rule("a number between 0 and 1", _number, lambda v: 0 <= v <= 1),
    "repetition_penalty": _Rule("a finite number above 0", _number, lambda v: math.isfinite(v) and v > 0),
    "presence_penalty": _penalty(),
    "frequency_penalty": _penalty(),
    "seed": _Rule("a whole number between 0 and 2**64 - 1", _whole, lambda v: 0 <= v < 2**64),
    "max_tokens": _Rule("a whole number, 1 or more", _whole, lambda v: v >= 1),
    "stop": _Rule("a string or a list of strings, none of them empty", _texts),
    "stop_token_ids": _Rule("a list of token ids, 0 or more each", _token_ids, lambda v: all(i >= 0 for i in v)),
    "ignore_eos": _Rule("True or False", _switch),
    "logprobs": _Rule("a whole number between 0 and 20", _whole, lambda v: 0 <= v <= 20),
}
assert _RULES.keys() == {f.name for f in fields(SamplingSettings)}, "every setting has one rule"
