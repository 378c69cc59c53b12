"""generation_config.json gives defaults; nonsense in it is an error that names the file."""

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from steerpipe.core.errors import CheckpointError
from steerpipe.core.sampling import SamplingSettings
from steerpipe.runtime import generation
from steerpipe.runtime.generation import read_defaults
from tests.faults import folders
from tests.faults.running import generate, refused

FILE = "generation_config.json"


def complaint(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_defaults(folder, ())
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", "[" * 5000])
def test_a_damaged_file(folder: Path, text: str) -> None:
    (folder / FILE).write_text(text)
    message = complaint(folder)
    assert f"{folder / FILE} is not " in message
    assert "download or copy the file again" in message


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        *(("temperature", v, "a finite number, 0 or more") for v in ("hot", -1, float("nan"), float("inf"), True, [1])),
        *(("top_k", v, "a whole number, 0 (off) or more") for v in (1.5, -5, True, "20")),
        *(("top_p", v, "a number above 0 and at most 1") for v in (2, float("nan"), "0.9")),
        ("min_p", -0.1, "a number between 0 and 1"),
        ("repetition_penalty", 0, "a finite number above 0"),
        *(("max_new_tokens", v, "a whole number, 1 or more") for v in (0, 12.5)),
        *(("stop_strings", v, "a string or a list of strings, none of them empty") for v in ([""], [1], 5)),
    ],
)
def test_nonsense_names_the_file_and_the_key(
    folder: Path, do_sample: bool, key: str, value: object, needed: str
) -> None:
    folders.write_json(folder / FILE, {"do_sample": do_sample, key: value})
    message = complaint(folder)
    assert f"{folder / FILE} says {key} = {value!r}: {key} must be {needed}" in message
    assert f"correct {key}, or take {FILE} from the model's own repository" in message


@pytest.mark.parametrize("value", [-1, "2", 2.0, True, [2, -1], [[2]], {"a": 2}, [None]])
def test_an_end_token_must_be_a_token(folder: Path, value: object) -> None:
    folders.write_json(folder / FILE, {"eos_token_id": value})
    message = complaint(folder)
    assert f"{folder / FILE} says eos_token_id = {value!r}: a token id or a list of them is needed" in message


@pytest.mark.parametrize("present", [True, False])
def test_an_end_token_of_the_config_is_told_by_the_config(folder: Path, present: bool) -> None:
    if present:
        folders.write_json(folder / FILE, {"do_sample": True})
    folders.edit_config(folder, eos_token_id=-7)
    assert f"{folder / 'config.json'} says eos_token_id = -7" in complaint(folder)


@pytest.mark.parametrize("value", ["yes", 1, [True]])
def test_do_sample_is_a_switch(folder: Path, value: object) -> None:
    folders.write_json(folder / FILE, {"do_sample": value})
    assert f"do_sample = {value!r}: true or false is needed" in complaint(folder)


def test_a_link_into_a_deleted_cache_is_no_absence(folder: Path) -> None:
    (folder / FILE).symlink_to("../blobs/deadbeef")
    assert f"{folder / FILE} is a link to ../blobs/deadbeef, which is not there" in complaint(folder)


@pytest.mark.parametrize(("text", "words"), [("{", "is not JSON"), ('{"temperature": "hot"}', "temperature = 'hot'")])
def test_the_command_line_refuses_a_bad_file(folder: Path, text: str, words: str) -> None:
    (folder / FILE).write_text(text)
    message = refused(folder)
    assert FILE in message and words in message


def test_no_file_means_greedy(folder: Path) -> None:
    defaults = read_defaults(folder, (5,))
    assert defaults.settings == SamplingSettings(temperature=0.0)
    assert defaults.end_tokens == {2, 5}


def test_without_do_sample_only_what_greedy_knows_is_kept(folder: Path) -> None:
    given = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 9, "stop_strings": "END"}
    folders.write_json(folder / FILE, given)
    settings = read_defaults(folder, ()).settings
    assert settings == SamplingSettings(temperature=0.0, repetition_penalty=1.05, max_tokens=9, stop=("END",))


def test_with_do_sample_everything_is_kept(folder: Path) -> None:
    folders.write_json(
        folder / FILE,
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "eos_token_id": [3, 4]},
    )
    defaults = read_defaults(folder, (5,))
    assert defaults.settings == SamplingSettings(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)
    assert defaults.end_tokens == {3, 4, 5}


RELEASED: dict[str, dict[str, object]] = {
    "Qwen1.5-MoE-A2.7B": {
        "bos_token_id": 151643, "eos_token_id": 151643, "max_new_tokens": 2048, "transformers_version": "4.39.0.dev0",
    },
    "Qwen1.5-MoE-A2.7B-Chat": {
        "bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
        "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8,
        "transformers_version": "4.39.0.dev0",
    },
    "Qwen3-30B-A3B": {
        "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643,
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0",
    },
    "Mixtral-8x7B": {
        "_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.36.0.dev0",
    },
    "OLMoE-1B-7B": {
        "_from_model_config": True, "eos_token_id": 50279, "pad_token_id": 1, "transformers_version": "4.43.0.dev0",
    },
}  # fmt: skip


