"""A model that is loaded without its experts computes what transformers' own loading computes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import Chunk, Concatenate, Interleave, MergeModulelist, Transpose
from transformers.utils import logging as transformers_logging

from steerpipe.core.errors import CheckpointError, ConfigError, TensorError, UnsupportedConfigError
from steerpipe.integrations import checkpoint as checkpoint_module
from steerpipe.integrations.transformers import attachment_of, load
from tests.integrations.models import FAMILIES, difference, logits, tiny_model
from tests.integrations.test_attach_faults import dense_model


@pytest.fixture(autouse=True, scope="module")
def no_progress_bars() -> None:
    transformers_logging.disable_progress_bar()


def saved(family: str, folder: Path, **changes: Any) -> PreTrainedModel:
    model = tiny_model(family, **changes)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_that_was_saved(family: str, tmp_path: Path) -> None:
    truth = saved(family, tmp_path / "model")
    model = load(tmp_path / "model", fast_memory="25%", pack_dir=tmp_path / "blocks")
    assert difference(logits(model), logits(truth)) == 0.0
    attachment_of(model).source.check_integrity()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_detached_it_is_the_model_that_was_saved(family: str, tmp_path: Path) -> None:
    truth = saved(family, tmp_path / "model", dtype=torch.bfloat16)
    model = load(tmp_path / "model", pack_dir=tmp_path / "blocks")
    attachment_of(model).detach()
    assert model.dtype == torch.bfloat16
    for (name, found), (expected_name, expected) in zip(
        model.state_dict().items(), truth.state_dict().items(), strict=True
    ):
        assert name == expected_name and torch.equal(found, expected), name


def test_another_dtype_rounds_as_transformers_does(tmp_path: Path) -> None:
    saved("qwen2_moe", tmp_path / "model")
    truth = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16, experts_implementation="eager"
    )
    model = load(tmp_path / "model", dtype=torch.bfloat16, pack_dir=tmp_path / "blocks")
    assert torch.equal(logits(model), logits(truth))


def test_shards_and_generation_settings_are_read(tmp_path: Path) -> None:
    truth = tiny_model("mixtral")
    truth.generation_config.max_new_tokens = 7
    truth.save_pretrained(tmp_path / "model", max_shard_size="40kB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    model = load(tmp_path / "model", pack_dir=tmp_path / "blocks")
    assert difference(logits(model), logits(truth)) == 0.0
    assert model.generation_config.max_new_tokens == 7
    assert model.name_or_path == str(tmp_path / "model")


def test_more_than_ten_experts_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    truth = saved("olmoe", tmp_path / "model", num_experts=12)
    model = load(tmp_path / "model", fast_memory="25%", pack_dir=tmp_path / "blocks")
    assert difference(logits(model), logits(truth)) == 0.0


def test_no_expert_ever_enters_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("qwen3_moe", tmp_path / "model")
    read = checkpoint_module.read_tensor
    largest = 0

    def watched(entry: Any) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, entry.size_bytes)
        return read(entry)

    monkeypatch.setattr(checkpoint_module, "read_tensor", watched)
    model = load(tmp_path / "model", fast_memory="25%", pack_dir=tmp_path / "blocks")
    assert largest == 97 * 32 * 4, "the embedding is the largest tensor that was read"
    assert all(each.is_meta for name, each in model.named_parameters() if ".experts." in name)
    assert not any(each.is_meta for name, each in model.named_parameters() if ".experts." not in name)


def test_one_tensor_of_all_experts_is_read_expert_by_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("gpt_oss", tmp_path / "model")
    read, sizes = checkpoint_module.read_tensor, set()

    def watched(entry: Any) -> torch.Tensor:
        sizes.add(entry.shape)
        return read(entry)

    monkeypatch.setattr(checkpoint_module, "read_tensor", watched)
    load(tmp_path / "model", pack_dir=tmp_path / "blocks")
    assert (1, 32, 96) in sizes and (4, 32, 96) not in sizes


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


EXPERT, NORM = "model.layers.1.mlp.experts.3.up_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda f: (f / "config.json").unlink(), CheckpointError, "config.json"),
        (lambda f: (f / "model.safetensors").unlink(), CheckpointError, "model.safetensors"),
        (lambda f: change_tensors(f, lambda t: t.pop(EXPERT)), TensorError, "has 8 and 7 of them"),
        (lambda f: change_tensors(f, lambda t: t.pop(NORM)), TensorError, NORM),
        (lambda f: change_tensors(f, lambda t: t.update({NORM: torch.ones(7)})), TensorError, NORM),
        (lambda f: change_tensors(f, lambda t: t.update({EXPERT: torch.ones(7, 7)})), TensorError, "different shapes"),
        (lambda f: change_config(f, num_experts=9, num_local_experts=9), TensorError, "9 experts"),
        (lambda f: change_config(f, quantization_config={"quant_method": "fp8"}), UnsupportedConfigError, "fp8"),
        (lambda f: change_config(f, model_type="nobody"), CheckpointError, "nobody"),
    ],
)  # fmt: skip
def test_folders_that_cannot_be_loaded_are_refused(
    damage: Callable[[Path], None], error: type[Exception], words: str, tmp_path: Path
) -> None:
    saved("qwen3_moe", tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(error, match=words):
        load(tmp_path / "model", pack_dir=tmp_path / "blocks")
    assert not list((tmp_path / "blocks").glob("*"))


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    dense_model().save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="has no experts"):
        load(tmp_path / "model", pack_dir=tmp_path / "blocks")


def test_a_budget_that_is_too_small_is_seen_before_blocks_are_written(tmp_path: Path) -> None:
    saved("mixtral", tmp_path / "model")
    with pytest.raises(ConfigError, match="experts"):
        load(tmp_path / "model", fast_memory="1", pack_dir=tmp_path / "blocks")
    assert not (tmp_path / "blocks").exists()


@pytest.mark.parametrize(
    ("operation", "first", "separable"),
    [
        (MergeModulelist(dim=0), True, True),
        (MergeModulelist(dim=0), False, False),
        (MergeModulelist(dim=1), True, False),
        (Concatenate(dim=1), False, True),
        (Concatenate(dim=0), False, False),
        (Concatenate(dim=-3), False, False),
        (Interleave(dim=1), True, True),
        (Transpose(1, 2), True, True),
        (Transpose(0, 1), True, False),
        (Transpose(1, 2, check_dims=True), True, False),
        (Chunk(dim=1), True, False),
    ],
)
def test_only_operations_that_keep_experts_apart_are_done_to_one_of_them(
    operation: Any, first: bool, separable: bool
) -> None:
    assert checkpoint_module._per_expert(operation, first=first) is separable
