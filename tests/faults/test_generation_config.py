"""generation_config.json gives defaults; nonsense in it is an error that names the file."""

import json
from pathlib import Path

import pytest

from steerpipe.core.errors import CheckpointError
from steerpipe.core.sampling import SamplingSettings
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
        ("temperature", "hot", "a number is needed"),
        ("temperature", -1, "temperature must be a finite number, 0 or more"),
        ("temperature", float("nan"), "temperature must be a finite number, 0 or more"),
        ("temperature", float("inf"), "temperature must be a finite number, 0 or more"),
        ("temperature", True, "a number is needed"),
        ("temperature", [0.7], "a number is needed"),
        ("top_k", 1.5, "a whole number is needed"),
        ("top_k", -5, "top_k must be 0 (off) or more"),
        ("top_p", 2, "top_p must be above 0 and at most 1"),
        ("top_p", float("nan"), "top_p must be above 0 and at most 1"),
        ("min_p", -0.1, "min_p must be between 0 and 1"),
        ("repetition_penalty", 0, "repetition_penalty must be a finite number above 0"),
        ("max_new_tokens", 0, "max_tokens must be 1 or more"),
        ("max_new_tokens", 12.5, "a whole number is needed"),
    ],
)
def test_nonsense_names_the_file_and_the_key(
    folder: Path, do_sample: bool, key: str, value: object, needed: str
) -> None:
    folders.write_json(folder / FILE, {"do_sample": do_sample, key: value})
    message = complaint(folder)
    assert f"{folder / FILE} says {key} = {value!r}: {needed}" in message
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
    given = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 9, "num_beams": 4}
    folders.write_json(folder / FILE, given)
    settings = read_defaults(folder, ()).settings
    assert settings == SamplingSettings(temperature=0.0, repetition_penalty=1.05, max_tokens=9)


def test_with_do_sample_everything_is_kept(folder: Path) -> None:
    folders.write_json(
        folder / FILE,
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "eos_token_id": [3, 4]},
    )
    defaults = read_defaults(folder, (5,))
    assert defaults.settings == SamplingSettings(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)
    assert defaults.end_tokens == {3, 4, 5}


def test_an_end_token_of_the_file_ends_the_answer(folder: Path) -> None:
    free = json.loads(generate(folder, "--json").stdout)
    assert free["finish_reason"] == "length"
    folders.write_json(folder / FILE, {"eos_token_id": [free["token_ids"][1]]})
    ended = json.loads(generate(folder, "--json").stdout)
    assert ended["token_ids"] == free["token_ids"][:2]
    assert ended["finish_reason"] == "stop"
