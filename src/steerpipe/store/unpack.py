"""Pack → Hugging Face folder, which transformers loads."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steerpipe.core.errors import PackError
from steerpipe.model.checkpoint import read_json
from steerpipe.model.tensors import dense_tensors, expert_names, expert_tensors
from steerpipe.store.dense import SCALE, restore
from steerpipe.store.files import check_room, disk_errors, write_file
from steerpipe.store.manifest import DENSE, EXPERTS
from steerpipe.store.progress import Progress, silent
from steerpipe.store.reader import Pack, open_pack
from steerpipe.store.tensorfile import PlannedTensor, TensorFile, file_bytes, in_file_order
from steerpipe.store.workspace import Workspace

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class UnpackReport:
    """What `unpack` made, JSON-able."""

    folder: str
    dtype: str  # what config.json says of the weights
    tensors: int
    total_bytes: int


def unpack(folder: Path, out: Path, progress: Progress | None = None) -> UnpackReport:
    """Writes `out` whole or not at all. The weights are those of the pack to the last bit: their own dtype if packing
    changed nothing, float32 otherwise, because it holds every dequantised value exactly. Blocks."""
    pack = open_pack(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PackError(f"{out} already exists", fix="choose another name, or remove it first")
    planned = _plan(pack)
    copies = {name: record for name, record in pack.manifest.files.items() if name not in (EXPERTS, DENSE)}
    total_bytes = file_bytes(planned)
    check_room(out, total_bytes + sum(record.size_bytes for record in copies.values()))
    config = _config(pack)
    with disk_errors(out, resumes=False), Workspace(out, f"unpack {pack.manifest.source}", (WEIGHTS, *copies)) as work:
        _write_weights(pack, work.folder / WEIGHTS, planned, progress or silent)
        for name in copies:
            write_file(work.folder / name, (folder / name).read_bytes())
        write_file(work.folder / "config.json", json.dumps(config, indent=2).encode() + b"\n")
        work.finish()
    return UnpackReport(str(out), str(config.get("dtype", config.get("torch_dtype"))), len(planned), total_bytes)


def _plan(pack: Pack) -> list[PlannedTensor]:
    names = pack.family.names
    exact = pack.manifest.lossless
    expert_dtype = getattr(torch, pack.manifest.expert_format.value) if exact else torch.float32
    planned = [PlannedTensor(name, expert_dtype, shape) for name, shape in expert_tensors(pack.spec, names).items()]
    for name, shape in dense_tensors(pack.spec, names).items():
        planned.append(PlannedTensor(name, pack.dense_entries[name].dtype if exact else torch.float32, shape))
    return in_file_order(planned)


def _config(pack: Pack) -> dict[str, Any]:
    """The pack's config.json; where weights became float32 it says so, under the key that it used before."""
    config = read_json(pack.folder / "config.json")
    if not pack.manifest.lossless:
        spelled = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        config.update(dict.fromkeys(spelled, "float32"))
    return config


def _write_weights(pack: Pack, file: Path, planned: list[PlannedTensor], progress: Progress) -> None:
    dtypes = {tensor.name: tensor.dtype for tensor in planned}
    done_bytes, total_bytes = 0, sum(tensor.size_bytes for tensor in planned)
    with TensorFile(file, planned) as out:
        for name, weight in _weights(pack):
            out.write(name, weight.to(dtypes[name]))
            done_bytes += weight.numel() * dtypes[name].itemsize
            progress(done_bytes, total_bytes)


def _weights(pack: Pack) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name on disk, one dense tensor or one expert in memory at a time."""
    names = pack.family.names
    for name in dense_tensors(pack.spec, names):
        parts = [part for part in (name, name + SCALE) if part in pack.dense_entries]
        yield name, restore({part: pack.read_stored(part) for part in parts}, name)
    for each in pack.manifest.classes:
        for layer, expert in pack.manifest.rows(each):
            full = expert_names(names, layer, expert)
            yield from zip((full.gate, full.up, full.down), pack.read_expert(layer, expert), strict=True)
