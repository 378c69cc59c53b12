"""From a pack back to a folder that transformers loads, with the pack's own weights."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers

from steerpipe.core.errors import CapacityError, PackError
from steerpipe.model.checkpoint import Checkpoint, open_checkpoint
from steerpipe.store import files
from steerpipe.store.formats import DenseFormat, ExpertFormat
from steerpipe.store.plan import PackOptions
from steerpipe.store.reader import Pack
from steerpipe.store.unpack import unpack
from tests.store.conftest import FAMILIES

MakePack = Callable[..., Pack]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [PackOptions(), PackOptions(ExpertFormat.INT4, DenseFormat.INT8), PackOptions(ExpertFormat.FLOAT32)],
    ids=["native", "int4", "float32"],
)
def test_transformers_loads_it_and_has_the_packs_weights(
    tiny: dict[str, Checkpoint], make_pack: MakePack, tmp_path: Path, family: str, options: PackOptions
) -> None:
    pack = make_pack(tiny[family], options)
    report = unpack(pack.folder, tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    dtype = torch.bfloat16 if options == PackOptions() else torch.float32
    assert model.dtype == dtype
    assert report.dtype == str(dtype).removeprefix("torch.")
    model.save_pretrained(tmp_path / "again")  # under the names of the files on disk
    loaded = open_checkpoint(tmp_path / "again")
    assert loaded.spec == pack.spec or dtype == torch.float32
    for name, weight in pack.read_dense().items():
        assert torch.equal(loaded.read(name), weight.to(dtype))
    for layer in pack.spec.moe_layers:
        for expert in range(4):
            for ours, theirs in zip(pack.read_expert(layer, expert), loaded.read_expert(layer, expert), strict=True):
                assert torch.equal(theirs, ours.to(dtype))


def test_a_native_pack_unpacks_to_the_very_tensors_of_the_checkpoint(
    checkpoint: Checkpoint, make_pack: MakePack, tmp_path: Path
) -> None:
    report = unpack(make_pack(checkpoint).folder, tmp_path / "hf")
    back = open_checkpoint(tmp_path / "hf")
    assert back.spec == checkpoint.spec
    assert report.tensors == len(checkpoint.entries) == len(back.entries)
    for name in checkpoint.entries:
        assert back.read(name).dtype == checkpoint.read(name).dtype
        assert torch.equal(back.read(name), checkpoint.read(name))
    assert json.loads((tmp_path / "hf" / "tokenizer.json").read_text())["vocab"] == {"é Ġ": 1}
    for name in ("chat_template.jinja", "generation_config.json", "LICENSE"):
        assert (tmp_path / "hf" / name).read_bytes() == (checkpoint.folder / name).read_bytes()
    assert json.dumps(asdict(report))


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
def test_the_dtype_is_set_under_the_key_that_the_config_uses(
    checkpoint: Checkpoint, make_pack: MakePack, tmp_path: Path, spelling: str
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for file in checkpoint.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config[spelling] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    unpack(make_pack(open_checkpoint(folder), PackOptions(ExpertFormat.INT8)).folder, tmp_path / "hf")
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {key: raw[key] for key in ("dtype", "torch_dtype") if key in raw} == {spelling: "float32"}


def test_packing_what_was_unpacked_keeps_the_int8_weights(
    checkpoint: Checkpoint, make_pack: MakePack, tmp_path: Path
) -> None:
    options = PackOptions(ExpertFormat.INT8, DenseFormat.INT8)
    first = make_pack(checkpoint, options, name="first")
    unpack(first.folder, tmp_path / "hf")
    second = make_pack(open_checkpoint(tmp_path / "hf"), options, name="second")
    for layer in (0, 1):
        for expert in range(4):
            assert torch.equal(first.read_block(layer, expert), second.read_block(layer, expert))


def test_what_is_in_the_way_is_not_touched(checkpoint: Checkpoint, make_pack: MakePack, tmp_path: Path) -> None:
    pack = make_pack(checkpoint)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine.txt").write_text("mine")
    with pytest.raises(PackError, match="already exists"):
        unpack(pack.folder, tmp_path / "hf")
    assert (tmp_path / "hf" / "mine.txt").read_text() == "mine"


def test_a_full_disk_leaves_nothing_under_the_name(
    checkpoint: Checkpoint, make_pack: MakePack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = make_pack(checkpoint)
    with monkeypatch.context() as patch:
        usage = type("Usage", (), {"free": 1000})
        patch.setattr(files.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(CapacityError, match="1,000 free"):
            unpack(pack.folder, tmp_path / "hf")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CapacityError, match="No space left") as caught:
            unpack(pack.folder, tmp_path / "hf")
        assert caught.value.fix.endswith("run the same command again: it begins anew")
    assert not (tmp_path / "hf").exists()
    unpack(pack.folder, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "pack"]


def test_a_damaged_pack_is_not_unpacked(checkpoint: Checkpoint, make_pack: MakePack, tmp_path: Path) -> None:
    pack = make_pack(checkpoint)
    with pack.expert_file.open("r+b") as file:
        file.seek(pack.place(1, 0).offset + 7)
        file.write(b"\xff\x00\xff\x00")
    with pytest.raises(PackError, match="expert 0 of layer 1"):
        unpack(pack.folder, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pack"]
