"""To and from a Hugging Face folder that transformers loads as Qwen2MoeForCausalLM without custom code."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.nano.config import CHAT_END_ID, END_OF_TEXT_ID, ModelShape
from recipes.nano.model import Block, Decoder, DenseMlp, MoeMlp
from steerpipe.model.tensors import expert_names
from steerpipe.store.reader import is_pack, open_pack

# Chosen by `python -m recipes.nano answers` on 80 chat openers: benchmarks/notes/2026-11-15-nano-answers.md.
GENERATION_DEFAULTS = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 0,
    "frequency_penalty": 0.6,  # over the answer alone: a repetition penalty also counts the prompt's <|im_end|>
    "presence_penalty": 0.6,
    "max_new_tokens": 256,
}
CARD = Path(__file__).parent / "card.md"


def config_json(shape: ModelShape) -> dict[str, Any]:
    """The shape in transformers' words. A dense model lists every layer in `mlp_only_layers` and has no experts."""
    config: dict[str, Any] = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_width or shape.shared_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "qkv_bias": True,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [] if shape.experts else list(range(shape.layers)),
        "eos_token_id": [CHAT_END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }
    if shape.experts:
        config |= {"moe_intermediate_size": shape.expert_width, "shared_expert_intermediate_size": shape.shared_width}
    return config


def shape_of(config: dict[str, Any]) -> ModelShape:
    """The inverse of `config_json`."""
    dense = not config["num_experts"]
    return ModelShape(
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        expert_width=config.get("moe_intermediate_size", 0),
        shared_width=config.get("shared_expert_intermediate_size", 0),
        dense_width=config["intermediate_size"] if dense else 0,
        rope_theta=config["rope_theta"],
        norm_epsilon=config["rms_norm_eps"],
    )


def named_views(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its name on disk, as a view of the parameter: read it to export, write it to import."""
    yield "model.embed_tokens.weight", model.embedding
    yield "model.norm.weight", model.norm
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        for name, view in _block_views(block):
            yield f"model.layers.{number}.{name}", view


def _block_views(block: Block) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", block.attention_norm
    yield "post_attention_layernorm.weight", block.mlp_norm
    for part, (weight, bias) in zip("qkv", zip(block.qkv, block.qkv_bias.chunk(3), strict=True), strict=True):
        yield f"self_attn.{part}_proj.weight", weight
        yield f"self_attn.{part}_proj.bias", bias
    yield "self_attn.o_proj.weight", block.out
    if isinstance(block.mlp, MoeMlp):
        yield "mlp.gate.weight", block.mlp.router
        yield "mlp.shared_expert_gate.weight", block.mlp.shared_gate
        yield from _mlp_views("mlp.shared_expert", block.mlp.shared.gate_up, block.mlp.shared.down)
        for expert, (gate_up, down) in enumerate(zip(block.mlp.gate_up, block.mlp.down, strict=True)):
            yield from _mlp_views(f"mlp.experts.{expert}", gate_up, down)
    else:
        assert isinstance(block.mlp, DenseMlp)
        yield from _mlp_views("mlp", block.mlp.gate_up, block.mlp.down)


def _mlp_views(prefix: str, gate_up: Tensor, down: Tensor) -> Iterator[tuple[str, Tensor]]:
    gate, up = gate_up
    yield f"{prefix}.gate_proj.weight", gate
    yield f"{prefix}.up_proj.weight", up
    yield f"{prefix}.down_proj.weight", down


@torch.no_grad()
def export_model(model: Decoder, tokenizer_folder: Path, out: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the folder; the weights last and by rename, so that a folder with weights is whole."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder / name, out / name)
    shutil.copyfile(CARD, out / "README.md")
    config = config_json(model.shape) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    generation = GENERATION_DEFAULTS | {"eos_token_id": [CHAT_END_ID, END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {name: view.to("cpu", dtype, copy=True).contiguous() for name, view in named_views(model)}
    save_file(tensors, out / "model.safetensors.partial", {"format": "pt"})
    os.replace(out / "model.safetensors.partial", out / "model.safetensors")


@torch.no_grad()
def import_model(folder: Path, device: torch.device) -> Decoder:
    """A folder written by `export_model`, or a pack of one (its codes times its scales), as a model in float32."""
    model = Decoder(shape_of(json.loads((folder / "config.json").read_text())))
    tensors = _pack_tensors(folder) if is_pack(folder) else load_file(folder / "model.safetensors")
    for name, view in named_views(model):
        view.copy_(tensors[name])
    return model.to(device).eval()


def _pack_tensors(folder: Path) -> dict[str, Tensor]:
    pack = open_pack(folder)
    tensors = pack.read_dense()
    for layer in pack.spec.moe_layers:
        for expert in range(pack.spec.moe(layer).experts):
            names = expert_names(pack.family.names, layer, expert)
            tensors.update(zip((names.gate, names.up, names.down), pack.read_expert(layer, expert), strict=True))
    return tensors
