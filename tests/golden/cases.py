"""Configurations by hand: one per thing that a family can do."""

from dataclasses import dataclass
from typing import Any

from tests.support.tiny import Tiny, tiny

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
ROPE_KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 300.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    "yarn": YARN,
    "yarn with mscale": YARN | {"mscale": 1.3, "mscale_all_dim": 0.5},
    "yarn not truncated": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with its own attention factor": YARN | {"attention_factor": 1.4},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip


def longrope(head_dim: int) -> dict[str, Any]:
    """Its lists have one entry per rotated pair."""
    pairs = head_dim // 2
    return {
        "rope_type": "longrope", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 256,
        "short_factor": [1.0 + 0.15 * i for i in range(pairs)], "long_factor": [2.0 + 0.3 * i for i in range(pairs)],
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    family: str
    changes: dict[str, Any]

    @property
    def tiny(self) -> Tiny:
        return tiny(self.family, seed=len(self.name), **self.changes)


def _cases() -> list[Case]:
    own: dict[str, dict[str, dict[str, Any]]] = {
        "qwen2_moe": {
            "grouped heads, bias, shared expert": {},
            "a key for every head": {"num_key_value_heads": 4},
            "no bias": {"qkv_bias": False},
            "tied": {"tie_word_embeddings": True},
            "renormalised": {"norm_topk_prob": True},
            "a dense layer in the middle": {"mlp_only_layers": [1]},
            "every second layer sparse": {"decoder_sparse_step": 2},
            "all layers dense": {"num_experts": 0},
            "every second layer slides": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 28},
            "only the first layer slides": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
            "one layer slides": {
                "use_sliding_window": True, "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            "head width of its own": {"head_dim": 20},
            "one expert per token": {"num_experts_per_tok": 1},
            "all experts for every token": {"num_experts_per_tok": 6},
            "large eps": {"rms_norm_eps": 1e-2},
        },
        "qwen3_moe": {
            "grouped heads, head norm, renormalised": {},
            "a key for every head": {"num_key_value_heads": 4},
            "bias": {"attention_bias": True},
            "tied": {"tie_word_embeddings": True},
            "not renormalised": {"norm_topk_prob": False},
            "dense first layer": {"mlp_only_layers": [0]},
            "every second layer sparse": {"decoder_sparse_step": 2},
            "all layers dense": {"num_experts": 0},
            "slides": {"use_sliding_window": True, "sliding_window": 33},
            "window of one block": {"use_sliding_window": True, "sliding_window": 128},
            "large eps": {"rms_norm_eps": 1e-2},
        },
        "mixtral": {
            "grouped heads": {},
            "a key for every head": {"num_key_value_heads": 4},
            "one key for all heads": {"num_key_value_heads": 1},
            "slides": {"sliding_window": 24},
            "sees itself and one before": {"sliding_window": 2},
            "head width of its own": {"head_dim": 8},
            "tied": {"tie_word_embeddings": True},
            "one expert per token": {"num_experts_per_tok": 1},
            "small odd vocabulary": {"vocab_size": 37},
        },
        "olmoe": {
            "grouped heads, norm over all heads": {},
            "a key for every head": {"num_key_value_heads": 4},
            "bias": {"attention_bias": True},
            "clips": {"clip_qkv": 0.4},
            "renormalised": {"norm_topk_prob": True},
            "tied": {"tie_word_embeddings": True},
            "large eps": {"rms_norm_eps": 1e-2},
        },
    }  # fmt: skip
    found = [Case(name, family, changes) for family, named in own.items() for name, changes in named.items()]
    heads = {
        "mixtral": {"head_dim": 12}
    }  # its config has no width of its own otherwise, and transformers trips over it
    for at, (name, rope) in enumerate((ROPE_KINDS | {"longrope": longrope(12)}).items()):
        family = list(own)[at % 4] if name != "longrope" else "mixtral"  # one code for all: each family gets two kinds
        found.append(Case(f"rope {name}", family, heads.get(family, {}) | {"rope_parameters": rope}))
    return found


CASES = {f"{case.family}: {case.name}": case for case in _cases()}
