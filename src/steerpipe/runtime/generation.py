"""Sampling defaults from a checkpoint's generation_config.json, read as strictly as the model's config."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steerpipe.core.errors import UnsupportedConfigError
from steerpipe.core.sampling import SamplingSettings
from steerpipe.model.checkpoint import read_json

_SETTINGS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip


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
    raw = read_json(file) if file.exists() else {}
    config = read_json(folder / "config.json")
    ends = _token_ids(raw.get("eos_token_id", config.get("eos_token_id")), file) | frozenset(tokenizer_ends)
    given = {ours: raw[theirs] for theirs, ours in _SETTINGS.items() if raw.get(theirs) is not None}
    if not raw.get("do_sample", False):
        given = {name: value for name, value in given.items() if name in ("repetition_penalty", "max_tokens")}
        given["temperature"] = 0.0
    return GenerationDefaults(_settings(given, file), ends)


def _settings(given: Mapping[str, Any], file: Path) -> SamplingSettings:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnsupportedConfigError(f"{file} says {name} = {value!r}", fix="a number is needed there")
    return SamplingSettings(**given)


def _token_ids(value: Any, file: Path) -> frozenset[int]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and i >= 0 for i in listed):
        raise UnsupportedConfigError(
            f"{file} says eos_token_id = {value!r}", fix="a token id or a list of them is needed"
        )
    return frozenset(listed)
