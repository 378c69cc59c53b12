"""A Hugging Face folder, checked as a whole before anything is loaded."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from steerpipe.core.errors import CheckpointError, DamagedFileError, TensorError, UnsupportedConfigError
from steerpipe.model.families import find_family
from steerpipe.model.families.base import Family
from steerpipe.model.keys import ConfigKeys
from steerpipe.model.safetensors import TensorEntry, read_header, read_tensor
from steerpipe.model.spec import ModelSpec
from steerpipe.model.tensors import Shape, dense_tensors, expert_names, expert_tensors

_FLOATS = ("float32", "bfloat16", "float16")
_MOST_EXPERTS = 200_000  # of all layers; ten times what is released, and their names still fit in 100 MB


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
    family, spec = read_folder_spec(folder)
    entries = read_entries(folder)
    head = entries.pop(f"{family.names.head}.weight", None) if spec.tied_embeddings else None
    _compare(dense_tensors(spec, family.names) | expert_tensors(spec, family.names), entries, folder)
    if head is not None:  # some writers store the head as well
        _check_tied(head, entries[f"{family.names.embed}.weight"], folder)
    return Checkpoint(folder, family, spec, entries)


def read_folder_spec(folder: Path) -> tuple[Family, ModelSpec]:
    """What a folder's config.json says the model is, whether the weights lie beside it as a checkpoint or as a pack."""
    raw = read_json(folder / "config.json")
    family = find_family(str(raw.get("model_type", "unnamed")), str(folder))
    return family, read_spec(family, raw, str(folder / "config.json"))


def read_spec(family: Family, raw: Mapping[str, Any], where: str) -> ModelSpec:
    """The family's reading of a config.json, with every key accounted for."""
    refuse_quantised(raw, where)
    _check_architecture(family, raw, where)
    keys = ConfigKeys(raw, where)
    spec = family.read(keys)
    keys.finish()
    experts = sum(spec.moe(layer).experts for layer in spec.moe_layers)
    if experts > _MOST_EXPERTS:
        raise UnsupportedConfigError(
            f"{where} asks for {experts} experts in {len(spec.moe_layers)} layers",
            fix="no model has so many: take config.json from the model's own repository",
        )
    if spec.stored_dtype not in _FLOATS:
        raise CheckpointError(
            f"{where} says the weights are {spec.stored_dtype}", fix=f"only {', '.join(_FLOATS)} can be loaded"
        )
    return spec


def refuse_quantised(raw: Mapping[str, Any], where: str) -> None:
    """Raises where a config.json says that the weights are quantised in somebody else's format."""
    for key in ("quantization_config", "quantization", "compression_config"):
        said = raw.get(key)
        if said:
            method = said.get("quant_method", "unnamed") if isinstance(said, dict) else said
            raise UnsupportedConfigError(
                f"{where} has a {key} ({method}): the weights are quantised by others, which is not computed here",
                fix="take the release in bfloat16 or float16 that the quantised one was made from",
            )


def _check_architecture(family: Family, raw: Mapping[str, Any], where: str) -> None:
    """Another class of the same model type computes something else from it: a score, or whatever its author wrote."""
    said = raw.get("architectures")
    if said and said != [family.architecture]:
        shown = ", ".join(said) if isinstance(said, list) and all(isinstance(s, str) for s in said) else repr(said)
        raise UnsupportedConfigError(
            f"{where} says that the model is a {shown}; of {family.model_type}, only {family.architecture} is computed",
            fix="take the release for text generation, or run this model through transformers",
        )


def is_there(file: Path) -> bool:
    """Whether a file exists. A link whose target is gone is an error: half of a download cache was deleted."""
    try:
        if file.exists() or not file.is_symlink():
            return file.exists()
    except OSError:  # a name that no file can have, or a folder that may not be looked into
        return False
    raise CheckpointError(
        f"{file} is a link to {os.readlink(file)}, which is not there",
        fix="the download cache is incomplete: remove this folder and fetch the model again",
    )


def read_json(file: Path) -> dict[str, Any]:
    try:
        is_there(file)
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file.parent} has no {file.name}",
            fix="give the folder of a Hugging Face checkpoint, with its config.json",
        ) from None
    except (ValueError, RecursionError) as problem:  # not UTF-8, not JSON, thousands of digits, or nested too deep
        raise DamagedFileError(f"{file} is not JSON: {problem}", fix="download or copy the file again") from None
    except OSError as problem:
        raise CheckpointError(
            f"{file} cannot be read: {problem.strerror}", fix="check that it is a file and its permissions"
        ) from None
    if not isinstance(value, dict):
        raise DamagedFileError(f"{file} is not a JSON object", fix="download or copy the file again")
    return value


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder: of its one file, or of the shards that its index names."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not is_there(index):
        return read_header(whole) if is_there(whole) else _no_weights(folder)
    weight_map = _read_index(index)
    if whole.name not in weight_map.values() and is_there(whole):
        raise CheckpointError(
            f"{folder} has both {whole.name} and an index of other files, and they may differ", fix="remove one of them"
        )
    entries: dict[str, TensorEntry] = {}
    for file in _shards(index, weight_map):
        for name, entry in read_header(file).items():
            if name in entries:
                raise TensorError(
                    f"{name} is in {entries[name].file.name} and in {file.name} of {folder}",
                    fix="the shards come from different downloads: fetch all of them again",
                )
            entries[name] = entry
    for name in sorted(weight_map.keys() | entries.keys()):
        said, found = weight_map.get(name, "no file"), entries[name].file.name if name in entries else "no file"
        if said != found:
            raise TensorError(
                f"{index} says that {name} is in {said}, but it is in {found}",
                fix="the index and the shards come from different downloads: fetch all of them again",
            )
    return entries


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise DamagedFileError(
            f"{index} has no weight_map from tensors to files", fix="download or copy the file again"
        )
    return weight_map


def _shards(index: Path, weight_map: Mapping[str, str]) -> list[Path]:
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if name in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(name)]
    if outside:
        raise DamagedFileError(
            f"{index} points outside its folder: {outside[0]!r}", fix="take the index from a source you trust"
        )
    missing = [name for name in names if not is_there(index.parent / name)]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:4])}",
            fix="the download is incomplete: fetch the model again",
        )
    return [index.parent / name for name in names]


def _no_weights(folder: Path) -> NoReturn:
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


def _check_tied(head: TensorEntry, embed: TensorEntry, folder: Path) -> None:
    """Reads both. transformers computes with a stored head that differs, whatever config.json says; we refuse it."""
    if head.dtype != embed.dtype or not torch.equal(read_tensor(head), read_tensor(embed)):
        raise TensorError(
            f"config.json of {folder} ties the head to the embedding, but the files hold a head that differs from it",
            fix="set tie_word_embeddings to false in config.json if the stored head is the right one",
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
