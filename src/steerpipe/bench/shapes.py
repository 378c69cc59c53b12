"""Shapes of released models, for benchmarks with made-up weights: configs as their repositories have them.

A shape goes through the same strict reading as a checkpoint, so it can only be one that the decoder computes.
"""

import math
from dataclasses import dataclass
from typing import Any

from steerpipe.core.errors import ConfigError
from steerpipe.model.checkpoint import read_spec
from steerpipe.model.families import find_family
from steerpipe.model.families.base import Family
from steerpipe.model.spec import ModelSpec, MoeSpec
from steerpipe.model.tensors import dense_tensors
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import BlockLayout, plan_block

_COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False}
_QWEN = _COMMON | {"decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen1.5-moe": _QWEN | {
        "model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False, "max_position_embeddings": 32768,
    },
    "qwen3-30b": _QWEN | {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "max_position_embeddings": 40960,
    },
    "olmoe": _COMMON | {
        "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 1024, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": False, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    "mixtral": _COMMON | {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    },
    "nano": _QWEN | {
        "model_type": "qwen2_moe", "vocab_size": 8192, "hidden_size": 192, "num_hidden_layers": 24,
        "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 192, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 192,
        "norm_topk_prob": False, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
    "tiny": _QWEN | {  # what a test can afford in Triton's interpreter
        "model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "max_position_embeddings": 512,
    },
}  # fmt: skip
SHAPES = tuple(_CONFIGS)


@dataclass(frozen=True, slots=True)
class Shape:
    """One model and the format of its experts."""

    name: str
    family: Family
    spec: ModelSpec
    layout: BlockLayout  # every layer of a shape has the same

    @property
    def moe(self) -> MoeSpec:
        return self.spec.moe(self.spec.moe_layers[0])

    @property
    def layers(self) -> int:
        """MoE layers."""
        return len(self.spec.moe_layers)

    @property
    def all_experts(self) -> int:
        return self.layers * self.moe.experts

    @property
    def expert_bytes(self) -> int:
        """All blocks."""
        return self.all_experts * self.layout.block_bytes

    @property
    def routed_bytes(self) -> int:
        """Blocks that one token uses."""
        return self.layers * self.moe.top_k * self.layout.block_bytes

    def dense_bytes(self, item_bytes: int) -> int:
        """Weights that every token reads: all but the experts, and of an untied embedding nothing (one row)."""
        names = self.family.names
        shapes = dense_tensors(self.spec, names)
        read = [name for name in shapes if self.spec.tied_embeddings or name != f"{names.embed}.weight"]
        routers = f".{names.router.rpartition('.')[2]}.weight"  # in fp32, whatever the model's dtype
        total = 0
        for name in read:
            total += math.prod(shapes[name]) * (4 if name.endswith(routers) else item_bytes)
        return total

    def kv_bytes(self, tokens: int, item_bytes: int) -> int:
        """Keys and values that one row reads in a context of so many tokens."""
        per = sum(2 * each.attention.kv_heads * each.attention.head_dim for each in self.spec.layers)
        return per * tokens * item_bytes


def make_shape(name: str, form: ExpertFormat, context: int = 0, **overrides: Any) -> Shape:
    """The shape called `name`, with room for `context` tokens where that is more than the release has."""
    if name not in _CONFIGS:
        raise ConfigError(f"{name!r} is not a shape", fix=f"choose one of {', '.join(SHAPES)}")
    raw = _CONFIGS[name] | overrides
    raw = raw | {"max_position_embeddings": max(context, int(raw["max_position_embeddings"]))}
    family = find_family(str(raw["model_type"]), name)
    spec = read_spec(family, raw, f"the shape {name}")
    return Shape(name, family, spec, plan_block(form, spec.hidden, spec.moe(spec.moe_layers[0]).width))
