"""Tiny checkpoints, written by transformers itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from steerpipe.model.checkpoint import Checkpoint, open_checkpoint
from steerpipe.store.formats import DenseFormat, ExpertFormat
from steerpipe.store.pack import write_pack
from steerpipe.store.plan import PackOptions
from steerpipe.store.reader import Pack, open_pack

SMALL = PackOptions(ExpertFormat.INT4, DenseFormat.INT8)
FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe")
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "num_experts_per_tok": 2,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SHAPE, intermediate_size=48, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=4,
        tie_word_embeddings=True,
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=16, intermediate_size=48, moe_intermediate_size=16, num_experts=4, mlp_only_layers=[0]
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, intermediate_size=48, num_local_experts=4),
    "olmoe": lambda: transformers.OlmoeConfig(**SHAPE, intermediate_size=16, num_experts=4),
}  # fmt: skip


def save_tiny(folder: Path, family: str, dtype: torch.dtype, seed: int = 0) -> Checkpoint:
    """A randomly initialised model of a family, with a stand-in for a tokenizer and a licence beside it."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():  # the default start is so small and even that mistakes would hide
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{\n  "version": "1.0",\n  "vocab": {"é Ġ": 1}\n}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("do what you like")
    (folder / "notes.txt").write_text("not for the pack")
    return open_checkpoint(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """One bfloat16 checkpoint of each family."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: save_tiny(root / family, family, torch.bfloat16) for family in FAMILIES}


@pytest.fixture(scope="session")
def checkpoint(tiny: dict[str, Checkpoint]) -> Checkpoint:
    return tiny["qwen2_moe"]


@pytest.fixture
def make_pack(tmp_path: Path) -> Callable[..., Pack]:
    """Packs a checkpoint into a folder of this test and opens it."""

    def make(source: Checkpoint, options: PackOptions | None = None, name: str = "pack") -> Pack:
        write_pack(source, tmp_path / name, options)
        return open_pack(tmp_path / name)

    return make


@pytest.fixture
def whole(checkpoint: Checkpoint, tmp_path: Path) -> dict[str, bytes]:
    """The files of a pack with options SMALL that nobody disturbed."""
    write_pack(checkpoint, tmp_path / "whole", SMALL)
    return contents(tmp_path / "whole")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
