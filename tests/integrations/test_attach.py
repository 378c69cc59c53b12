"""A transformers model whose experts come from the ladder computes what it computed before, and is put back exactly."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from steerpipe.integrations.exchange import expert_layers
from steerpipe.integrations.transformers import attach, attachment_of
from tests.integrations.models import FAMILIES, difference, logits, prompt, tiny_model, two_slots

LONG = prompt(length=24)  # 48 rows: a prompt, of which only the tail's experts are kept
BUDGETS = ("100%", "25%", "two slots")


def budget(model: PreTrainedModel, name: str) -> str:
    return two_slots(model) if name == "two slots" else name


def greedy(model: PreTrainedModel) -> list[list[int]]:
    tokens = prompt(rows=2, length=5)
    out: Tensor = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=6, pad_token_id=0
    )
    found: list[list[int]] = out.tolist()
    return found


def expert_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    return [each for layer in expert_layers(model) for each in layer.parameters().values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_eager_experts_at_every_budget(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    short, long = logits(model), logits(model, LONG)
    for name in BUDGETS:
        with attach(model, fast_memory=budget(model, name), pack_dir=tmp_path) as attachment:
            assert difference(logits(model), short) == 0.0, name
            assert difference(logits(model, LONG), long) == 0.0, name
            attachment.source.check_integrity()
    assert difference(logits(model), short) == 0.0, "detached"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_bfloat16_logits_are_those_of_eager_experts(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, dtype=torch.bfloat16)
    before = logits(model, LONG)
    with attach(model, fast_memory=two_slots(model), pack_dir=tmp_path):
        assert torch.equal(logits(model, LONG), before)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_generate_gives_the_same_tokens(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    before = greedy(model)
    with attach(model, fast_memory="25%", pack_dir=tmp_path):
        assert greedy(model) == before


def test_experts_in_ram_behind_a_paced_link_change_nothing(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    before = logits(model)
    with attach(model, fast_memory=two_slots(model), ram="1MiB", pace="20MB", pack_dir=tmp_path) as attachment:
        assert difference(logits(model), before) == 0.0
        assert "RAM" in attachment.source.link.name and "paced" in attachment.source.link.name


def test_attached_in_inference_mode_it_runs_outside_of_it(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    before = logits(model)
    with torch.inference_mode():
        attachment = attach(model, fast_memory="50%", pack_dir=tmp_path)
        assert difference(logits(model), before) == 0.0
    assert difference(logits(model), before) == 0.0
    attachment.detach()
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_parameters_that_are_not_contiguous_keep_bits_and_strides(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    for layer in expert_layers(model):
        down = layer.parameters()["down_proj"]
        down.data = down.data.mT.contiguous().mT  # columns one after the other
    before = logits(model)
    stride = expert_parameters(model)[1].stride()
    with attach(model, fast_memory="25%", pack_dir=tmp_path):
        assert difference(logits(model), before) == 0.0
    assert expert_parameters(model)[1].stride() == stride
    assert difference(logits(model), before) == 0.0


def test_the_memory_of_the_experts_is_gone_from_the_modules(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    held = sum(each.nbytes for each in expert_parameters(model))
    whole = model.num_parameters()
    tensors = [weakref.ref(each) for each in expert_parameters(model)]
    storages = [weakref.ref(each.untyped_storage()) for each in expert_parameters(model)]
    dense = sum(each.nbytes for each in model.parameters()) - held
    attachment = attach(model, fast_memory=two_slots(model), pack_dir=tmp_path)
    gc.collect()
    assert not any(ref() is not None for ref in (*tensors, *storages))
    assert sum(each.nbytes for each in model.parameters() if not each.is_meta) == dense
    assert all(each.is_meta for each in expert_parameters_attached(model))
    assert attachment.fast_bytes * 4 < held
    assert model.num_parameters() == whole


def expert_parameters_attached(model: PreTrainedModel) -> list[nn.Parameter]:
    return [each for name, each in model.named_parameters() if ".experts." in name]


def test_no_file_is_left_behind(tmp_path: Path) -> None:
    model = tiny_model("olmoe")
    with attach(model, fast_memory="25%", pack_dir=tmp_path) as attachment:
        assert list(tmp_path.iterdir()) == []
        assert attachment.disk_bytes == 16 * 8192
        logits(model)


def test_detach_puts_back_every_bit_and_the_implementation(tmp_path: Path) -> None:
    model = tiny_model("gpt_oss")
    model.set_experts_implementation("batched_mm")
    model.get_parameter("model.layers.1.mlp.experts.down_proj").requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    attachment = attach(model, fast_memory="25%", pack_dir=tmp_path)
    logits(model)
    attachment.detach()
    attachment.detach()  # twice is once
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wanted
    assert model.config._experts_implementation == "batched_mm"
    with attach(model, fast_memory="50%", pack_dir=tmp_path):
        assert difference(logits(model), eager_logits(model, before)) == 0.0


def eager_logits(model: PreTrainedModel, state: dict[str, Tensor]) -> Tensor:
    twin = tiny_model("gpt_oss")
    twin.load_state_dict(state)
    return logits(twin)


def test_of_a_prompt_only_the_last_experts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_moe")
    with attach(model, pack_dir=tmp_path) as attachment:
        leases: list[tuple[list[int], list[int] | None]] = []
        lease = attachment.source.lease

        def watched(layer: int, routed: list[int], keep: list[int] | None) -> object:
            leases.append((routed, keep))
            return lease(layer, routed, keep)

        monkeypatch.setattr(attachment.source, "lease", watched)
        logits(model, prompt(rows=1, length=16))
        assert all(keep is None for _, keep in leases)
        leases.clear()
        repeated = torch.cat((prompt(rows=1, length=40), torch.full((1, 20), 5)), dim=1)
        logits(model, repeated)
        assert all(keep is not None and set(keep) < set(routed) for routed, keep in leases)


def test_counters_add_up(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    with attach(model, fast_memory="25%", pack_dir=tmp_path) as attachment:
        for seed in range(4):
            logits(model, prompt(seed=seed))
        attachment.source.check_integrity()
        counts = attachment.counters()
        assert counts.leases == 4 * 2
        assert counts.hits + counts.late + counts.misses == counts.leased
        assert counts.misses and counts.demand.read_bytes % 8192 == 0
        assert attachment_of(model) is attachment


def test_a_dropped_model_closes_its_ladder_at_once(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    attach(model, fast_memory="25%", pack_dir=tmp_path)
    source = weakref.ref(attachment_of(model).source)
    module = weakref.ref(model)
    gc.disable()  # without the collector's help
    try:
        del model
        assert module() is None and source() is None
    finally:
        gc.enable()


def test_two_models_are_attached_side_by_side(tmp_path: Path) -> None:
    left, right = tiny_model("qwen3_moe", seed=1), tiny_model("qwen3_moe", seed=2)
    before = logits(left), logits(right)
    with attach(left, fast_memory="25%", pack_dir=tmp_path), attach(right, fast_memory="50%", pack_dir=tmp_path):
        assert difference(logits(left), before[0]) == 0.0
        assert difference(logits(right), before[1]) == 0.0
