"""Tiny packs, written once per process, and what their experts are."""

import functools
import shutil
import tempfile
from pathlib import Path

import torch

from steerpipe.core.ids import ExpertId
from steerpipe.core.protocols import ExpertWeights
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.pack import write_pack
from steerpipe.store.plan import PackOptions
from steerpipe.store.reader import Pack, open_pack
from tests.support import tiny

EXPERTS = 8  # of each layer
LAYERS = 3


def checkpoint_folder(family: str = "qwen3_moe") -> Path:
    name = "num_local_experts" if family == "mixtral" else "num_experts"
    return tiny.tiny(family, **{name: EXPERTS, "num_hidden_layers": LAYERS}).folder


@functools.cache
def pack_folder(family: str = "qwen3_moe", form: ExpertFormat | None = None) -> Path:
    source = checkpoint_folder(family)
    out = Path(tempfile.mkdtemp(dir=source.parent)) / "pack"
    write_pack(tiny.open_checkpoint(source), out, PackOptions(form))
    return out


def tiny_pack(family: str = "qwen3_moe", form: ExpertFormat | None = None) -> Pack:
    """3 layers of 8 experts; opened anew, from files that no test may change."""
    return open_pack(pack_folder(family, form))


def own_pack(folder: Path, family: str = "qwen3_moe", form: ExpertFormat | None = None) -> Pack:
    """A copy that a test may damage."""
    shutil.copytree(pack_folder(family, form), folder)
    return open_pack(folder)


@functools.cache
def _experts(family: str, form: ExpertFormat | None, dtype: torch.dtype) -> dict[ExpertId, ExpertWeights]:
    pack = tiny_pack(family, form)
    return {
        ExpertId(layer, expert): pack.decode_block(layer, pack.read_block(layer, expert), dtype)
        for layer in pack.spec.moe_layers
        for expert in range(pack.spec.moe(layer).experts)
    }


def true_weights(
    expert: ExpertId, dtype: torch.dtype = torch.float32, family: str = "qwen3_moe", form: ExpertFormat | None = None
) -> ExpertWeights:
    """What the pack says, read without the ladder."""
    return _experts(family, form, dtype)[expert]


def same(found: ExpertWeights, expert: ExpertId, dtype: torch.dtype = torch.float32) -> bool:
    truth = true_weights(expert, dtype)
    return torch.equal(found.gate_up, truth.gate_up) and torch.equal(found.down, truth.down)
