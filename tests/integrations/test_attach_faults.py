"""What cannot run is refused with words and a fix, and leaves the model as it was."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from steerpipe.core.errors import (
    CapacityError,
    ConfigError,
    PackError,
    RequestError,
    SteerpipeError,
    TransferError,
    UnsupportedConfigError,
)
from steerpipe.integrations import attachment as attachment_module
from steerpipe.integrations import blocks as blocks_module
from steerpipe.integrations.exchange import expert_layers, experts_device
from steerpipe.integrations.transformers import Attachment, attach, attachment_of
from tests.integrations.models import difference, logits, prompt, tiny_model, two_slots


def experts_of(model: PreTrainedModel) -> Any:
    return expert_layers(model)[0].module


def dense_model() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2,
        )
    ).eval()  # fmt: skip


def on_meta() -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_model("mixtral").config)
    return model.eval()


def with_scales() -> PreTrainedModel:
    model = tiny_model("mixtral")
    experts_of(model).register_parameter("gate_up_proj_scale", nn.Parameter(torch.ones(4)))
    return model


def with_double_precision() -> PreTrainedModel:
    return tiny_model("mixtral").double()


def with_shared_experts() -> PreTrainedModel:
    model = tiny_model("mixtral")
    first, second = (layer.module for layer in expert_layers(model))
    second.__dict__["_parameters"]["down_proj"] = first.__dict__["_parameters"]["down_proj"]
    return model


def with_a_part_of_its_experts() -> PreTrainedModel:
    model = tiny_model("mixtral")
    experts_of(model)._is_expert_parallel = True
    return model


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        (lambda: nn.Linear(2, 2), ConfigError, "not a transformers model"),
        (dense_model, ConfigError, "has no experts"),
        (on_meta, ConfigError, "meta device"),
        (lambda: tiny_model("mixtral").train(), ConfigError, "training mode"),
        (with_scales, UnsupportedConfigError, "gate_up_proj_scale"),
        (with_double_precision, UnsupportedConfigError, "float64"),
        (with_shared_experts, UnsupportedConfigError, "share experts"),
        (with_a_part_of_its_experts, UnsupportedConfigError, "part of its experts"),
    ],
)
def test_models_that_cannot_be_attached_are_refused(
    made: Callable[[], Any], error: type[SteerpipeError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words) as caught:
        attach(made(), pack_dir=tmp_path)
    assert caught.value.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("devices", "words"), [(("cuda:0",), "cuda:0 are not brought"), (("cpu", "cuda:0"), "lie on cpu, cuda:0")]
)
def test_experts_outside_of_ram_are_refused(devices: tuple[str, ...], words: str) -> None:
    layers: Any = [
        SimpleNamespace(parameters=lambda each=each: {"down_proj": SimpleNamespace(device=torch.device(each))})
        for each in devices
    ]
    with pytest.raises(ConfigError, match=words):
        experts_device(layers)


def test_experts_with_an_arithmetic_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tiny_model("mixtral")

    def clamped(self: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        result: Tensor = self.act_fn(gate) * up.clamp(max=0.01)
        return result

    monkeypatch.setattr(type(experts_of(model)), "_apply_gate", clamped)  # which its eager forward does not use
    with pytest.raises(UnsupportedConfigError, match="in a way of its own"):
        attach(model, pack_dir=tmp_path)


def test_attached_twice_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    before = logits(model)
    with attach(model, pack_dir=tmp_path):
        with pytest.raises(ConfigError, match="attached already"):
            attach(model, pack_dir=tmp_path)
        assert difference(logits(model), before) == 0.0
    with pytest.raises(ConfigError, match="nothing is attached"):
        attachment_of(model)


def test_a_budget_that_is_too_small_names_the_smallest(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    smallest = int(two_slots(model))
    with pytest.raises(ConfigError) as caught:
        attach(model, fast_memory=str(smallest - 1), pack_dir=tmp_path)
    assert f"{smallest:,} bytes" in caught.value.fix
    attach(model, fast_memory=str(smallest), pack_dir=tmp_path).detach()


@pytest.mark.parametrize("wrong", [{"fast_memory": "a lot"}, {"fast_memory": 4}, {"ram": "1"}, {"pace": "quick"}])
def test_amounts_that_mean_nothing_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        attach(tiny_model("mixtral"), pack_dir=tmp_path, **wrong)


def test_gradients_and_training_are_refused_while_attached(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    with attach(model, pack_dir=tmp_path):
        with pytest.raises(RequestError, match="gradients") as caught:
            model(prompt())
        assert "no_grad" in caught.value.fix
        model.train()
        with pytest.raises(RequestError, match="training mode"):
            logits(model)
        model.eval()
        logits(model)


def test_a_model_that_was_cast_while_attached_says_so_and_detaches_as_it_was(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    before = {name: tensor.clone() for name, tensor in experts_of(model).named_parameters()}
    with attach(model, pack_dir=tmp_path):
        model.to(torch.bfloat16)
        with pytest.raises(RequestError, match=r"experts are torch.float32, but .* torch.bfloat16") as caught:
            logits(model)
        assert "before it is attached" in caught.value.fix
    after = dict(experts_of(model).named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_model_that_shares_a_config_is_told_what_happened(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    twin = type(model)(model.config).eval()
    with attach(model, pack_dir=tmp_path), pytest.raises(RequestError, match="nothing is attached") as caught:
        logits(twin)
    assert "share a config" in caught.value.fix


def test_saving_while_attached_is_refused_by_transformers(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    with attach(model, pack_dir=tmp_path), pytest.raises((NotImplementedError, RuntimeError, ValueError)):
        model.save_pretrained(tmp_path / "saved")


def test_a_full_disk_is_seen_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CapacityError, match="100 free"):
        attach(model, pack_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    before = logits(model)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(blocks_module, "write_all", full)
    with pytest.raises(CapacityError):
        attach(model, pack_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert difference(logits(model), before) == 0.0


def test_a_ladder_that_cannot_be_opened_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tiny_model("gpt_oss")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def refuse(*_: object, **__: object) -> None:
        raise CapacityError("no memory", fix="get some")

    monkeypatch.setattr(attachment_module.LadderSource, "open", refuse)
    with pytest.raises(CapacityError, match="no memory"):
        attach(model, pack_dir=tmp_path)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model.config._experts_implementation == "eager"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PackError):
        attach(tiny_model("mixtral"), pack_dir=tmp_path / "file")


def flip_a_byte(attachment: Attachment, layer: int, expert: int) -> None:
    """Of an expert's block, in the file that has no name any more."""
    blocks = attachment._blocks
    descriptor = os.open(f"/proc/self/fd/{blocks._descriptor}", os.O_RDWR)
    try:
        offset = blocks.place(layer, expert).offset
        (byte,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte ^ 255]), offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the file has no name, and only Linux finds it so")
def test_a_damaged_block_is_an_error_and_never_an_answer(tmp_path: Path) -> None:
    model = tiny_model("mixtral", num_experts_per_tok=4)  # every expert is asked for
    before = logits(model)
    attachment = attach(model, fast_memory=two_slots(model), pack_dir=tmp_path)
    flip_a_byte(attachment, 1, 2)
    with pytest.raises(TransferError, match="expert 2 of layer 1"):
        logits(model)
    with pytest.raises(PackError, match="expert 2 of layer 1"):
        attachment.detach()
    flip_a_byte(attachment, 1, 2)
    assert difference(logits(model), before) == 0.0
    attachment.source.check_integrity()
    attachment.detach()
    assert difference(logits(model), before) == 0.0