@pytest.mark.parametrize("said", RELEASED.values(), ids=RELEASED.keys())
def test_released_files_are_read(folder: Path, said: dict[str, object]) -> None:
    folders.write_json(folder / FILE, said)
    defaults = read_defaults(folder, ())
    ends = said["eos_token_id"]
    assert defaults.end_tokens == set(ends if isinstance(ends, list) else [ends])
    expected = {key: value for key, value in said.items() if key in ("top_k", "top_p", "repetition_penalty")}
    assert {key: getattr(defaults.settings, key) for key in expected} == expected
    assert defaults.settings.temperature == said.get("temperature", 0.0)
    assert defaults.settings.max_tokens == said.get("max_new_tokens")


def test_what_transformers_writes_by_itself_is_read(folder: Path) -> None:
    """Both as a file of what differs from the defaults, and with every key and its default spelt out."""
    GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=[2, 3]).save_pretrained(folder)
    assert read_defaults(folder, ()).settings == SamplingSettings(temperature=0.6)
    defaults = GenerationConfig._get_default_generation_params()
    for said in (GenerationConfig().to_dict(), GenerationConfig().to_dict() | defaults):
        folders.write_json(folder / FILE, said)
        assert read_defaults(folder, ()).settings == SamplingSettings(temperature=0.0)


def test_every_key_of_transformers_is_known() -> None:
    """A key that a new release adds must be sorted into applied, neutral or inert before it is let through."""
    assert set(GenerationConfig().to_dict()) <= generation._KNOWN


UNCOMPUTED = {
    "assistant_ensemble_weight": (0.5,), "bad_words_ids": ([[5]],), "begin_suppress_tokens": ([7],),
    "constraints": ([{"a": 1}],), "dola_layers": ("low",), "encoder_no_repeat_ngram_size": (2,),
    "encoder_repetition_penalty": (1.2,), "epsilon_cutoff": (0.01,), "eta_cutoff": (0.01,),
    "exponential_decay_length_penalty": ([15, 1.6],), "force_words_ids": ([[5]],), "forced_bos_token_id": (0,),
    "forced_decoder_ids": ([[1, 5]],), "forced_eos_token_id": (2,), "guidance_scale": (1.5, True), "max_time": (2.0,),
    "min_length": (5, "0"), "min_new_tokens": (5, False), "no_repeat_ngram_size": (3, False), "num_beams": (4, True),
    "num_return_sequences": (2,), "penalty_alpha": (0.6,), "sequence_bias": ([[[5], 1.0]],),
    "suppress_tokens": ([1, 2],), "token_healing": (True, 0), "top_h": (0.4,), "typical_p": (0.9, True),
    "watermarking_config": ({"greenlist_ratio": 0.25},), "max_length": (64, 127, "128", True, 20.5),
}  # fmt: skip


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in UNCOMPUTED.items() for value in values])
def test_a_key_that_would_change_the_answer_stops_the_load(
    folder: Path, do_sample: bool, key: str, value: object
) -> None:
    folders.write_json(folder / FILE, {"do_sample": do_sample, key: value})
    message = complaint(folder)
    assert f"{folder / FILE} says {key} = {value!r}, which is not computed here" in message
    assert f"fix: remove {key} from {FILE}" in message


def test_none_of_them_is_left_without_a_test() -> None:
    assert set(UNCOMPUTED) == {*generation._NEUTRAL, "max_length"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key, values in generation._NEUTRAL.items() for value in (None, *values)),
        *((key, value) for key in ("no_repeat_ngram_size", "epsilon_cutoff") for value in (0, 0.0)),
        *((key, value) for key in ("typical_p", "guidance_scale", "num_beams") for value in (1, 1.0)),
        *(("max_length", value) for value in (None, 20, 128, 4096)),  # 128: the context of this model
        *((key, value) for key in ("use_cache", "output_scores", "return_dict") for value in (None, True, False)),
        ("cache_implementation", "static"),
        ("some_later_key", None),
    ],
)
def test_a_value_that_changes_nothing_is_let_through(folder: Path, key: str, value: object) -> None:
    folders.write_json(folder / FILE, {key: value})
    assert read_defaults(folder, ()).settings == SamplingSettings(temperature=0.0)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("temprature", "; did you mean temperature?"),
        ("max_new_token", "; did you mean max_new_tokens?"),
        ("min_tokens", "; did you mean "),
        ("zzz", "may change the answers\n"),
    ],
)
def test_a_key_that_nobody_knows_is_told_with_the_nearest(folder: Path, key: str, near: str) -> None:
    folders.write_json(folder / FILE, {"do_sample": True, key: 0.5})
    message = complaint(folder)
    assert f"{folder / FILE} says {key} = 0.5, which is not understood" in message
    assert near in message
    assert f"remove {key} from {FILE}" in message


def test_the_command_line_refuses_what_is_not_computed(folder: Path) -> None:
    folders.write_json(folder / FILE, {"no_repeat_ngram_size": 3})
    assert "no_repeat_ngram_size = 3, which is not computed here" in refused(folder)


def test_an_end_token_of_the_file_ends_the_answer(folder: Path) -> None:
    free = json.loads(generate(folder, "--json").stdout)
    assert free["finish_reason"] == "length"
    folders.write_json(folder / FILE, {"eos_token_id": [free["token_ids"][1]]})
    ended = json.loads(generate(folder, "--json").stdout)
    assert ended["token_ids"] == free["token_ids"][:2]
    assert ended["finish_reason"] == "stop"
