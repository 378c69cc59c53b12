"""Reading a config.json strictly: a key is required, understood, fixed or inert; any other stops the load."""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from steerpipe.core.errors import UnsupportedConfigError

T = TypeVar("T")

# Keys that any config.json may carry and that change no number at inference.
INERT = frozenset({
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "_experts_implementation", "architectures",
    "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "keys_to_ignore_at_inference", "label2id", "model_type",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "problem_type", "return_dict", "router_aux_loss_coef", "router_jitter_noise", "torch_dtype",
    "transformers_version", "use_cache",
})  # fmt: skip


class ConfigKeys:
    """A config.json whose every key must be asked for, or known to be inert, before `finish`."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where
        self._asked: set[str] = set()

    def required(self, name: str, kind: Callable[[Any], T], *spellings: str) -> T:
        """The value under `name` or one of its older spellings; the load stops without it."""
        value = self._find(name, spellings)
        if value is None:
            raise UnsupportedConfigError(
                f"{self._where} has no {name!r}",
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
                f"{self._where} says {name} = {value!r}; only {', '.join(repr(v) for v in allowed)} is computed here",
                fix=f"run this model through transformers, or open an issue that asks for {name} = {value!r}",
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
            f"{self._where} has keys that are not understood and may change the numbers: "
            + ", ".join(f"{k} = {self._raw[k]!r}" for k in unknown) + hint,
            fix=f"if {key!r} is a spelling mistake or inert, remove it from config.json; otherwise this model needs "
            "an engine that knows the key: open an issue with the model's name",
        )  # fmt: skip

    def sub(self, value: Mapping[str, Any], name: str) -> "ConfigKeys":
        return ConfigKeys(value, f"{name} in {self._where}")

    def _find(self, name: str, spellings: tuple[str, ...]) -> Any:
        self._asked.update((name, *spellings))
        found = {key: self._raw[key] for key in (name, *spellings) if self._raw.get(key) is not None}
        if len({repr(v) for v in found.values()}) > 1:
            raise UnsupportedConfigError(
                f"{self._where} says the same thing twice and differently: {found}", fix="keep one of the two keys"
            )
        return next(iter(found.values()), None)

    def _convert(self, name: str, kind: Callable[[Any], T], value: Any) -> T:
        try:
            return kind(value)
        except (TypeError, ValueError) as problem:
            raise UnsupportedConfigError(
                f"{self._where} says {name} = {value!r}: {problem}",
                fix="take config.json from the model's own repository",
            ) from None


def positive(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("a whole number of at least 1 is needed")
    return value


def count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("a whole number of at least 0 is needed")
    return value


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number is needed")
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


def numbers(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of numbers is needed")
    return tuple(number(v) for v in value)


def texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError("a list of strings is needed")
    return tuple(value)
