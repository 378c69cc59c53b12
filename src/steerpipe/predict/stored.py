"""A predictor that can be kept: what it is (`config`), what it has learnt (`tensors`), and how it came about."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from steerpipe.core.errors import ConfigError
from steerpipe.predict.mark import ModelMark
from steerpipe.predict.protocol import Cost
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Sight


@dataclass(frozen=True, slots=True)
class Training:
    """How a predictor came about, JSON-able."""

    tokens: int
    prompts: int
    seconds: float
    device: str
    seed: int
    model: str  # which one's routing it was


class StoredPredictor(ABC):
    """A RoutingPredictor whose state is named tensors. A file holds all of it but the model's routers."""

    kind: ClassVar[str]  # names the class in files
    horizons: Sequence[int]
    training: Training | None = None
    seen: frozenset[str] | None = None  # digests of the prompts that it learnt from; None: nobody noted them
    mark: ModelMark | None = None  # of the model that it was trained for; None: nobody noted it
    routers: Routers | None = None  # of the model, where the predictor applies them

    @property
    def name(self) -> str:
        return self.kind

    @abstractmethod
    def probabilities(self, sight: Sight) -> Tensor: ...

    @abstractmethod
    def cost(self) -> Cost: ...

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """JSON-able; with `tensors` and the routers all that `restore` needs."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]: ...

    @classmethod
    @abstractmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], routers: Routers | None) -> Self: ...

    def to(self, device: torch.device | str) -> Self:
        """The same predictor with its tensors on `device`."""
        routers = None if self.routers is None else self.routers.to(device)
        moved = type(self).restore(self.config(), {k: v.to(device) for k, v in self.tensors().items()}, routers)
        moved.training, moved.seen, moved.mark = self.training, self.seen, self.mark
        return moved

    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors().values())


def needed(routers: Routers | None, kind: str) -> Routers:
    """`routers`, which a predictor of `kind` cannot do without."""
    if routers is None:
        raise ConfigError(
            f"a predictor of kind {kind} applies the model's own routers, and none were given",
            fix="name the model that it was trained for",
        )
    return routers
