"""A pack that is short, damaged, of another model or from the future is refused, by name and with a fix."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from steerpipe.core.errors import PackError, SteerpipeError, TransferError
from steerpipe.model.checkpoint import Checkpoint
from steerpipe.store.formats import DenseFormat, ExpertFormat
from steerpipe.store.plan import PackOptions
from steerpipe.store.reader import Pack, open_pack
from steerpipe.store.verify import verify

MakePack = Callable[..., Pack]


@pytest.fixture
def folder(checkpoint: Checkpoint, make_pack: MakePack) -> Path:
    return make_pack(checkpoint, PackOptions(ExpertFormat.INT4, DenseFormat.INT8)).folder


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 0x10
    file.write_bytes(content)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "steerpipe.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def test_a_whole_pack_verifies(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(folder, lambda done, total: seen.append((done, total)))
    assert report.good
    assert (report.experts, report.dense_tensors) == (8, len(open_pack(folder).dense_entries))
    assert seen == sorted(seen)
    assert report.checked_bytes == seen[-1][0]


@pytest.mark.parametrize(("layer", "expert", "inside"), [(0, 0, 0), (0, 3, 2000), (1, 3, 4095)])
def test_one_flipped_bit_in_a_block_is_found(folder: Path, layer: int, expert: int, inside: int) -> None:
    pack = open_pack(folder)
    flip(pack.expert_file, pack.place(layer, expert).offset + inside)
    assert verify(folder).problems == (_message(pack, layer, expert),)
    pack = open_pack(folder)
    with pytest.raises(PackError, match=f"expert {expert} of layer {layer} .* has checksum .* instead of") as caught:
        pack.read_expert(layer, expert)
    assert "copy it again" in caught.value.fix
    for other in {(0, 0), (0, 3), (1, 3)} - {(layer, expert)}:
        pack.read_expert(*other)
    open_pack(folder, verify=False).read_expert(layer, expert)


def _message(pack: Pack, layer: int, expert: int) -> str:
    try:
        pack.read_block(layer, expert)
    except PackError as problem:
        return problem.what
    return "nothing is wrong"


def test_one_flipped_bit_in_a_dense_tensor_is_found(folder: Path) -> None:
    entry = open_pack(folder).dense_entries["model.norm.weight"]
    flip(entry.file, entry.offset + 5)
    (problem,) = verify(folder).problems
    assert "model.norm.weight" in problem
    with pytest.raises(PackError, match=r"model\.norm\.weight in .* has checksum"):
        open_pack(folder).read_dense()
    open_pack(folder, verify=False).read_dense()


def test_every_damaged_part_is_named_not_only_the_first(folder: Path) -> None:
    pack = open_pack(folder)
    flip(pack.expert_file, pack.place(0, 1).offset)
    flip(pack.expert_file, pack.place(1, 2).offset)
    flip(folder / "tokenizer.json", 3)
    problems = verify(folder).problems
    assert len(problems) == 3
    assert "expert 1 of layer 0" in problems[0]
    assert "expert 2 of layer 1" in problems[1]
    assert "tokenizer.json is not the file that was packed" in problems[2]


def test_a_changed_tokenizer_is_refused_when_the_pack_is_opened(folder: Path) -> None:
    flip(folder / "tokenizer.json", 3)
    with pytest.raises(PackError, match=r"tokenizer\.json is not the file that was packed"):
        open_pack(folder)


@pytest.mark.parametrize("name", ["experts.safetensors", "dense.safetensors", "tokenizer.json"])
def test_a_short_or_missing_file_is_refused_at_opening(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(PackError, match=rf"{name} has [\d,]+ bytes instead of"):
        open_pack(folder)
    (folder / name).unlink()
    with pytest.raises(PackError, match=f"{name} is missing"):
        open_pack(folder)


@pytest.mark.parametrize("name", ["experts.safetensors", "dense.safetensors"])
@pytest.mark.parametrize("offset", [0, 3, 8, 12, 40])
def test_a_damaged_header_is_refused_at_opening(folder: Path, name: str, offset: int) -> None:
    flip(folder / name, offset)
    with pytest.raises(PackError):
        open_pack(folder)


def test_the_pack_of_another_model_is_refused(folder: Path, tiny: dict[str, Checkpoint]) -> None:
    config = json.loads((folder / "config.json").read_text())
    spaced = json.dumps(config, indent=7)
    for text in (json.dumps(config | {"rope_theta": 7.0}), (tiny["olmoe"].folder / "config.json").read_text()):
        (folder / "config.json").write_text(text)
        size = {"size_bytes": len(text)}
        edit(folder, lambda raw, size=size: raw["files"]["config.json"].update(size))
        with pytest.raises(PackError, match="not the one that this pack was made with"):
            open_pack(folder)
    (folder / "config.json").write_text(spaced)  # the same config, spelled otherwise
    edit(folder, lambda raw: raw["files"]["config.json"].update(size_bytes=len(spaced)))
    open_pack(folder)


def test_experts_of_another_model_are_refused(folder: Path, tiny: dict[str, Checkpoint], make_pack: MakePack) -> None:
    other = make_pack(tiny["qwen3_moe"], PackOptions(ExpertFormat.INT4, DenseFormat.INT8), name="other").folder
    shutil.copy(other / "experts.safetensors", folder / "experts.safetensors")
    with pytest.raises(PackError, match="bytes instead of"):
        open_pack(folder)


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_an_unknown_schema_is_refused_with_both_versions(folder: Path, schema: object) -> None:
    edit(folder, lambda raw: raw.update(schema=schema))
    with pytest.raises(PackError, match=f"has schema {schema!r}; this version reads 1") as caught:
        open_pack(folder)
    assert "version of steerpipe that wrote the pack" in caught.value.fix


def test_a_folder_without_a_manifest_is_not_a_pack(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="not a pack"):
        open_pack(tmp_path)
    (tmp_path / "steerpipe.json").write_text("{")
    with pytest.raises(PackError, match="is not JSON"):
        open_pack(tmp_path)
    (tmp_path / "steerpipe.json").write_text("[]")
    with pytest.raises(PackError, match="schema None"):
        open_pack(tmp_path)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Up to two ways into each list, all into each object."""
    if isinstance(value, dict) and value:
        for key in value:
            yield (*path, key)
            yield from _leaves(value[key], (*path, key))
    elif isinstance(value, list) and value:
        for index in {0, len(value) - 1}:
            yield (*path, index)
            yield from _leaves(value[index], (*path, index))


