"""Sampling defaults from a checkpoint's generation_config.json, read as strictly as the model's config.

Every key is applied, neutral or inert: a key that would change the answer, and is not computed here, stops the load.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steerpipe.core.errors import RequestError, UnsupportedConfigError
from steerpipe.core.sampling import SamplingSettings
from steerpipe.model.checkpoint import is_there, read_json

# Applied: their name → ours.
_SETTINGS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens", "stop_strings": "stop",
    # not of transformers, which reads past them; in the words of the OpenAI API
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
}  # fmt: skip
# What is left of them where nothing is drawn:
_OF_GREEDY = ("repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens", "stop")

# Would change the answer, and are not computed here: the values, besides null, with which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "assistant_ensemble_weight": (), "bad_words_ids": ([],), "begin_suppress_tokens": ([],), "constraints": ([],),
    "dola_layers": (), "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "exponential_decay_length_penalty": (), "force_words_ids": ([],),
    "forced_bos_token_id": (), "forced_decoder_ids": ([],), "forced_eos_token_id": (), "guidance_scale": (1.0,),
    "max_time": (), "min_length": (0,), "min_new_tokens": (0,), "no_repeat_ngram_size": (0,), "num_beams": (1,),
    "num_return_sequences": (1,), "penalty_alpha": (0.0,), "sequence_bias": ({}, []), "suppress_tokens": ([],),
    "token_healing": (False,), "top_h": (), "typical_p": (1.0,), "watermarking_config": (),
}  # fmt: skip

# Change nothing here: bookkeeping; what `generate` returns beside the text; ways to compute the same text (caches,
# compilation, assistants whose guesses are verified); what only beams (num_beams above) or NaN would feel.
_INERT = frozenset({
    "_commit_hash", "_from_model_config", "_name_or_path", "assistant_confidence_threshold", "assistant_early_exit",
    "assistant_lookbehind", "bos_token_id", "cache_config", "cache_implementation", "compile_config",
    "continuous_batching_config", "decoder_start_token_id", "disable_compile", "diversity_penalty", "early_stopping",
    "is_assistant", "length_penalty", "low_memory", "max_cache_len", "max_matching_ngram_size",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups", "output_attentions",
    "output_hidden_states", "output_logits", "output_router_logits", "output_scores", "pad_token_id",
    "prefill_chunk_size", "prompt_lookup_num_tokens", "remove_invalid_values", "renormalize_logits", "return_dict",
    "return_dict_in_generate", "return_legacy_cache", "speculation_type", "target_lookbehind",
    "transformers_version", "trust_remote_code", "use_cache", "use_mtp",
})  # fmt: skip
_KNOWN = frozenset({*_SETTINGS, *_NEUTRAL, *_INERT, "do_sample", "eos_token_id", "max_length"})
_UNSET_MAX_LENGTH = 20  # what transformers has always written where nobody chose a length


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's makers recommend. `end_tokens` end an answer unless it is told to ignore them."""

    settings: SamplingSettings
    end_tokens: frozenset[int]


def read_defaults(folder: Path, tokenizer_ends: tuple[int, ...]) -> GenerationDefaults:
    """Defaults of a model folder. `do_sample: false` or no file at all means greedy, as transformers reads it."""
    file = folder / "generation_config.json"
    raw = read_json(file) if is_there(file) else {}
    config = read_json(folder / "config.json")
    _refuse_unknown(raw, file)
    _refuse_uncomputed(raw, file, config.get("max_position_embeddings"))
    said, source = (raw, file) if "eos_token_id" in raw else (config, folder / "config.json")
    ends = _token_ids(said.get("eos_token_id"), source) | frozenset(tokenizer_ends)
    sampled = _settings(raw, file)
    do_sample = raw.get("do_sample") or False
    if not isinstance(do_sample, bool):
        raise _nonsense(file, "do_sample", do_sample, "true or false is needed")
    greedy = SamplingSettings(temperature=0.0).override(**{name: getattr(sampled, name) for name in _OF_GREEDY})
    return GenerationDefaults(sampled if do_sample else greedy, ends)


def _refuse_unknown(raw: Mapping[str, Any], file: Path) -> None:
    key = next((key for key in sorted(raw) if key not in _KNOWN and raw[key] is not None), None)
    if key is not None:
        near = difflib.get_close_matches(key, _KNOWN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnsupportedConfigError(
            f"{file} says {key} = {raw[key]!r}, which is not understood and may change the answers{hint}",
            fix=f"correct the name, or remove {key} from {file.name} to run without it",
        )


def _refuse_uncomputed(raw: Mapping[str, Any], file: Path, context: object) -> None:
    for key, neutral in _NEUTRAL.items():
        value = raw.get(key)
        if value is not None and not any(_same(value, each) for each in neutral):
            raise _uncomputed(file, key, value, f"remove {key} from {file.name} to run without it")
    length = raw.get("max_length")  # of prompt and answer together: the context, unless it is less
    if length is None or _same(length, _UNSET_MAX_LENGTH):
        return
    if type(length) is not int or (isinstance(context, int) and length < context):
        raise _uncomputed(
            file, "max_length", length, f"remove max_length from {file.name}; max_context or max_tokens limit a run"
        )


def _same(value: object, neutral: object) -> bool:
    """Equal as JSON has it, where true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _settings(raw: Mapping[str, Any], file: Path) -> SamplingSettings:
    """All settings of the file, each checked, whether it will be used or not."""
    settings = SamplingSettings()
    for theirs, ours in _SETTINGS.items():
        try:
            settings = settings.override(**{ours: raw.get(theirs)})
        except RequestError as problem:
            needed = problem.fix.replace(f"{ours} must be", f"{theirs} must be")
            raise _nonsense(file, theirs, raw[theirs], needed) from None
    return settings


def _token_ids(value: Any, file: Path) -> frozenset[int]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in listed):
        raise _nonsense(file, "eos_token_id", value, "a token id or a list of them is needed")
    return frozenset(listed)


def _uncomputed(file: Path, name: str, value: object, fix: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(f"{file} says {name} = {value!r}, which is not computed here", fix=fix)


def _nonsense(file: Path, name: str, value: object, needed: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(
        f"{file} says {name} = {value!r}: {needed}",
        fix=f"correct {name}, or take {file.name} from the model's own repository",
    )
