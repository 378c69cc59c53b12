"""Predictors on disk: one safetensors file each, its kind and config in the metadata. Nothing is ever unpickled."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from steerpipe.core.errors import DamagedFileError, InputError
from steerpipe.core.whole_file import write_whole
from steerpipe.predict.kinds import class_of
from steerpipe.predict.mark import ModelMark, check_mark, mark_in
from steerpipe.predict.routers import Routers
from steerpipe.predict.seen import pack_digests, unpack_digests
from steerpipe.predict.storage import Storage, restored, stored
from steerpipe.predict.stored import StoredPredictor, Training

SCHEMA = 1


def save(predictor: StoredPredictor, path: Path, storage: Storage = Storage.EXACT) -> int:
    """Writes `path` whole or not at all, and returns its bytes."""
    said = {"schema": SCHEMA, "kind": predictor.kind, "config": predictor.config(), "training": None}
    if predictor.training is not None:
        said["training"] = asdict(predictor.training)
    if predictor.seen is not None:
        said["seen"] = pack_digests(predictor.seen)
    if predictor.mark is not None:
        said["model"] = predictor.mark.as_json()
    content = to_bytes(stored(predictor.tensors(), storage), {"steerpipe": json.dumps(said, sort_keys=True)})
    write_whole(path, content)
    return len(content)


def load(
    path: Path, routers: Routers | None = None, device: torch.device | str = "cpu", here: ModelMark | None = None
) -> StoredPredictor:
    """`routers` of the model that it was trained for, on `device`: needed by the kinds that apply them.

    InputError: it is of another model than `here`, or than the one whose routers these are.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder", fix="give one of the .safetensors files in it")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is not a dict
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", fix="train a predictor first: steerpipe train") from None
    except (SafetensorError, OSError) as problem:
        raise DamagedFileError(f"{path} is damaged: {problem}", fix="copy the file again, or train it again") from None
    said = _read_metadata(path, metadata)
    try:
        whole, mark = restored(tensors), ModelMark.from_json(said["model"]) if "model" in said else None
        _check_marks(path, (mark, mark_in(said["kind"], said["config"], whole)), routers, here)
        predictor = class_of(said["kind"]).restore(said["config"], whole, routers)
        predictor.mark = mark
        predictor.training = None if said["training"] is None else Training(**said["training"])
        predictor.seen = unpack_digests(said["seen"]) if "seen" in said else None
    except (KeyError, TypeError, ValueError, RuntimeError) as problem:
        raise DamagedFileError(
            f"{path} is no {said['kind']} predictor: {problem}", fix="copy the file again, or train it again"
        ) from None
    return predictor


def _read_metadata(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        said = json.loads(metadata["steerpipe"])
        schema = said["schema"]
        complete = {"kind", "config", "training"} <= said.keys()
    except (KeyError, TypeError, ValueError, AttributeError):
        complete, schema, said = False, None, {}
    if schema is not None and schema != SCHEMA:
        raise InputError(
            f"{path} has schema {schema}, this version reads {SCHEMA}", fix="train it again with this version"
        )
    if not complete:
        raise InputError(f"{path} is no predictor", fix="give a file that `steerpipe train` wrote")
    return dict(said)


def _check_marks(
    path: Path, found: Iterable[ModelMark | None], routers: Routers | None, here: ModelMark | None
) -> None:
    of_routers = None if routers is None else ModelMark.of_routers(routers)
    for made_for in found:
        for this in (of_routers, here):
            if made_for is not None and this is not None:
                check_mark(path, made_for, this)