def _replace(raw: Any, path: tuple[Any, ...], wrong: object) -> None:
    for key in path[:-1]:
        raw = raw[key]
    if wrong is KeyError:
        del raw[path[-1]]
    else:
        raw[path[-1]] = wrong


@pytest.mark.parametrize("wrong", [KeyError, None, "", -1, 3.5, [], {}, {"a": 1}, "../../etc"])
def test_whatever_is_wrong_in_a_manifest_is_an_error_of_ours_or_harmless(folder: Path, wrong: object) -> None:
    good = (folder / "steerpipe.json").read_text()
    raw = json.loads(good)
    outcomes = {"refused": 0, "opened": 0}
    for path in _leaves(raw):
        if path[0] == "loss" or path == ("steerpipe",):
            continue  # told, not used
        changed = json.loads(good)
        _replace(changed, path, wrong)
        (folder / "steerpipe.json").write_text(json.dumps(changed))
        try:
            pack = open_pack(folder)
            pack.read_dense()
            pack.read_expert(0, 0)
            pack.read_expert(1, 3)
            outcomes["opened"] += 1
        except SteerpipeError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 40
    assert outcomes["refused"] > 2 * outcomes["opened"]


def test_parts_that_are_not_where_the_format_puts_them_are_refused(folder: Path) -> None:
    edit(folder, lambda raw: raw["classes"][0]["parts"][2].update(offset=64))
    with pytest.raises(PackError, match=r"not a complete manifest: .* which is not how int4 lies"):
        open_pack(folder)


def test_an_expert_named_twice_is_refused(folder: Path) -> None:
    edit(folder, lambda raw: raw["order"].update({"0": [0, 1, 2, 2]}))
    with pytest.raises(PackError, match="experts are not those of its config"):
        open_pack(folder)


def test_a_pack_that_is_removed_or_cut_while_open_never_gives_wrong_weights(folder: Path) -> None:
    pack = open_pack(folder)
    first = pack.read_expert(0, 0)[0]
    os.truncate(pack.expert_file, pack.place(1, 3).offset + 100)
    with pytest.raises(PackError, match="became shorter"):
        pack.read_expert(1, 3)
    shutil.rmtree(folder)
    assert torch.equal(pack.read_expert(0, 0)[0], first)  # the file is still open


def test_a_failing_disk_is_a_transfer_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = open_pack(folder)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(TransferError, match="Input/output error"):
        pack.read_block(0, 0)


def test_a_short_read_is_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = open_pack(folder)
    whole = pack.read_block(1, 2)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:1000]], offset))
    assert torch.equal(pack.read_block(1, 2), whole)


def test_the_file_is_closed_with_the_pack(folder: Path) -> None:
    pack = open_pack(folder)
    descriptor = pack._descriptor
    os.fstat(descriptor)
    del pack
    with pytest.raises(OSError):
        os.fstat(descriptor)
