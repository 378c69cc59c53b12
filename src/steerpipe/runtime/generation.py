"""Sampling defaults from a checkpoint's generation_config.json, read as strictly as the model's config."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steerpipe.core.errors import RequestError, UnsupportedConfigError
from steerpipe.core.sampling import SamplingSettings
from steerpipe.model.checkpoint import is_there, read_json

_SETTINGS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
_WHOLE = ("top_k", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's makers recommend. `end_tokens` end an answer unless it is told to ignore them."""

    settings: SamplingSettings
    end_tokens: frozenset[int]


def read_defaults(folder: Path, tokenizer_ends: tuple[int, ...]) -> GenerationDefaults:
    """Defaults of a model folder. `do_sample: false` or no file at all means greedy, as transformers reads it.

    Keys that this engine has no setting for (beam search and the like) are not applied: they are wishes for a search
    that the caller has not asked for, not a part of the model.
    """
    file = folder / "generation_config.json"
    raw = read_json(file) if is_there(file) else {}
    source = file if "eos_token_id" in raw else folder / "config.json"
    ends = _token_ids(read_json(source).get("eos_token_id"), source) | frozenset(tokenizer_ends)
    sampled = _settings(raw, file)
    do_sample = raw.get("do_sample") or False
    if not isinstance(do_sample, bool):
        raise _nonsense(file, "do_sample", do_sample, "true or false is needed")
    greedy = SamplingSettings(
        temperature=0.0, repetition_penalty=sampled.repetition_penalty, max_tokens=sampled.max_tokens
    )
    return GenerationDefaults(sampled if do_sample else greedy, ends)


def _settings(raw: Mapping[str, Any], file: Path) -> SamplingSettings:
    """All settings of the file, each checked, whether it will be used or not."""
    settings = SamplingSettings()
    for theirs, ours in _SETTINGS.items():
        value = raw.get(theirs)
        if value is None:
            continue
        kind = int if theirs in _WHOLE else int | float
        if isinstance(value, bool) or not isinstance(value, kind):
            raise _nonsense(file, theirs, value, f"a {'whole ' if theirs in _WHOLE else ''}number is needed")
        try:
            settings = settings.override(**{ours: value})
        except RequestError as problem:
            raise _nonsense(file, theirs, value, problem.fix) from None
    return settings


def _token_ids(value: Any, file: Path) -> frozenset[int]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in listed):
        raise _nonsense(file, "eos_token_id", value, "a token id or a list of them is needed")
    return frozenset(listed)


def _nonsense(file: Path, name: str, value: object, needed: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(
        f"{file} says {name} = {value!r}: {needed}",
        fix=f"correct {name}, or take {file.name} from the model's own repository",
    )
