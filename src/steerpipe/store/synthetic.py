"""Packs of any size with random weights, written as fast as the disk takes them: for rates and memory, never for text.

A few blocks are made and repeated, so equal checksums repeat too. Random weights route degenerately: such a pack says
what links and budgets do, nothing about caches or predictors.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from steerpipe import __version__
from steerpipe.model.checkpoint import read_spec
from steerpipe.model.families import find_family
from steerpipe.model.families.base import Family
from steerpipe.model.spec import ModelSpec
from steerpipe.model.tensors import dense_tensors
from steerpipe.store.blocks import encode
from steerpipe.store.files import byte_view, check_room, checksum, disk_errors, write_all, write_file
from steerpipe.store.formats import DenseFormat, ExpertFormat
from steerpipe.store.layout import BlockLayout, plan_block
from steerpipe.store.loss import KINDS, QuantReport
from steerpipe.store.manifest import DENSE, EXPERTS, MANIFEST, FileRecord, Manifest, SizeClass
from steerpipe.store.routing import index_order
from steerpipe.store.source import config_digest
from steerpipe.store.tensorfile import PlannedTensor, TensorFile, file_bytes, header, in_file_order

DISTINCT = 8  # blocks that are made
_FAMILY = "qwen3_moe"


@dataclass(frozen=True, slots=True)
class SyntheticShape:
    """A model in the manner of Qwen3-MoE. Block and file sizes follow from it."""

    layers: int
    experts: int
    hidden: int
    width: int
    top_k: int = 4
    vocab: int = 260
    heads: int = 4
    form: ExpertFormat = ExpertFormat.BFLOAT16

    @property
    def layout(self) -> BlockLayout:
        return plan_block(self.form, self.hidden, self.width)

    @property
    def expert_bytes(self) -> int:
        return self.layers * self.experts * self.layout.block_bytes


def write_synthetic(folder: Path, shape: SyntheticShape, seed: int = 0) -> None:
    """Writes a pack into a new folder; CapacityError if the disk has no room. Not atomic, and without a tokenizer."""
    check_room(folder, shape.expert_bytes)
    folder.mkdir(parents=True)
    raw = _config(shape)
    family = find_family(_FAMILY, str(folder))
    spec = read_spec(family, raw, str(folder / "config.json"))
    generator = torch.Generator().manual_seed(seed)
    content = json.dumps(raw, indent=1).encode()
    with disk_errors(folder):
        write_file(folder / "config.json", content)
        dense_sums, dense_bytes = _write_dense(folder / DENSE, spec, family, generator)
        sums, expert_bytes = _write_experts(folder / EXPERTS, shape, generator)
        files = {EXPERTS: expert_bytes, DENSE: dense_bytes, "config.json": len(content)}
        manifest = _manifest(shape, spec, config_digest(raw), sums, dense_sums, files)
        write_file(folder / MANIFEST, manifest.to_bytes())


def _config(shape: SyntheticShape) -> dict[str, object]:
    return {
        "model_type": _FAMILY, "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads, "head_dim": 32, "intermediate_size": shape.width,
        "moe_intermediate_size": shape.width, "num_experts": shape.experts, "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "hidden_act": "silu", "decoder_sparse_step": 1,
        "mlp_only_layers": [], "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip


def _write_dense(file: Path, spec: ModelSpec, family: Family, generator: torch.Generator) -> tuple[dict[str, str], int]:
    """Checksums by name, and the size of the file. Norms are 1, so that activations stay finite."""
    shapes = dense_tensors(spec, family.names)
    planned = in_file_order(PlannedTensor(name, torch.bfloat16, each) for name, each in shapes.items())
    sums = {}
    with TensorFile(file, planned) as out:
        for name, each in shapes.items():
            noise = torch.randn(each, generator=generator) / each[-1] ** 0.5
            sums[name] = out.write(name, (torch.ones(each) if len(each) == 1 else noise).to(torch.bfloat16))
    return sums, file_bytes(planned)


def _write_experts(file: Path, shape: SyntheticShape, generator: torch.Generator) -> tuple[list[str], int]:
    """Checksums in the order on disk, and the size of the file."""
    count, layout = shape.layers * shape.experts, shape.layout
    planned = [PlannedTensor("experts", torch.uint8, (count, layout.block_bytes))]
    blocks = [byte_view(_block(layout, generator)) for _ in range(DISTINCT)]
    sums = [checksum(block) for block in blocks]
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        end = write_all(descriptor, header(planned), 0)
        for index in range(count):
            end = write_all(descriptor, blocks[index % DISTINCT], end)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return [sums[index % DISTINCT] for index in range(count)], end


def _block(layout: BlockLayout, generator: torch.Generator) -> torch.Tensor:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator).div_(columns**0.5)

    gate, up = matrix(layout.width, layout.hidden), matrix(layout.width, layout.hidden)
    return encode(layout, gate, up, matrix(layout.hidden, layout.width), name="a synthetic expert")


def _manifest(
    shape: SyntheticShape, spec: ModelSpec, config: str, sums: list[str], dense_sums: dict[str, str],
    files: dict[str, int],
) -> Manifest:  # fmt: skip
    per = shape.experts
    bits = 8 * shape.layout.block_bytes / shape.layout.weights
    return Manifest(
        steerpipe=__version__,
        source="synthetic",
        config=config,
        model_type=_FAMILY,
        expert_format=shape.form,
        lossless=False,
        ordered_by="index",
        classes=(SizeClass("experts", tuple(spec.moe_layers), shape.layout),),
        order=index_order(spec),
        checksums={layer: tuple(sums[layer * per : (layer + 1) * per]) for layer in spec.moe_layers},
        dense_format=DenseFormat.NATIVE,
        dense_checksums=dense_sums,
        files={name: FileRecord(size) for name, size in files.items()},
        loss=QuantReport(dict.fromkeys(KINDS, 0.0), bits, bits, 16.0),
    )
