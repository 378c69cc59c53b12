"""How a reuse forecast is trained: material with hidden states in, forecast out."""

import time
from dataclasses import dataclass

import torch

from steerpipe.predict.records import Geometry
from steerpipe.predict.reuse import ReuseConfig, ReuseForecast
from steerpipe.predict.stored import Training
from steerpipe.store.policies import HALF_LIFE_TOKENS
from steerpipe.train.fit import Schedule
from steerpipe.train.material import Material
from steerpipe.train.progress import Progress, silent
from steerpipe.train.reuse import gather_material, train_reuse

TAPS = 4


@dataclass(frozen=True, slots=True)
class ReuseRecipe:
    """What nano's forecast was made with, but for the rows of a step: there 16,384, on a GPU."""

    taps: tuple[int, ...] | None = None  # None: the ends of equal quarters of the layers
    rank: int = 128
    shared: bool = True  # one expansion for all taps
    horizon_tokens: float = 12.0
    context_tokens: float = 4.0
    history: float | None = None  # log-odds per doubling of the count; None: learnt
    steps: int = 2000
    rows: int = 4096
    learning_rate: float = 5e-3
    seed: int = 0

    def config(self, geometry: Geometry) -> ReuseConfig:
        taps = evenly(geometry.layers) if self.taps is None else self.taps
        return ReuseConfig(
            geometry.layers, geometry.experts, geometry.hidden, taps, self.context_tokens, HALF_LIFE_TOKENS,
            self.horizon_tokens,
        )  # fmt: skip

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.steps, self.rows, self.learning_rate, 1e-3, self.seed)


def evenly(layers: int) -> tuple[int, ...]:
    """Up to TAPS layers, the last among them."""
    return tuple(sorted({(number + 1) * layers // TAPS - 1 for number in range(TAPS)} - {-1}))


def make_reuse(
    material: Material, recipe: ReuseRecipe, model: str, progress: Progress = silent
) -> tuple[ReuseForecast, Training]:
    """Needs hidden states, of a trace or of a model, and nothing else. `model`: whose routing it is."""
    start = time.monotonic()
    trace = material.trace
    config = recipe.config(trace.geometry)
    forecast = train_reuse(
        gather_material(trace, config), config, recipe.schedule, rank=recipe.rank, shared=recipe.shared,
        history=recipe.history, progress=progress,
    )  # fmt: skip
    if trace.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = round(time.monotonic() - start, 2)
    return forecast, Training(trace.rows, material.prompts, seconds, trace.device.type, recipe.seed, model)
