"""One file holds a run: every tensor of model and optimiser, and where the run stands, in a safetensors header.

The file is written beside its name and renamed, so a kill leaves the old checkpoint or the new one. Nothing is pickled.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from recipes.nano.config import TrainPlan, plain
from recipes.nano.model import Decoder
from recipes.nano.optimizer import MuonAdamW

CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True)
class Progress:
    """Where a run stands: the next step is `step`, and takes batch `batch` of `epoch`."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0  # spent in steps, over all pieces


def save_checkpoint(folder: Path, model: Decoder, optimizer: MuonAdamW, plan: TrainPlan, progress: Progress) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()} | optimizer.tensors()
    header = {"shape": plain(model.shape), "plan": plain(plan), "progress": asdict(progress)}
    partial = folder / f"{CHECKPOINT}.partial"
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        partial,
        {name: json.dumps(value, sort_keys=True) for name, value in header.items()},
    )
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(partial, folder / CHECKPOINT)


@torch.no_grad()
def load_checkpoint(folder: Path, model: Decoder, optimizer: MuonAdamW, plan: TrainPlan) -> Progress | None:
    """Restore in place and return where the run stood; None without a checkpoint. Another shape or plan is an error."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as stored:
        header = {name: json.loads(value) for name, value in stored.metadata().items()}
        _require_same(path, "shape", header["shape"], plain(model.shape))
        _require_same(path, "plan", header["plan"], plain(plan))
        targets = {f"model.{name}": p for name, p in model.named_parameters()} | optimizer.tensors()
        for name, tensor in targets.items():
            tensor.copy_(stored.get_tensor(name))
    progress = Progress(**header["progress"])
    optimizer.steps = progress.step
    return progress


def _require_same(path: Path, what: str, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = {name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name)}
    if different:
        changes = ", ".join(f"{name} {stored.get(name)} -> {wanted.get(name)}" for name in sorted(different))
        raise ValueError(f"{path} belongs to another {what} ({changes}); use another --out, or delete the file")
