"""What lossy answers to a miss cost a model, as measured, and what the dial makes of it. A JSON file.

It lies in the folder `predictors` beside a pack, with the default vectors that it was measured with.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from steerpipe.core.errors import ConfigError, DamagedFileError, InputError
from steerpipe.core.quality import Allowance, Dial, QualityPlan, parse_policy
from steerpipe.core.whole_file import write_whole
from steerpipe.predict.shipped import folders_for

SCHEMA = 1
FILE = "quality.json"
_DIGITS = 4  # significant ones that are kept of a measurement


@dataclass(frozen=True, slots=True)
class Loss:
    """What a plan costs, per token, against the exact answer to the same text."""

    kl: float  # nats, from the exact distribution
    perplexity: float
    top1: float  # share of tokens whose likeliest next token is the exact one's
    share: float  # of all expert uses, substituted
    cost: float  # nats per substituted use


@dataclass(frozen=True, slots=True)
class Measurement:
    """One policy in some layers (first and last, numbered among those with experts) and one rank; None: all ranks."""

    policy: str
    layers: tuple[int, int]
    rank: int | None
    loss: Loss


@dataclass(frozen=True, slots=True)
class Setting:
    """What one position of the dial stands for."""

    plan: QualityPlan
    allowance: Allowance
    loss: Loss  # of the whole plan, when what was missed comes two layers later
    unmended: Loss  # the same, when it never comes in time


@dataclass(frozen=True, slots=True)
class QualityProfile:
    """Measured at one residency: `residency` of all experts were there, as a cache keeps them."""

    model: str  # identity of the pack
    tokens: int
    residency: float
    exact_perplexity: float
    drifting: tuple[int, ...]  # early layers in which substitutes cost most: exact, but for `fast`
    measurements: tuple[Measurement, ...]
    settings: Mapping[Dial, Setting]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "tokens": self.tokens,
            "residency": self.residency,
            "exact_perplexity": _rounded(self.exact_perplexity),
            "drifting": list(self.drifting),
            "measurements": [
                {"policy": each.policy, "layers": list(each.layers), "rank": each.rank, "loss": _loss_json(each.loss)}
                for each in self.measurements
            ],
            "settings": {
                str(dial): {
                    "plan": each.plan.as_json(),
                    "costs": _rows(each.allowance.costs),
                    "mended": _rows(each.allowance.mended),
                    "kl_per_token": each.allowance.per_token,
                    "loss": _loss_json(each.loss),
                    "unmended": _loss_json(each.unmended),
                }
                for dial, each in self.settings.items()
            },
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """KeyError, TypeError, ValueError, OverflowError or ConfigError: not a profile."""
        if not isinstance(raw["settings"], Mapping):
            raise TypeError("its settings are no table")
        settings = {Dial(dial): _setting(Dial(dial), each) for dial, each in raw["settings"].items()}
        measurements = tuple(_measurement(each) for each in _list(raw["measurements"]))
        return cls(
            str(raw["model"]), _count(raw["tokens"]), _number(raw["residency"]), _number(raw["exact_perplexity"]),
            tuple(_count(layer) for layer in _list(raw["drifting"])), measurements, settings,
        )  # fmt: skip

    def setting(self, dial: Dial) -> Setting:
        if dial not in self.settings:
            raise ConfigError(
                f"the quality {dial} would cost this model more than its bound",
                fix="use " + " or ".join([*self.settings, Dial.EXACT]),
            )
        return self.settings[dial]


def save_profile(profile: QualityProfile, file: Path) -> int:
    """Writes it whole or not at all, and returns its bytes."""
    content = (json.dumps(profile.as_json(), separators=(",", ":")) + "\n").encode()
    write_whole(file, content)
    return len(content)


def load_profile(file: Path, identity: str) -> QualityProfile:
    """`identity` of the pack that it must be of."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file} does not exist", fix="measure the model: steerpipe calibrate") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise DamagedFileError(f"{file} cannot be read: {problem}", fix="measure again: steerpipe calibrate") from None
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise InputError(f"{file} is no quality profile of schema {SCHEMA}", fix="measure again: steerpipe calibrate")
    try:
        profile = QualityProfile.from_json(raw)
    except (KeyError, TypeError, ValueError, OverflowError, ConfigError) as problem:
        what = problem.what if isinstance(problem, ConfigError) else str(problem)
        raise DamagedFileError(f"{file} is damaged: {what}", fix="measure again: steerpipe calibrate") from None
    if profile.model != identity:
        raise InputError(
            f"{file} was measured with {profile.model}, this model is {identity}",
            fix="measure this one: steerpipe calibrate",
        )
    return profile


def profile_of(folder: Path) -> Path | None:
    """The quality profile of the model in `folder`, where somebody has measured one."""
    return next((place / FILE for place in folders_for(folder) if (place / FILE).is_file()), None)


def _setting(dial: Dial, raw: Mapping[str, Any]) -> Setting:
    plan = QualityPlan.from_json(raw["plan"])
    costs, mended = _table(raw["costs"], plan.shape), _table(raw["mended"], plan.shape)
    unbounded = dial is Dial.FAST and raw["kl_per_token"] is None
    per_token = None if unbounded else _number(raw["kl_per_token"], least=0.0)
    return Setting(plan, Allowance(costs, mended, per_token), _loss(raw["loss"]), _loss(raw["unmended"]))


def _measurement(raw: Mapping[str, Any]) -> Measurement:
    first, last = (_count(layer) for layer in _list(raw["layers"]))
    rank = None if raw["rank"] is None else _count(raw["rank"])
    return Measurement(str(parse_policy(raw["policy"])), (first, last), rank, _loss(raw["loss"]))


def _rows(table: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[_rounded(value) for value in row] for row in table]


def _table(raw: object, shape: tuple[int, int]) -> tuple[tuple[float, ...], ...]:
    table = tuple(tuple(_number(value, least=0.0) for value in _list(row)) for row in _list(raw))
    if len(table) != shape[0] or {len(row) for row in table} != {shape[1]}:
        raise ValueError(f"costs that are not {shape[0]} layers of {shape[1]} ranks, as its plan is")
    return table


def _loss(raw: Mapping[str, Any]) -> Loss:
    return Loss(**{name: _number(value) for name, value in dict(raw).items()})


def _list(raw: object) -> list[Any]:
    if not isinstance(raw, list):
        raise TypeError(f"{raw!r:.40} where a list belongs")
    return raw


def _count(raw: object) -> int:
    if type(raw) is not int or raw < 0:
        raise ValueError(f"{raw!r:.40} where a whole number belongs")
    return raw


def _number(raw: object, *, least: float = -math.inf) -> float:
    if not isinstance(raw, int | float) or isinstance(raw, bool) or not math.isfinite(raw) or raw < least:
        raise ValueError(f"{raw!r:.40} where a finite number belongs" + ", 0 or more" * (least == 0))
    return float(raw)


def _loss_json(loss: Loss) -> dict[str, float]:
    return {name: _rounded(value) for name, value in asdict(loss).items()}


def _rounded(value: float) -> float:
    return 0.0 if value == 0 else round(value, _DIGITS - 1 - math.floor(math.log10(abs(value))))
