"""Every predictor that `steerpipe train` knows, by name: material and options in, trained predictor out."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from steerpipe.core.errors import ConfigError
from steerpipe.predict.mark import ModelMark
from steerpipe.predict.preattention import Architecture as EarlyArchitecture
from steerpipe.predict.sight import Decision
from steerpipe.predict.stored import StoredPredictor, Training
from steerpipe.predict.trajectory_networks import Architecture
from steerpipe.predict.window import STEPS, Window
from steerpipe.train.blending import train_blend
from steerpipe.train.counts import count_affinity, count_frequency, count_previous, count_transition
from steerpipe.train.fit import Schedule
from steerpipe.train.losses import PreAttentionLoss
from steerpipe.train.material import Material
from steerpipe.train.progress import Progress, silent
from steerpipe.train.recipes import (
    has_shared,
    make_hybrid,
    train_defaults,
    train_estimator,
    train_head,
    train_lookahead,
    train_preattention,
)
from steerpipe.train.trajectories import train_trajectory


@dataclass(frozen=True, slots=True)
class Options:
    """What a person may choose; the defaults suit nano's size."""

    horizon: int = 1  # for the kinds that learn one horizon at a time
    steps: int = 2000
    rows: int = 2048
    learning_rate: float = 4e-3
    rank: int = 64  # of a head
    width: int = 1024  # of an estimator
    window: Window = Window.LAYERS
    history: int = STEPS  # layers or tokens of a window
    targets: Sequence[int] | None = None  # of the history networks; None: every layer
    parts: Sequence[StoredPredictor] = ()  # of a blend
    loss: PreAttentionLoss = PreAttentionLoss.RANKING  # of a pre-attention predictor
    seed: int = 0

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.steps, self.rows, self.learning_rate, seed=self.seed)


Trainer = Callable[[Material, Options, Progress], StoredPredictor]


def train(name: str, material: Material, options: Options, model: str, progress: Progress = silent) -> StoredPredictor:
    """Trains and remembers how. `model`: whose routing it is."""
    trainer = TRAINERS.get(name)
    if trainer is None:
        raise ConfigError(f"there is no predictor called {name!r}", fix=f"choose one of {', '.join(TRAINERS)}")
    start = time.monotonic()
    made = trainer(material, options, progress)
    if material.trace.device.type == "cuda":
        torch.cuda.synchronize()
    seconds, device = round(time.monotonic() - start, 2), str(material.trace.device.type)
    made.training = Training(material.trace.rows, material.prompts, seconds, device, options.seed, model)
    made.seen = _seen(material, options.parts)
    made.mark = ModelMark.of(material.trace.geometry, material.digest)
    return made


def _seen(material: Material, parts: Sequence[StoredPredictor]) -> frozenset[str] | None:
    """By the predictor and by its parts; None where one of them does not know."""
    each = [material.seen, *(part.seen for part in parts)]
    known = [seen for seen in each if seen is not None]
    return frozenset().union(*known) if len(known) == len(each) else None


def _history(architecture: Architecture) -> Trainer:
    def trainer(material: Material, options: Options, progress: Progress) -> StoredPredictor:
        targets = range(material.trace.geometry.layers) if options.targets is None else options.targets
        decisions = [Decision(target, options.horizon) for target in targets]
        return train_trajectory(
            material.trace, architecture, decisions, options.schedule, window=options.window, steps=options.history,
            progress=progress,
        )  # fmt: skip

    return trainer


def _lookahead(material: Material, options: Options, progress: Progress) -> StoredPredictor:
    """With default vectors, and with the exact shared expert where the family has one."""
    ahead = range(1 + min(3, material.trace.geometry.layers))
    defaults = train_defaults(material, progress)
    return train_lookahead(material, defaults=defaults, shared=has_shared(material), horizons=ahead)


def _head(material: Material, options: Options, progress: Progress) -> StoredPredictor:
    return train_head(material, options.horizon, options.schedule, rank=options.rank, progress=progress)


def _estimator(material: Material, options: Options, progress: Progress) -> StoredPredictor:
    defaults = train_defaults(material, progress)
    return train_estimator(
        material, options.horizon, options.schedule, width=options.width, defaults=defaults, progress=progress
    )


def _hybrid(material: Material, options: Options, progress: Progress) -> StoredPredictor:
    defaults = train_defaults(material, progress)
    estimator = train_estimator(
        material, options.horizon, options.schedule, width=options.width, defaults=defaults, progress=progress
    )
    return make_hybrid(estimator, material)


def _preattention(architecture: EarlyArchitecture) -> Trainer:
    def trainer(material: Material, options: Options, progress: Progress) -> StoredPredictor:
        return train_preattention(
            material, options.schedule, architecture=architecture, loss=options.loss.function, progress=progress
        )

    return trainer


def _blend(material: Material, options: Options, progress: Progress) -> StoredPredictor:
    if not options.parts:
        raise ConfigError("a blend of nothing", fix="name trained predictors with --part FILE, twice or more")
    parts = [part.to(material.trace.device) for part in options.parts]
    return train_blend(parts, material.trace, options.horizon, progress)


TRAINERS: Mapping[str, Trainer] = MappingProxyType(
    {
        "frequency": lambda material, options, progress: count_frequency(material.trace),
        "previous": lambda material, options, progress: count_previous(material.trace),
        "transition": lambda material, options, progress: count_transition(material.trace),
        "affinity": lambda material, options, progress: count_affinity(material.trace, material.vocab),
        "mlp": _history(Architecture.MLP),
        "lstm": _history(Architecture.LSTM),
        "transformer": _history(Architecture.TRANSFORMER),
        "lookahead": _lookahead,
        "estimator": _estimator,
        "hybrid": _hybrid,
        "preattention": _preattention(EarlyArchitecture.SILU),
        "preattention-batchnorm": _preattention(EarlyArchitecture.BATCHNORM),
        "head": _head,
        "blend": _blend,
    }
)

_LEARNS = frozenset({"steps", "rows", "rate"})
_HISTORY = _LEARNS | {"horizon", "window", "target"}
CHOICES: Mapping[str, frozenset[str]] = MappingProxyType(  # what each listens to, by the names of the flags
    {
        **dict.fromkeys(("frequency", "previous", "transition", "affinity", "lookahead"), frozenset()),
        **dict.fromkeys(("mlp", "lstm", "transformer"), _HISTORY),
        **dict.fromkeys(("estimator", "hybrid"), _LEARNS | {"horizon"}),
        **dict.fromkeys(("preattention", "preattention-batchnorm"), _LEARNS | {"loss"}),
        "head": _LEARNS | {"horizon", "rank"},
        "blend": frozenset({"horizon", "part"}),
    }
)
