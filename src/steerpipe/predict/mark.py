"""Whose routing a stored predictor is of, as far as its file tells, and whether that is the model at hand."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from steerpipe.core.errors import InputError
from steerpipe.predict.records import Geometry
from steerpipe.predict.routers import Routers

_TABLE = ("layers", "experts")
_ESTIMATOR = {"embedding": ("layers", "hidden"), "bias": _TABLE}
_AXES: Mapping[str, Mapping[str, tuple[str | None, ...]]] = {  # by kind and tensor; None: says nothing of the model
    "frequency": {"rates": _TABLE},
    "previous": {"stays": _TABLE},
    "transition": {"prior": _TABLE},
    "affinity": {"rates": _TABLE},
    "lookahead": {"calibration.scale": (None, "layers"), "vectors": ("layers", "experts", "hidden")},
    "estimator": {f"network.{name}": axes for name, axes in _ESTIMATOR.items()},
    "hybrid": {f"estimator.network.{name}": axes for name, axes in _ESTIMATOR.items()},
    "preattention": {"network.first": ("layers", None, "hidden"), "network.second": ("layers", "experts", None)},
    "head": {"network.up": ("layers", "experts", None)},
    "blend": {"weights": ("layers", None)},
}


@dataclass(frozen=True, slots=True)
class ModelMark:
    """What tells a model from others; None: not known."""

    layers: int | None = None  # with experts
    experts: int | None = None  # of a layer
    top_k: int | None = None
    hidden: int | None = None
    weights: str | None = None  # digest of the checkpoint, whatever it was packed in

    @classmethod
    def of(cls, geometry: Geometry, digest: str | None = None) -> Self:
        """`digest` as in a trace's header: of a pack it has the formats behind a dash."""
        return cls(**asdict(geometry), weights=None if digest is None else digest.partition("-")[0])

    @classmethod
    def of_routers(cls, routers: Routers) -> Self:
        return cls(routers.layers, routers.experts, routers.top_k, routers.hidden)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """TypeError: not what `as_json` gave."""
        found = cls(**raw)
        for name, value in raw.items():
            if type(value) is not (str if name == "weights" else int):
                raise TypeError(f"{name} of the model is {value!r}")
        return found

    def as_json(self) -> dict[str, int | str]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def mark_in(kind: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelMark:
    """As the shapes of a predictor's tensors tell. KeyError or TypeError: a config that is none."""
    sizes: dict[str, Any] = {}
    for name, axes in _AXES.get(kind, {}).items():
        shape = tensors[name].shape if name in tensors else ()
        if len(shape) == len(axes):
            sizes |= {axis: size for axis, size in zip(axes, shape, strict=True) if axis is not None}
    found = ModelMark(**sizes)
    if kind == "trajectory":
        return replace(found, experts=config["experts"])
    if kind == "head" and found.experts is not None and "network.down" in tensors:
        return replace(found, hidden=_head_hidden(config["inputs"], tensors["network.down"], found.experts))
    if kind == "blend":
        return _completed(found, [_part_mark(number, part, tensors) for number, part in enumerate(config["parts"])])
    return found


def _part_mark(number: int, part: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelMark:
    prefix = f"{number}."
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return mark_in(part["kind"], part["config"], own)


def _completed(found: ModelMark, others: Iterable[ModelMark]) -> ModelMark:
    """What `found` does not know, the first of `others` that does."""
    known: dict[str, Any] = {}
    for each in (found, *others):
        known = each.as_json() | known
    return ModelMark(**known)


def _head_hidden(inputs: list[str], down: Tensor, experts: int) -> int | None:
    """See `head.input_width`."""
    if down.dim() != 3:
        return None
    width = down.shape[2]
    of_experts = sum(each in ("gates", "previous_experts") for each in inputs)
    return (width - of_experts * experts) // (1 + ("previous_residual" in inputs))


def check_mark(path: Path, made_for: ModelMark, here: ModelMark) -> None:
    """InputError: the file is of another model, and would index past its tables or answer nonsense."""
    known = [
        field.name
        for field in fields(ModelMark)
        if getattr(made_for, field.name) is not None and getattr(here, field.name) is not None
    ]
    differing = [name for name in known if getattr(made_for, name) != getattr(here, name)]
    if not differing:
        return
    told = known if differing == ["weights"] else [name for name in known if name != "weights"]
    raise InputError(
        f"{path} is of a model with {_words(made_for, told)}; this one has {_words(here, told)}",
        fix="remove it, or train one for this model",
    )


def _words(mark: ModelMark, told: list[str]) -> str:
    units = {"layers": "MoE layers", "experts": "experts", "top_k": "of them routed", "hidden": "hidden"}
    said = [f"{getattr(mark, name)} {unit}" for name, unit in units.items() if name in told]
    return ", ".join([*said, f"weights {mark.weights}"] if "weights" in told else said)
