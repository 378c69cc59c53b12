"""The config.json of released models, as their repositories have them, and what their weight indexes say.

A bool is written as JSON has it; nothing is left out, because each key must be understood, fixed or inert.
"""

from dataclasses import dataclass
from typing import Any

QWEN15_MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
    "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe", "num_attention_heads": 16,
    "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.39.0.dev0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False, "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
QWEN15_MOE_CHAT = QWEN15_MOE | {"max_position_embeddings": 32768}

QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B_BASE = QWEN3_30B | {"eos_token_id": 151643, "max_position_embeddings": 32768}
QWEN3_30B_2507 = QWEN3_30B | {"max_position_embeddings": 262144, "rope_theta": 10000000}
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 94, "moe_intermediate_size": 1536,
    "num_attention_heads": 64, "num_hidden_layers": 94,
}  # fmt: skip
QWEN3_CODER_30B = {
    key: value for key, value in QWEN3_30B_2507.items() if key not in ("attention_bias", "bos_token_id")
} | {
    "intermediate_size": 5472, "max_window_layers": 28, "qkv_bias": False, "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0, "use_qk_norm": True,
}  # fmt: skip
QWEN3_30B_2507_SAVED_BY_5: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
    "max_position_embeddings": 262144, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "num_local_experts": 128, "output_router_logits": False,
    "pad_token_id": None, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"}, "router_aux_loss_coef": 0.001,
    "sliding_window": None, "tie_word_embeddings": False, "transformers_version": "5.7.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip

MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip

OLMOE_0924: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
    "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
}  # fmt: skip
OLMOE_0924_INSTRUCT = OLMOE_0924 | {"_name_or_path": "allenai/OLMoE-1B-7B-0924-SFT", "use_cache": False}
OLMOE_0125 = OLMOE_0924 | {
    "_name_or_path": "step23842-hf", "torch_dtype": "float32", "transformers_version": "4.48.1"
}  # fmt: skip


@dataclass(frozen=True)
class Released:
    """A model, and its index: how many tensors, and their bytes in bfloat16 (`metadata.total_size`)."""

    config: dict[str, Any]
    tensors: int
    total_size: int


RELEASED = {
    "Qwen1.5-MoE-A2.7B": Released(QWEN15_MOE, 4_659, 28_631_568_384),
    "Qwen1.5-MoE-A2.7B-Chat": Released(QWEN15_MOE_CHAT, 4_659, 28_631_568_384),
    "Qwen3-30B-A3B": Released(QWEN3_30B, 18_867, 61_064_245_248),
    "Qwen3-30B-A3B-Base": Released(QWEN3_30B_BASE, 18_867, 61_064_245_248),
    "Qwen3-30B-A3B-Instruct-2507": Released(QWEN3_30B_2507, 18_867, 61_064_245_248),
    "Qwen3-30B-A3B-Thinking-2507, saved by transformers 5": Released(QWEN3_30B_2507_SAVED_BY_5, 18_867, 61_064_245_248),
    "Qwen3-Coder-30B-A3B-Instruct": Released(QWEN3_CODER_30B, 18_867, 61_064_245_248),
    "Qwen3-235B-A22B": Released(QWEN3_235B, 36_945, 470_187_269_120),
    "Mixtral-8x7B-v0.1": Released(MIXTRAL_8X7B, 995, 93_405_585_408),
    "OLMoE-1B-7B-0924": Released(OLMOE_0924, 3_219, 13_838_323_712),
    "OLMoE-1B-7B-0924-Instruct": Released(OLMOE_0924_INSTRUCT, 3_219, 13_838_323_712),
    "OLMoE-1B-7B-0125": Released(OLMOE_0125, 3_219, 13_838_323_712),
}
