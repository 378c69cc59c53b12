"""A reuse forecast on disk: one safetensors file, 16-bit tensors, what it is in the metadata. Nothing is unpickled."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from steerpipe.core.errors import ConfigError, DamagedFileError, InputError
from steerpipe.core.whole_file import write_whole
from steerpipe.predict.mark import ModelMark, check_mark
from steerpipe.predict.reuse import ReuseForecast
from steerpipe.predict.stored import Training

KIND = "reuse"
NAME = "reuse.safetensors"  # in a folder of predictors
_SCHEMA = 1


def save_reuse(forecast: ReuseForecast, path: Path, training: Training, weights: str | None = None) -> int:
    """Writes `path` whole or not at all, and returns its bytes. `weights`: digest of the model's."""
    kept = {name: tensor.detach().half().cpu().contiguous() for name, tensor in forecast.tensors().items()}
    said = {"schema": _SCHEMA, "kind": KIND, "config": forecast.said(), "training": asdict(training)}
    if weights is not None:
        said["weights"] = weights
    content = to_bytes(kept, {"steerpipe": json.dumps(said, sort_keys=True)})
    write_whole(path, content)
    return len(content)


def load_reuse(path: Path, device: torch.device | str = "cpu", here: ModelMark | None = None) -> ReuseForecast:
    """In fp32. InputError: no reuse forecast, or of another model than `here`; DamagedFileError: it cannot be read."""
    if path.is_dir():
        raise InputError(f"{path} is a folder", fix=f"give the {NAME} in it")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is not a dict
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", fix="train one first: steerpipe train reuse") from None
    except (SafetensorError, OSError) as problem:
        raise DamagedFileError(f"{path} is damaged: {problem}", fix="copy the file again, or train it again") from None
    said = _said(path, metadata)
    try:
        forecast = ReuseForecast.restore(said["config"], tensors)
    except (KeyError, TypeError, ValueError, ConfigError) as problem:
        raise DamagedFileError(
            f"{path} is no reuse forecast: {problem}", fix="copy the file again, or train it again"
        ) from None
    if here is not None:
        config, weights = forecast.config, said.get("weights")
        made_for = ModelMark(config.layers, config.experts, hidden=config.hidden, weights=weights)
        check_mark(path, made_for, here)
    return forecast


def _said(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    try:
        said = json.loads(metadata["steerpipe"])
        schema, kind = said["schema"], said["kind"]
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path} is no reuse forecast", fix="give a file that `steerpipe train reuse` wrote") from None
    if kind != KIND or schema != _SCHEMA:
        raise InputError(
            f"{path} is of kind {kind!r}, schema {schema}; wanted is {KIND!r}, schema {_SCHEMA}",
            fix="give a reuse forecast, trained with this version",
        )
    return dict(said)
