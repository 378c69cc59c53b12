"""Tiny seeded checkpoints, written by transformers itself: four families, random in everything that could be wrong.

transformers starts norms at 1, biases at 0 and matrices near 0, where a missing norm or a swapped half hardly shows.
Here every parameter is random and of the size that keeps activations near 1, so logits are of order 1 to 10 and
routers decide clearly.
"""

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.utils.logging import disable_progress_bar

from steerpipe.model.checkpoint import Checkpoint, open_checkpoint
from tests.engine import tiny_tokenizers
from tests.support.bits import random_tokens

FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe")
CONTEXT = 512  # tokens
VOCAB = 301  # odd, and more than the 268 tokens of the byte-level tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT, "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_QWEN: dict[str, Any] = {"intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": 6}
_CLASSES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen2_moe": (Qwen2MoeConfig, _QWEN | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": (Qwen3MoeConfig, _QWEN | {"head_dim": 16, "norm_topk_prob": True}),
    "mixtral": (MixtralConfig, {"intermediate_size": 24, "num_local_experts": 6}),
    "olmoe": (OlmoeConfig, {"intermediate_size": 24, "num_experts": 6}),
}


disable_progress_bar()  # "Writing model shards"


@dataclass(frozen=True, slots=True)
class Tiny:
    """A checkpoint folder, and the model that wrote it: fp32, eager everywhere."""

    folder: Path
    reference: PreTrainedModel

    @property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.folder)

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        """Random token ids of this model's vocabulary."""
        return random_tokens(self.reference.config.vocab_size, count, seed)


_WRITTEN: dict[str, Tiny] = {}


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    """A config of a few thousand parameters; `changes` are the family's own keys."""
    kind, own = _CLASSES[family]
    return kind(**(_COMMON | own | changes))


def build(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model of transformers with every parameter random."""
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(0.6 * noise)  # tied, it is the head as well
            else:
                gain = 1.6 if name.endswith(("lm_head.weight", "mlp.gate.weight")) else 1.0
                parameter.copy_(noise * gain / parameter.shape[-1] ** 0.5)
    return model.eval()


def write(config: PretrainedConfig, folder: Path, seed: int = 0) -> Tiny:
    """Writes a checkpoint with a tokenizer into `folder`."""
    model = build(config, seed)
    model.save_pretrained(folder)
    for file in _tokenizer_files():
        shutil.copy(file, folder)
    return Tiny(folder, model)


def tiny(family: str, seed: int = 0, **changes: Any) -> Tiny:
    """Written once per process, into a folder that goes with it."""
    key = repr((family, seed, sorted(changes.items())))
    if key not in _WRITTEN:
        _WRITTEN[key] = write(config_of(family, **changes), Path(tempfile.mkdtemp(dir=_root())), seed)
    return _WRITTEN[key]


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="steerpipe-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def _tokenizer_files() -> tuple[Path, ...]:
    folder = _root() / "tokenizer"
    folder.mkdir()
    tiny_tokenizers.save(tiny_tokenizers.byte_level(), folder)
    return tuple(file for file in folder.iterdir() if file.is_file())
