"""Reading a config.json strictly: a key is required, understood, fixed or inert; any other stops the load."""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from steerpipe.core.errors import UnsupportedConfigError

T = TypeVar("T")

# Keys that any config.json may carry and that change no number at inference.
INERT = frozenset({
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "_experts_implementation", "architectures",
    "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "keys_to_ignore_at_inference", "label2id", "model_type",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "problem_type", "return_dict", "router_aux_loss_coef", "router_jitter_noise", "torch_dtype",
    "transformers_version", "use_cache",
})  # fmt: skip


class ConfigKeys:
    """A config.json whose every key must be asked for, or known to be inert, before `finish`."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self.where = where
        self._asked: set[str] = set()

    def required(self, name: str, kind: Callable[[Any], T], *spellings: str) -> T:
        """The value under `name` or one of its older spellings; the load stops without it."""
        value = self._find(name, spellings)
        if value is None:
            raise UnsupportedConfigError(
                f"{self.where} has no {name!r}",
                fix="the file is not a complete model config: take config.json from the model's own repository",
            )
        return self._convert(name, kind, value)

    def understood(self, name: str, kind: Callable[[Any], T], default: T, *spellings: str) -> T:
        """The value under `name`, or the architecture's default where it is absent or null."""
        value = self._find(name, spellings)
        return default if value is None else self._convert(name, kind, value)

    def optional(self, name: str, kind: Callable[[Any], T], *spellings: str) -> T | None:
        value = self._find(name, spellings)
        return None if value is None else self._convert(name, kind, value)

    def must_equal(self, name: str, allowed: Collection[Any]) -> None:
        """A key whose other values would change numbers in a way that the decoder does not compute."""
        value = self._find(name, ())
        if value is not None and value not in allowed:
            raise UnsupportedConfigError(
                f"{self.where} says {name} = {_short(value)}; "
                f"only {', '.join(repr(v) for v in allowed)} is computed here",
                fix=f"run this model through transformers, or open an issue that asks for {name} = {_short(value)}",
            )

    def finish(self) -> None:
        """Stops the load if a key is left that nobody asked for."""
        said = (key for key, value in self._raw.items() if value is not None and value not in ({}, []))
        unknown = sorted(key for key in said if key not in self._asked and key not in INERT)
        if not unknown:
            return
        key = unknown[0]
        near = difflib.get_close_matches(key, self._asked | INERT, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UnsupportedConfigError(
            f"{self.where} has keys that are not understood and may change the numbers: "
            + ", ".join(f"{k} = {_short(self._raw[k])}" for k in unknown) + hint,
            fix=f"if {key!r} is a spelling mistake or inert, remove it from config.json; otherwise this model needs "
            "an engine that knows the key: open an issue with the model's name",
        )  # fmt: skip

    def sub(self, value: Mapping[str, Any], name: str) -> "ConfigKeys":
        return ConfigKeys(value, f"{name} in {self.where}")

    def _find(self, name: str, spellings: tuple[str, ...]) -> Any:
        self._asked.update((name, *spellings))
        found = {key: self._raw[key] for key in (name, *spellings) if self._raw.get(key) is not None}
        if len({repr(v) for v in found.values()}) > 1:
            raise self.contradiction(found)
        return next(iter(found.values()), None)

    def contradiction(self, found: Mapping[str, Any]) -> UnsupportedConfigError:
        said = ", ".join(f"{key} = {_short(value)}" for key, value in found.items())
        return UnsupportedConfigError(
            f"{self.where} says the same thing twice and differently: {said}", fix="keep one of the two keys"
        )

    def _convert(self, name: str, kind: Callable[[Any], T], value: Any) -> T:
        try:
            return kind(value)
        except (TypeError, ValueError) as problem:
            raise UnsupportedConfigError(
                f"{self.where} says {name} = {_short(value)}: {problem}",
                fix="take config.json from the model's own repository",
            ) from None


_MOST = 2**31 - 1  # no size in a config.json comes near it; what is above is damage, and would fill the memory


def positive(value: Any, most: int = _MOST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"a whole number from 1 to {most} is needed")
    return value


def count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError(f"a whole number from 0 to {_MOST} is needed")
    return value


def layer_count(value: Any) -> int:
    return positive(value, most=1_000)


def expert_count(value: Any) -> int:
    return positive(value, most=10_000)


def number(value: Any) -> float:
    """JSON as Python reads it has NaN, infinities and integers that no float holds; none of them is a setting."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e30:
        raise ValueError("a finite number is needed")
    return float(value)


def above_zero(value: Any) -> float:
    if number(value) <= 0:
        raise ValueError("a number above 0 is needed")
    return float(value)


def at_least_one(value: Any) -> float:
    if number(value) < 1:
        raise ValueError("a number of at least 1 is needed")
    return float(value)


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false is needed")
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("an object is needed")
    return value


def counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of whole numbers is needed")
    return tuple(count(v) for v in value)


def factors(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of numbers above 0 is needed")
    return tuple(above_zero(v) for v in value)


def texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError("a list of strings is needed")
    return tuple(value)


def _short(value: Any) -> str:
    """A value as an error shows it: a quantization_config may be hundreds of lines."""
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:77]}..."
