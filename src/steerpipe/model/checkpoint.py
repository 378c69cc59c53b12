"""A Hugging Face folder, checked as a whole before anything is loaded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from steerpipe.core.errors import CheckpointError, DamagedFileError, TensorError
from steerpipe.model.families import find_family
from steerpipe.model.families.base import Family
from steerpipe.model.keys import ConfigKeys
from steerpipe.model.safetensors import TensorEntry, read_header, read_tensor
from steerpipe.model.spec import ModelSpec
from steerpipe.model.tensors import Shape, dense_tensors, expert_names, expert_tensors

_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened folder. Nothing is in memory but the headers; every tensor of the spec is known to be there."""

    folder: Path
    family: Family
    spec: ModelSpec
    entries: Mapping[str, TensorEntry]

    def read(self, name: str) -> Tensor:
        """Reads the disk. The tensor has the stored dtype and owns its memory."""
        return read_tensor(self.entries[name])

    def read_dense(self) -> dict[str, Tensor]:
        """All dense weights by their names on disk; no expert is touched."""
        return {name: self.read(name) for name in dense_tensors(self.spec, self.family.names)}

    def read_expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate [I, H], up [I, H], down [H, I] in the stored dtype. Reads the disk."""
        names = expert_names(self.family.names, layer, expert)
        return self.read(names.gate), self.read(names.up), self.read(names.down)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads config and headers, and stops at the first thing that is not as the architecture says."""
    raw = read_json(folder / "config.json")
    model_type = str(raw.get("model_type", "unnamed"))
    family = find_family(model_type, str(folder))
    spec = read_spec(family, raw, str(folder / "config.json"))
    entries = _read_entries(folder)
    if spec.tied_embeddings:  # some writers store the head as well; it is the embedding
        entries.pop(f"{family.names.head}.weight", None)
    _compare(dense_tensors(spec, family.names) | expert_tensors(spec, family.names), entries, folder)
    return Checkpoint(folder, family, spec, entries)


def read_spec(family: Family, raw: Mapping[str, Any], where: str) -> ModelSpec:
    """The family's reading of a config.json, with every key accounted for."""
    keys = ConfigKeys(raw, where)
    spec = family.read(keys)
    keys.finish()
    if spec.stored_dtype not in _FLOATS:
        raise CheckpointError(
            f"{where} says the weights are {spec.stored_dtype}", fix=f"only {', '.join(_FLOATS)} can be loaded"
        )
    return spec


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file.parent} has no {file.name}",
            fix="give the folder of a Hugging Face checkpoint, with its config.json",
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise DamagedFileError(f"{file} is not JSON: {problem}", fix="download or copy the file again") from None
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}", fix="check its permissions") from None
    if not isinstance(value, dict):
        raise DamagedFileError(f"{file} is not a JSON object", fix="download or copy the file again")
    return value


def _read_entries(folder: Path) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for file in _shards(folder):
        for name, entry in read_header(file).items():
            if name in entries:
                raise TensorError(f"{name} is in two files of {folder}", fix="remove the older shards from the folder")
            entries[name] = entry
    return entries


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise DamagedFileError(f"{index} has no weight_map", fix="download or copy the file again")
        files = [folder / name for name in sorted({str(v) for v in weight_map.values()})]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(files)} shards: {', '.join(missing[:4])}", fix="download them"
            )
        if any(file.parent != folder for file in files):
            raise DamagedFileError(f"{index} points outside its folder", fix="take the index from a source you trust")
        return files
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
    if pickles:
        raise CheckpointError(
            f"{folder} has only pickled weights ({pickles[0]}), which can run code and are never opened",
            fix="convert them with transformers: save_pretrained writes safetensors",
        )
    raise CheckpointError(
        f"{folder} has neither model.safetensors nor model.safetensors.index.json",
        fix="give a complete checkpoint folder",
    )


def _compare(expected: Mapping[str, Shape], entries: Mapping[str, TensorEntry], folder: Path) -> None:
    missing = sorted(expected.keys() - entries.keys())
    extra = sorted(name for name in entries.keys() - expected.keys() if not name.endswith("rotary_emb.inv_freq"))
    if missing:
        raise TensorError(
            f"{folder} lacks {len(missing)} tensors that its config.json promises, such as {missing[0]}",
            fix="the folder is incomplete or config.json belongs to another model: download both again",
        )
    if extra:
        raise TensorError(
            f"{folder} has {len(extra)} tensors that its config.json does not promise, such as {extra[0]}",
            fix="config.json belongs to another model, or the checkpoint has parts that this engine does not compute",
        )
    for name, shape in expected.items():
        entry = entries[name]
        if entry.shape != shape:
            raise TensorError(
                f"{name} has shape {list(entry.shape)}; config.json asks for {list(shape)}",
                fix="config.json and the weights belong to different models: download both again",
            )
        if not entry.dtype.is_floating_point:
            raise TensorError(f"{name} is stored as {entry.dtype}", fix="convert the checkpoint to bfloat16")
