"""Tensors that the config does not promise, or that are not as it promises them, stop the load."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from steerpipe.core.errors import TensorError
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.model.families import FAMILIES
from tests.faults import folders
from tests.faults.running import generate, refused

EMBED, HEAD, ROUTER = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight"
KEY, EXPERT = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    found = load_file(file)
    change(found)
    save_file(found, file)


@pytest.mark.parametrize("name", [EMBED, HEAD, ROUTER, KEY, EXPERT, "model.norm.weight"])
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    edit(folder, lambda found: found.pop(name))
    message = refused(folder)
    assert f"{folder} lacks 1 tensors that its config.json promises, such as {name}" in message
    assert "download both again" in message


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    folders.edit_config(folder, num_hidden_layers=4)
    assert "lacks 42 tensors" in refused(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.sinks",
        "model.layers.1.mlp.experts.4.up_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "score.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
def test_an_extra_tensor_is_named(folder: Path, name: str) -> None:
    edit(folder, lambda found: found.update({name: torch.zeros(4)}))
    message = refused(folder)
    assert f"{folder} has 1 tensors that its config.json does not promise, such as {name}" in message
    assert "parts that this engine does not compute" in message


def test_stored_frequencies_are_not_extra(folder: Path) -> None:
    edit(folder, lambda found: found.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert generate(folder).exit_code == 0


@pytest.mark.parametrize("name", [EMBED, ROUTER, KEY, EXPERT])
@pytest.mark.parametrize(
    "reshape", [lambda t: t.T.contiguous(), lambda t: t[:-1], lambda t: t.reshape(-1), lambda t: t[None]]
)
def test_a_wrong_shape_is_shown_beside_the_right_one(
    folder: Path, name: str, reshape: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    right = list(load_file(folder / "model.safetensors")[name].shape)
    edit(folder, lambda found: found.update({name: reshape(found[name]).clone()}))
    wrong = list(load_file(folder / "model.safetensors")[name].shape)
    message = refused(folder)
    assert f"{name} has shape {wrong}; config.json asks for {right}" in message
    assert "belong to different models" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_whole_numbers_are_no_weights(folder: Path, dtype: torch.dtype) -> None:
    edit(folder, lambda found: found.update({EXPERT: found[EXPERT].to(dtype)}))
    message = refused(folder)
    assert f"{EXPERT} is stored as {dtype}" in message
    assert "convert the checkpoint to bfloat16" in message


@pytest.mark.parametrize(
    ("dtype", "said"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64"), (torch.bool, "BOOL"), (torch.uint16, "U16")],
)
def test_a_format_that_cannot_be_read_is_named(folder: Path, dtype: torch.dtype, said: str) -> None:
    edit(folder, lambda found: found.update({EXPERT: found[EXPERT].to(dtype)}))
    message = refused(folder)
    assert f"model.safetensors: {EXPERT} is stored as {said}" in message
    assert "only F32, BF16, F16" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mixture_of_float_formats_loads(folder: Path, dtype: torch.dtype) -> None:
    edit(folder, lambda found: found.update({EXPERT: found[EXPERT].to(dtype)}))
    assert generate(folder).exit_code == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_end_the_answer_with_status_one(folder: Path, value: float) -> None:
    edit(folder, lambda found: found["model.norm.weight"].fill_(value))
    result = generate(folder, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert "are not finite numbers" in result.stderr and "fix: " in result.stderr


def test_a_tied_model_needs_no_head(folder: Path) -> None:
    folders.edit_config(folder, tie_word_embeddings=True)
    edit(folder, lambda found: found.pop(HEAD))
    assert generate(folder).exit_code == 0


def test_a_tied_model_may_store_its_head_twice(folder: Path) -> None:
    folders.edit_config(folder, tie_word_embeddings=True)
    edit(folder, lambda found: found.update({HEAD: found[EMBED].clone()}))
    assert generate(folder).exit_code == 0


@pytest.mark.parametrize("change", [lambda t: t + 1, lambda t: t[:-1].clone(), lambda t: t.bfloat16()])
def test_a_tied_model_with_another_head_is_refused(
    folder: Path, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    folders.edit_config(folder, tie_word_embeddings=True)
    edit(folder, lambda found: found.update({HEAD: change(found[EMBED])}))
    message = refused(folder)
    assert "ties the head to the embedding, but the files hold a head that differs" in message
    assert "set tie_word_embeddings to false" in message


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_names_of_another_family_do_not_fit(family: str, tmp_path: Path) -> None:
    other = "qwen3_moe" if family != "qwen3_moe" else "qwen2_moe"
    folder = folders.build(tmp_path / "model", family)
    folders.write_json(folder / "config.json", folders.CONFIGS[other])
    with pytest.raises(TensorError, match="config"):
        open_checkpoint(folder)
