"""Tiny checkpoint folders, written without transformers' models: a test copies one and damages it."""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from steerpipe.model.checkpoint import read_spec
from steerpipe.model.families import FAMILIES
from steerpipe.model.tensors import dense_tensors, expert_tensors
from tests.engine.tiny_tokenizers import byte_level, save

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
VOCAB = 272  # the byte-level tokenizer has 268; released models pad their embeddings too

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "rope_scaling": None, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "float32", "eos_token_id": 2, "bos_token_id": 1, "num_experts_per_tok": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        **_COMMON, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
        "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2, "norm_topk_prob": False,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "qwen3_moe": {
        **_COMMON, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 2, "attention_bias": False,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "mixtral": {**_COMMON, "num_local_experts": 4, "sliding_window": None},
    "olmoe": {**_COMMON, "num_experts": 4, "norm_topk_prob": False, "clip_qkv": None, "attention_bias": False},
}  # fmt: skip
for _name, _config in CONFIGS.items():
    _config |= {"model_type": _name, "architectures": [FAMILIES[_name].architecture]}


def build(folder: Path, family: str = "qwen3_moe", *, template: str | None = TEMPLATE) -> Path:
    """A whole checkpoint in one file, with seeded weights and a byte-level tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIGS[family])
    save_file(tensors(family), folder / "model.safetensors", metadata={"format": "pt"})
    save(byte_level(), folder, template)
    return folder


def tensors(family: str) -> dict[str, torch.Tensor]:
    spec, names = read_spec(FAMILIES[family], CONFIGS[family], "config.json"), FAMILIES[family].names
    seeded = torch.Generator().manual_seed(7)
    shapes = dense_tensors(spec, names) | expert_tensors(spec, names)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=seeded) * 0.3
        for name, shape in sorted(shapes.items())
    }


def shard(folder: Path, count: int = 2) -> dict[str, str]:
    """Splits model.safetensors into shards with an index; returns the weight map."""
    header, data = split(folder / "model.safetensors")
    header.pop("__metadata__", None)
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    weight_map = {name: files[i % count] for i, name in enumerate(sorted(header))}
    for file in files:
        mine, blob = {}, b""
        for name in sorted(n for n, f in weight_map.items() if f == file):
            begin, end = header[name]["data_offsets"]
            mine[name] = header[name] | {"data_offsets": [len(blob), len(blob) + end - begin]}
            blob += data[begin:end]
        join(folder / file, mine, blob)
    (folder / "model.safetensors").unlink()
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Mapping[str, object]) -> None:
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": dict(weight_map)})


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(file: Path, header: object, data: bytes) -> None:
    """Writes a safetensors file whose header is taken as it is, true or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_config(folder: Path, **changes: object) -> None:
    edit_json(folder / "config.json", **changes)


def edit_json(file: Path, **changes: object) -> None:
    """Puts values in; `...` takes the key out."""
    found = json.loads(file.read_text()) | changes
    write_json(file, {key: value for key, value in found.items() if value is not ...})


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2))


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))
