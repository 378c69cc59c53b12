"""What packing refuses to do, and that it leaves nothing behind when it does."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from steerpipe.core.errors import PackError
from steerpipe.model.checkpoint import Checkpoint, open_checkpoint
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.pack import write_pack
from steerpipe.store.plan import PackOptions
from steerpipe.store.reader import open_pack
from steerpipe.store.verify import verify
from tests.store.conftest import contents, save_tiny


def test_another_pack_in_the_way_is_an_error(
    tiny: dict[str, Checkpoint], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    write_pack(checkpoint, tmp_path / "p")
    before = contents(tmp_path / "p")
    for source, options in ((checkpoint, PackOptions(ExpertFormat.INT8)), (tiny["olmoe"], PackOptions())):
        with pytest.raises(PackError, match="already a pack, of another model or in another format"):
            write_pack(source, tmp_path / "p", options)
    twin = save_tiny(tmp_path / "twin", "qwen2_moe", torch.bfloat16, seed=1)  # same headers, other weights
    with pytest.raises(PackError, match="already a pack, of another model"):
        write_pack(twin, tmp_path / "p")
    assert contents(tmp_path / "p") == before


def test_a_folder_or_file_in_the_way_is_an_error_and_an_empty_folder_is_not(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(PackError, match="exists and is not a pack"):
            write_pack(checkpoint, tmp_path / name)
    (tmp_path / "empty").mkdir()
    write_pack(checkpoint, tmp_path / "empty")
    assert open_pack(tmp_path / "empty").spec == checkpoint.spec


@pytest.mark.parametrize("form", [ExpertFormat.INT4, ExpertFormat.INT8, ExpertFormat.FLOAT16])
def test_weights_that_a_format_cannot_hold_are_named_and_nothing_is_left(tmp_path: Path, form: ExpertFormat) -> None:
    source = save_tiny(tmp_path / "hot", "olmoe", torch.float32)
    tensors = {name: source.read(name) for name in source.entries}
    tensors["model.layers.1.mlp.experts.2.down_proj.weight"][3, 4] = 1e9
    save_file(tensors, tmp_path / "hot" / "model.safetensors")
    hot = open_checkpoint(tmp_path / "hot")
    with pytest.raises(PackError, match=r"down of expert 2 of layer 1 has a weight of 1e\+09"):
        write_pack(hot, tmp_path / "p", PackOptions(form))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hot"]
    assert write_pack(hot, tmp_path / "p", PackOptions(ExpertFormat.BFLOAT16)).experts == 8


def test_a_model_without_experts_is_packed_too(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32)
    config = json.loads((source.folder / "config.json").read_text()) | {"mlp_only_layers": [0, 1]}
    kept = {name: source.read(name) for name in source.entries if "layers.1.mlp" not in name}
    kept |= {name.replace("layers.0", "layers.1"): weight for name, weight in kept.items() if "layers.0.mlp" in name}
    save_file({name: weight.clone() for name, weight in kept.items()}, source.folder / "model.safetensors")
    (source.folder / "config.json").write_text(json.dumps(config))
    dense = open_checkpoint(source.folder)
    report = write_pack(dense, tmp_path / "p")
    assert report.experts == 0 and report.loss.lossless
    assert verify(tmp_path / "p").good
    restored = open_pack(tmp_path / "p").read_dense()
    assert all(torch.equal(restored[name], weight) for name, weight in dense.read_dense().items())
