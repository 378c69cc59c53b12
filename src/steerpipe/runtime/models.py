"""From a model's name to something that can be read: spec, dense weights and experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from steerpipe.core.errors import InputError
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.model.families.base import Family
from steerpipe.model.hub import locate
from steerpipe.model.spec import ModelSpec


class ModelSource(Protocol):
    """A checkpoint or a pack."""

    @property
    def folder(self) -> Path: ...
    @property
    def family(self) -> Family: ...
    @property
    def spec(self) -> ModelSpec: ...
    def read_dense(self) -> Mapping[str, Tensor]: ...
    def read_expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]: ...


def open_model(model: str | Path | None) -> ModelSource:
    """A folder or a hub name. May fetch from the network; reads headers only."""
    if model is None:
        raise InputError("no model was named", fix="give a checkpoint folder or a hub name such as owner/model")
    return open_checkpoint(locate(str(model)))
