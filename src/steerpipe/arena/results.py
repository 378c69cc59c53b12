"""What an arena found, for programs: everything that tables, plots and the page are made of."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from steerpipe.arena.entries import Role
from steerpipe.arena.metrics import CalibrationBin, Metrics
from steerpipe.arena.timing import Timing
from steerpipe.arena.worth import MachineWorth
from steerpipe.predict.records import Geometry
from steerpipe.predict.stored import Training

SCHEMA = 1
FIRST_LAYERS = 3  # where states are young and lookahead is weak: shown by themselves


@dataclass(frozen=True, slots=True)
class HorizonResult:
    horizon: int
    overall: Metrics  # layers that are decided within the token: from layer `horizon` on
    first_layers: Metrics | None  # layers 0 to 2, wherever they are decided
    layers: tuple[Metrics | None, ...]  # None: the predictor does not answer for it
    calibration: tuple[CalibrationBin, ...]  # of `overall`


@dataclass(frozen=True, slots=True)
class EntryResult:
    name: str
    role: Role
    origin: str
    parameters: int | None  # None: it was refused
    multiply_adds: int | None
    training: Training | None
    horizons: tuple[HorizonResult, ...]  # () where it was refused
    cpu: Timing | None  # at its shortest horizon; None: not measured
    gpu: Timing | None
    refused: str | None  # why it has no figures: it peeked, said no probabilities, or raised an error

    def at(self, horizon: int) -> HorizonResult | None:
        return next((each for each in self.horizons if each.horizon == horizon), None)


@dataclass(frozen=True, slots=True)
class Setting:
    """On what it was measured."""

    source: str
    geometry: Geometry
    train_prompts: int
    train_tokens: int
    test_prompts: int
    test_tokens: int
    opening_tokens: int  # left out of the test: a training text begins with the same tokens
    miss_residency: float  # share of all experts in the LFRU cache whose misses count
    miss_hit_rate: float  # of that cache on the test tokens
    miss_tokens: int  # the first so many test tokens, over which the cache was followed
    machine: str  # that the microseconds were measured on, in words

    @property
    def chance(self) -> float:
        """Recall of a predictor that knows nothing."""
        return self.geometry.top_k / self.geometry.experts


@dataclass(frozen=True, slots=True)
class ArenaResult:
    setting: Setting
    entries: tuple[EntryResult, ...]
    worth: tuple[MachineWorth, ...]
    worth_tokens: int  # replayed and measured on each machine; 0: none

    @property
    def refused(self) -> list[EntryResult]:
        return [each for each in self.entries if each.refused]

    @property
    def control_excess(self) -> float | None:
        """How far the shuffled-label control lies above chance: what leaks."""
        scores = [
            each.overall.recall for entry in self.entries if entry.role is Role.CONTROL for each in entry.horizons
        ]
        return max(scores) - self.setting.chance if scores else None

    def as_json(self) -> dict[str, Any]:
        whole = {
            "schema": SCHEMA,
            "setting": asdict(self.setting) | {"chance": self.setting.chance},
            "control_excess": self.control_excess,
            "entries": [asdict(each) | {"role": each.role.value} for each in self.entries],
            "worth_tokens": self.worth_tokens,
            "worth": [each.as_json() for each in self.worth],
        }
        rounded: dict[str, Any] = _rounded(whole)
        return rounded


def _rounded(value: Any) -> Any:
    """Six digits: what is measured has fewer, and 24 layers of everything would be a large file."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
