"""An index that is damaged, points elsewhere, or does not belong to its shards."""

import json
import shutil
from pathlib import Path

import pytest

from tests.faults import folders
from tests.faults.running import generate, refused

TOGETHER = "come from different downloads: fetch all of them again"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(folder: Path) -> tuple[Path, dict[str, str]]:
    return folder, folders.shard(folder)


def test_shards_give_the_same_answer_as_one_file(pristine: Path, sharded: tuple[Path, dict[str, str]]) -> None:
    whole, parts = generate(pristine, "--json"), generate(sharded[0], "--json")
    assert json.loads(whole.stdout)["token_ids"] == json.loads(parts.stdout)["token_ids"]


def test_a_missing_shard_is_named(sharded: tuple[Path, dict[str, str]]) -> None:
    (sharded[0] / SECOND).unlink()
    message = refused(sharded[0])
    assert f"{sharded[0]} lacks 1 of 2 shards: {SECOND}" in message
    assert "fetch the model again" in message


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "..\\x", "a\0b"]
)
def test_a_shard_outside_the_folder_is_never_opened(sharded: tuple[Path, dict[str, str]], name: str) -> None:
    folder, weight_map = sharded
    shutil.copy(folder / FIRST, folder.parent / "x.safetensors")
    folders.write_index(folder, weight_map | {"model.norm.weight": name})
    message = refused(folder)
    assert f"points outside its folder: {name!r}" in message
    assert "from a source you trust" in message


def test_a_name_that_no_file_can_have(sharded: tuple[Path, dict[str, str]]) -> None:
    folder, weight_map = sharded
    folders.write_index(folder, weight_map | {"model.norm.weight": "x" * 5000})
    assert "lacks 1 of 3 shards" in refused(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "\x00", '{"weight_map": {}' + "[" * 5000])
def test_an_index_that_is_not_a_json_object(sharded: tuple[Path, dict[str, str]], text: str) -> None:
    (sharded[0] / INDEX).write_text(text)
    message = refused(sharded[0])
    assert f"{sharded[0] / INDEX} is not " in message
    assert "download or copy the file again" in message


@pytest.mark.parametrize(
    "weight_map", [None, [], {}, "x", ["a"], {"model.norm.weight": 5}, {"a": None}, {"a": [FIRST]}]
)
def test_an_index_without_a_map_from_tensors_to_files(sharded: tuple[Path, dict[str, str]], weight_map: object) -> None:
    folders.write_json(sharded[0] / INDEX, {"weight_map": weight_map})
    assert f"{sharded[0] / INDEX} has no weight_map from tensors to files" in refused(sharded[0])


def test_a_tensor_in_another_shard_than_the_index_says(sharded: tuple[Path, dict[str, str]]) -> None:
    folder, weight_map = sharded
    elsewhere = SECOND if weight_map["lm_head.weight"] == FIRST else FIRST
    folders.write_index(folder, weight_map | {"lm_head.weight": elsewhere})
    message = refused(folder)
    assert f"says that lm_head.weight is in {elsewhere}, but it is in {weight_map['lm_head.weight']}" in message
    assert TOGETHER in message


def test_a_tensor_that_only_the_index_knows(sharded: tuple[Path, dict[str, str]]) -> None:
    folder, weight_map = sharded
    folders.write_index(folder, weight_map | {"model.layers.9.input_layernorm.weight": FIRST})
    assert f"model.layers.9.input_layernorm.weight is in {FIRST}, but it is in no file" in refused(folder)


def test_a_tensor_that_the_index_forgot(sharded: tuple[Path, dict[str, str]]) -> None:
    folder, weight_map = sharded
    weight_map.pop("model.norm.weight")
    folders.write_index(folder, weight_map)
    assert "model.norm.weight is in no file, but it is in " in refused(folder)


def test_a_tensor_in_two_shards(sharded: tuple[Path, dict[str, str]]) -> None:
    folder, _ = sharded
    header, data = folders.split(folder / SECOND)
    first, _ = folders.split(folder / FIRST)
    name = next(n for n, e in first.items() if e["shape"] == [32])
    twice = header | {name: {"dtype": "F32", "shape": [32], "data_offsets": [len(data), len(data) + 128]}}
    folders.join(folder / SECOND, twice, data + bytes(128))
    message = refused(folder)
    assert f"{name} is in {FIRST} and in {SECOND}" in message
    assert TOGETHER in message


def test_a_whole_file_beside_an_index_of_others(pristine: Path, sharded: tuple[Path, dict[str, str]]) -> None:
    shutil.copy(pristine / "model.safetensors", sharded[0])
    message = refused(sharded[0])
    assert f"{sharded[0]} has both model.safetensors and an index of other files" in message
    assert "remove one of them" in message


def test_an_index_of_one_file(folder: Path) -> None:
    header, _ = folders.split(folder / "model.safetensors")
    folders.write_index(folder, {name: "model.safetensors" for name in header if name != "__metadata__"})
    assert generate(folder).exit_code == 0


def test_a_shard_that_links_into_a_deleted_cache(sharded: tuple[Path, dict[str, str]]) -> None:
    (sharded[0] / SECOND).unlink()
    (sharded[0] / SECOND).symlink_to("../blobs/0123abcd")
    message = refused(sharded[0])
    assert f"{sharded[0] / SECOND} is a link to ../blobs/0123abcd, which is not there" in message
    assert "fetch the model again" in message
