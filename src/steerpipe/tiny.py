"""Tiny checkpoints of every family, written by transformers itself: random weights, real files.

For demonstrations and tests. A byte tokenizer goes with them, so that any text can be fed in. Random weights
route degenerately: these models show that numbers are right, never what a cache or a predictor is worth.
"""

from pathlib import Path
from typing import Any

_SHAPE = {
    "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "num_experts_per_tok": 2, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 96,
        "shared_expert_intermediate_size": 64, "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 96, "head_dim": 32, "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 8, "intermediate_size": 32, "sliding_window": 24},
    "olmoe": {"num_experts": 8, "intermediate_size": 32, "clip_qkv": 2.0},
}  # fmt: skip
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FAMILIES = tuple(_OF_FAMILY)


def write_tiny(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> None:
    """Writes config, weights and tokenizer of a seeded random model. `overrides` replace config keys."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(_SHAPE | _OF_FAMILY[family] | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():  # transformers leaves norms at 1 and biases at 0
            if name.endswith(("norm.weight", "bias")):
                torch.nn.init.normal_(parameter, 0.0 if name.endswith("bias") else 1.0, 0.2)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder)


def write_byte_tokenizer(folder: Path) -> None:
    """One token per byte after four special ones, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|unused|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)
