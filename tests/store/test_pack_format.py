"""What a pack holds: every format against its reference, files that other people's readers accept."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from steerpipe.core.protocols import ExpertWeights
from steerpipe.model.checkpoint import Checkpoint, open_checkpoint
from steerpipe.store.files import compact_json
from steerpipe.store.formats import DenseFormat, ExpertFormat
from steerpipe.store.pack import write_pack
from steerpipe.store.plan import PackOptions
from steerpipe.store.quant import dequantise_int4, dequantise_int8, quantise_int4, quantise_int8
from steerpipe.store.reader import Pack, open_pack
from tests.store.conftest import FAMILIES, contents, save_tiny

MakePack = Callable[..., Pack]


def reference(weight: torch.Tensor, form: ExpertFormat, group: int) -> torch.Tensor:
    if form is ExpertFormat.INT8:
        return dequantise_int8(*quantise_int8(weight, "w"), torch.float32)
    if form is ExpertFormat.INT4:
        return dequantise_int4(*quantise_int4(weight, group, "w"), torch.float32)
    return weight.to(getattr(torch, form.value))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", list(ExpertFormat))
def test_experts_are_those_of_the_checkpoint_in_the_formats_own_arithmetic(
    tiny: dict[str, Checkpoint], make_pack: MakePack, family: str, form: ExpertFormat
) -> None:
    source = tiny[family]
    pack = make_pack(source, PackOptions(experts=form))
    for layer in source.spec.moe_layers:
        layout = pack.layout(layer)
        groups = (layout.gate_up_group, layout.gate_up_group, layout.down_group)
        for expert in range(4):
            packed = pack.read_expert(layer, expert)
            for weight, stored, group in zip(source.read_expert(layer, expert), packed, groups, strict=True):
                assert torch.equal(stored, reference(weight, form, group))


def test_a_native_pack_has_the_bits_of_the_checkpoint(tiny: dict[str, Checkpoint], make_pack: MakePack) -> None:
    for family, source in tiny.items():
        pack = make_pack(source, name=family)
        assert pack.manifest.lossless
        assert pack.manifest.expert_format is ExpertFormat.BFLOAT16
        assert pack.spec == source.spec
        assert pack.family is source.family
        dense = source.read_dense()
        assert pack.read_dense().keys() == dense.keys()
        for name, stored in pack.read_dense().items():
            assert stored.dtype == dense[name].dtype
            assert torch.equal(stored, dense[name])


def test_int8_dense_keeps_routers_norms_biases_and_the_switch(checkpoint: Checkpoint, make_pack: MakePack) -> None:
    pack = make_pack(checkpoint, PackOptions(dense=DenseFormat.INT8))
    dense = checkpoint.read_dense()
    changed = {name for name, weight in pack.read_dense().items() if weight.dtype != dense[name].dtype}
    kept = ("norm", "bias", "mlp.gate.weight", "shared_expert_gate")
    assert changed == {name for name in dense if not any(part in name for part in kept)}
    assert "model.embed_tokens.weight" in changed
    for name, weight in pack.read_dense().items():
        expected = dequantise_int8(*quantise_int8(dense[name], name), torch.float32) if name in changed else dense[name]
        assert torch.equal(weight, expected)
    with safe_open(pack.folder / "dense.safetensors", "pt") as file:
        assert file.get_slice("model.embed_tokens.weight").get_dtype() == "I8"
        assert file.get_slice("model.embed_tokens.weight.scale").get_shape() == [64]


def test_the_experts_file_is_one_tensor_on_a_page_that_safetensors_reads(
    checkpoint: Checkpoint, make_pack: MakePack
) -> None:
    pack = make_pack(checkpoint, PackOptions(experts=ExpertFormat.INT4))
    raw = pack.expert_file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    assert start % 4096 == 0
    with safe_open(pack.expert_file, "pt") as file:
        assert list(file.keys()) == ["experts"]
        blocks = file.get_tensor("experts")
    assert blocks.dtype == torch.uint8
    assert blocks.shape == (8, 4096)
    assert torch.equal(blocks[5], pack.read_block(1, 1))
    assert pack.place(1, 1).offset == start + 5 * 4096
    assert raw[start:] == blocks.numpy().tobytes()


def test_the_manifest_says_where_each_part_lies(checkpoint: Checkpoint, make_pack: MakePack) -> None:
    pack = make_pack(checkpoint, PackOptions(experts=ExpertFormat.INT8))
    (size_class,) = json.loads((pack.folder / "steerpipe.json").read_text())["classes"]
    places = {part["name"]: (part["offset"], part["size_bytes"], part["dtype"]) for part in size_class["parts"]}
    assert places == {
        "gate_up": (0, 1024, "int8"), "gate_up.scale": (1024, 64, "float16"),
        "down": (1088, 512, "int8"), "down.scale": (1600, 64, "float16"),
    }  # fmt: skip
    block = pack.read_block(0, 2)
    gate, up, _ = checkpoint.read_expert(0, 2)
    codes, scales = quantise_int8(torch.cat((gate, up)), "w")
    assert torch.equal(block[:1024].view(torch.int8), codes.view(-1))
    assert torch.equal(block[1024:1088].view(torch.float16), scales.view(-1))
    assert not block[1664:].any()


@pytest.mark.parametrize("form", list(ExpertFormat))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_decoded_block_is_one_contiguous_matrix_rounded_once(
    checkpoint: Checkpoint, make_pack: MakePack, form: ExpertFormat, dtype: torch.dtype
) -> None:
    pack = make_pack(checkpoint, PackOptions(experts=form))
    gate, up, down = pack.read_expert(1, 3)
    weights = pack.decode_block(1, pack.read_block(1, 3), dtype)
    assert torch.equal(weights.gate_up, torch.cat((gate, up)).to(dtype))
    assert torch.equal(weights.down, down.to(dtype))
    assert weights.gate_up.is_contiguous()
    assert weights.down.is_contiguous()
    slot = ExpertWeights(torch.empty(32, 32, dtype=dtype), torch.empty(32, 16, dtype=dtype))
    assert pack.decode_block(1, pack.read_block(1, 3), dtype, slot) is slot
    assert torch.equal(slot.gate_up, weights.gate_up)
    assert torch.equal(slot.down, weights.down)


def test_decoding_to_the_stored_dtype_copies_nothing(checkpoint: Checkpoint, make_pack: MakePack) -> None:
    pack = make_pack(checkpoint)
    block = pack.read_block(0, 0)
    weights = pack.decode_block(0, block, torch.bfloat16)
    assert weights.gate_up.data_ptr() == block.data_ptr()


def test_only_the_files_that_belong_to_a_model_are_copied(checkpoint: Checkpoint, make_pack: MakePack) -> None:
    pack = make_pack(checkpoint)
    assert set(contents(pack.folder)) == {
        "steerpipe.json", "experts.safetensors", "dense.safetensors", "config.json", "generation_config.json",
        "tokenizer.json", "chat_template.jinja", "LICENSE",
    }  # fmt: skip
    for name in ("config.json", "generation_config.json", "chat_template.jinja", "LICENSE"):
        assert (pack.folder / name).read_bytes() == (checkpoint.folder / name).read_bytes()
    assert (pack.folder / "tokenizer.json").read_text() == '{"version":"1.0","vocab":{"é Ġ":1}}'


@pytest.mark.parametrize("content", [b"not JSON", b'{"a":  "\\ud800"}', b"\xff\xfe"])
def test_a_tokenizer_file_that_cannot_be_shortened_exactly_is_copied(content: bytes) -> None:
    assert compact_json(content) == content


def test_order_on_disk_follows_a_trace_and_changes_no_weight(
    checkpoint: Checkpoint, make_pack: MakePack, tmp_path: Path
) -> None:
    routing = torch.tensor([[0, 2], [1, 3]]).repeat(20, 1).unsqueeze(1).repeat(1, 2, 1)
    save_file({"routing": routing.int()}, tmp_path / "trace.safetensors")
    plain = make_pack(checkpoint, name="plain")
    ordered = make_pack(checkpoint, PackOptions(routing=tmp_path / "trace.safetensors"), name="ordered")
    assert ordered.manifest.ordered_by == "coactivation"
    assert ordered.manifest.order[0] != plain.manifest.order[0] == (0, 1, 2, 3)
    neighbours = ordered.place(0, 0).offset - ordered.place(0, 2).offset
    assert abs(neighbours) == ordered.layout(0).block_bytes
    for layer in (0, 1):
        for expert in range(4):
            assert torch.equal(ordered.read_block(layer, expert), plain.read_block(layer, expert))


def test_the_report_is_json_and_its_loss_is_measured(checkpoint: Checkpoint, tmp_path: Path) -> None:
    report = write_pack(checkpoint, tmp_path / "p", PackOptions(ExpertFormat.INT4, DenseFormat.INT8))
    raw = json.loads(json.dumps(asdict(report)))
    assert raw["experts"] == 8
    pack = open_pack(tmp_path / "p")
    error = weight = 0.0
    for layer in (0, 1):
        for expert in range(4):
            exact, stored = (
                checkpoint.read_expert(layer, expert)[1].double(),
                pack.read_expert(layer, expert)[1].double(),
            )
            error, weight = error + float((exact - stored).square().sum()), weight + float(exact.square().sum())
    assert raw["loss"]["relative_rms"]["up"] == pytest.approx((error / weight) ** 0.5)
    assert 0.02 < raw["loss"]["relative_rms"]["gate"] < 0.09
    assert 0.001 < raw["loss"]["relative_rms"]["dense"] < 0.01
    assert raw["loss"]["expert_bits_per_weight"] == 4 + 16 / 8  # groups of 8 fit into the page
    assert raw["loss"]["expert_bits_per_weight_on_disk"] == 4096 * 8 / (3 * 32 * 16)
    assert report.loss.lossless is False
    assert write_pack(checkpoint, tmp_path / "n").loss.lossless is True


def test_packing_twice_gives_the_same_bytes_and_the_second_finds_it_there(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    first = write_pack(checkpoint, tmp_path / "a", PackOptions(ExpertFormat.INT4))
    write_pack(checkpoint, tmp_path / "b", PackOptions(ExpertFormat.INT4))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    again = write_pack(checkpoint, tmp_path / "a", PackOptions(ExpertFormat.INT4))
    assert (first.already_there, again.already_there) == (False, True)
    assert again.loss == first.loss
    assert again.total_bytes == sum(len(content) for content in contents(tmp_path / "a").values())


def test_mixed_dtypes_are_held_by_float32(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "mixed", "olmoe", torch.float32)
    names = [name for name in source.entries if "experts.1." in name]
    halved = {
        name: source.read(name).to(torch.float16) if name in names else source.read(name) for name in source.entries
    }
    save_file(halved, tmp_path / "mixed" / "model.safetensors")
    mixed = open_checkpoint(tmp_path / "mixed")
    report = write_pack(mixed, tmp_path / "p")
    assert report.expert_format == "float32"
    assert report.loss.lossless


def test_progress_counts_bytes_up_to_all(checkpoint: Checkpoint, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = write_pack(checkpoint, tmp_path / "p", progress=lambda done, total: seen.append((done, total)))
    total = report.expert_file_bytes + report.dense_file_bytes
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
