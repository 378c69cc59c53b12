"""What a model's prediction is made of: its trained predictors where there are some, its own routers where not."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from steerpipe.core.config import Predict
from steerpipe.core.errors import ConfigError, InputError
from steerpipe.core.protocols import ForwardTap
from steerpipe.model.spec import ModelSpec
from steerpipe.model.weights import ModelWeights
from steerpipe.predict import files
from steerpipe.predict.by_horizon import ByHorizon
from steerpipe.predict.lookahead import DefaultVectors, RouterLookahead
from steerpipe.predict.mark import ModelMark
from steerpipe.predict.protocol import RoutingPredictor
from steerpipe.predict.records import Geometry
from steerpipe.predict.reuse import ReuseForecast
from steerpipe.predict.reuse_file import load_reuse
from steerpipe.predict.routers import Routers, routers_of_weights
from steerpipe.predict.scorecard import Score, Scorecard
from steerpipe.predict.shipped import for_model
from steerpipe.predict.stored import StoredPredictor
from steerpipe.predict.trials import Verdict, settled
from steerpipe.runtime.reuse_tap import ReuseTap
from steerpipe.runtime.steering import Steering
from steerpipe.store.policies import Reuse
from steerpipe.transfer.source import LadderSource, default_transient_limit

HORIZONS = (1, 2)  # beyond two layers replay finds little more, and every horizon costs a product per layer
ON_A_LADDER = (1, 2, 3)  # as many of them are asked as a block takes layers: see Steering


def geometry_of(spec: ModelSpec) -> Geometry | None:
    """None: layers differ in their experts, or there are too few to predict anything."""
    shapes = {(spec.moe(layer).experts, spec.moe(layer).top_k) for layer in spec.moe_layers}
    if len(shapes) != 1 or len(spec.moe_layers) < 2:
        return None
    ((experts, top_k),) = shapes
    return Geometry(len(spec.moe_layers), experts, top_k, spec.hidden) if top_k < experts else None


def mark_of(spec: ModelSpec, digest: str | None) -> ModelMark:
    """`digest` of the checkpoint. Layers that differ in their experts leave open how many there are."""
    shapes = {(spec.moe(layer).experts, spec.moe(layer).top_k) for layer in spec.moe_layers}
    experts, top_k = shapes.pop() if len(shapes) == 1 else (None, None)
    return ModelMark(len(spec.moe_layers), experts, top_k, spec.hidden, digest)


def predictors_for(
    spec: ModelSpec, weights: ModelWeights, folder: Path, digest: str | None = None,
    learnt: DefaultVectors | None = None, horizons: Sequence[int] = HORIZONS,
) -> list[RoutingPredictor]:  # fmt: skip
    """Those that are worth a trial, the most promising first. A model never seen before has its own routers, and soon
    default vectors that were `learnt` while it answered.

    InputError: the predictors that lie beside it are of another model. `digest` of the checkpoint.
    """
    routers, here = routers_of_weights(spec, weights).to("cpu"), mark_of(spec, digest)
    shared = all(spec.moe(layer).shared_width for layer in spec.moe_layers)
    found: list[RoutingPredictor] = []
    shipped = for_model(folder)
    heads = {} if shipped is None else {h: file for h, file in shipped.heads().items() if h in horizons}
    if heads:
        found.append(ByHorizon("trained heads", {h: _head(file, h, routers, here) for h, file in heads.items()}))
    if shipped is not None and "lookahead" in shipped.files:
        found.append(files.load(shipped.files["lookahead"], routers, here=here))
    else:
        found.append(RouterLookahead(routers, shared=shared, defaults=learnt, horizons=tuple(horizons)))
    return found


def _head(file: Path, horizon: int, routers: Routers, here: ModelMark) -> StoredPredictor:
    head = files.load(file, routers, here=here)
    if horizon not in head.horizons:
        raise InputError(
            f"{file} looks {', '.join(map(str, head.horizons))} layers ahead, not {horizon}",
            fix="name a head by its horizon: head-1.safetensors looks 1 layer ahead",
        )
    return head


def reuse_for(folder: Path, spec: ModelSpec, digest: str | None = None) -> ReuseForecast | None:
    """The model's forecast of reuse, where somebody has trained one. InputError: it is of another model."""
    shipped, here = for_model(folder), mark_of(spec, digest)
    if shipped is None or "reuse" not in shipped.files or here.experts is None:  # forecasts are of even layers
        return None
    return load_reuse(shipped.files["reuse"], here=here)


def settle_policy(asked: str, forecast: ReuseForecast | None) -> str:
    """The eviction policy: what was asked for, else the best that this model has."""
    if asked == "reuse" and forecast is None:
        raise ConfigError(
            "the policy reuse needs a forecast, and this model has none that can be used here",
            fix="use lfru, or make one: steerpipe train reuse (docs/reuse.md)",
        )
    if asked == "auto":
        return "lfru" if forecast is None else "reuse"
    return asked


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Steered(Protocol):
    """Who decides whose word counts: `Steering` over a ladder, `predicting.Choice` on a GPU."""

    @property
    def predictor(self) -> Named | None:
        """Whose word counts for the token that runs."""
        ...

    @property
    def on(self) -> bool: ...

    @property
    def scorecard(self) -> Scorecard: ...

    def switch(self, on: bool) -> None:
        """Between steps. Off: nothing is predicted or moved ahead."""
        ...


@dataclass(slots=True)
class Prediction:
    """What watches the passes of an engine, and what became of it."""

    block_bytes: float  # of an expert, on average
    steering: Steered | None = None  # None: nothing is moved before it is needed
    taps: list[ForwardTap] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    past: Verdict | None = None  # of an earlier run, by which this one began
    standing: Callable[[], str | None] = lambda: None  # what there is to say before the first verdict
    eviction: Callable[[], str | None] = lambda: None  # of a policy that is measured as well
    beside: Callable[[], str | None] = lambda: None  # of a network of routing history, beside layers
    miss_seconds: Callable[[], float | None] = lambda: None  # what a miss waits, on average; None: nobody knows

    def line(self) -> str | None:
        """What is to be said about it, if there is anything."""
        if self.steering is not None and not self.steering.on:
            return "prediction: switched off"
        return self.verdicts[-1].line() if self.verdicts else self.standing()

    @property
    def verdict(self) -> Verdict | None:
        """The last one, for the next run."""
        return self.verdicts[-1] if self.verdicts else self.past

    def lines(self) -> list[str]:
        """For the person who runs it."""
        return [line for line in (self.line(), self.beside(), self.eviction()) if line is not None]

    def as_json(self) -> dict[str, Any] | None:
        """The verdict of the last trial and the scores so far; None: nothing is predicted here."""
        steering = self.steering
        if steering is None:
            return None
        verdict, card = self.verdicts[-1] if self.verdicts else None, steering.scorecard
        return {
            "predictor": None if steering.predictor is None else steering.predictor.name,
            "verdict": self.line(),
            "trial": verdict and {"seconds_per_token": dict(zip(verdict.names, verdict.seconds, strict=True))},
            "eviction": self.eviction(),
            "beside": self.beside(),
            "scores": {
                name: score_json(card.total(name), card.layers(name), self.block_bytes, self.miss_seconds())
                for name in card.names
            },
        }


def score_json(
    total: Score, layers: Sequence[Score], block_bytes: float, miss_seconds: float | None
) -> dict[str, Any]:  # fmt: skip
    """`layers`: the same in the model's order. `miss_seconds`: see `Prediction`.

    Bytes are of whole blocks: what was cut on its way is wasted in full. The stall that was hidden is estimated, too
    low: who was there in time would have waited as a miss does, and what late ones have hidden is not counted. Null
    where it is not known what was missing.
    """
    told = ("missing", "foreseen", "sent", "used")
    known = total.missing > 0
    of_bytes = {"useful_bytes": "ready", "late_bytes": "late", "wasted_bytes": "wasted"}

    def worth(score: Score) -> dict[str, float | None]:
        found: dict[str, float | None] = {
            name: round(getattr(score, of) * block_bytes) if known else None for name, of in of_bytes.items()
        }
        hidden = None if miss_seconds is None or not known else round(score.ready * miss_seconds * 1e3, 3)
        return found | {"stall_hidden_ms": hidden}

    by_layer = [{name: getattr(each, name) for name in told} | worth(each) for each in layers]
    shares = {
        "recall": total.recall,
        "recall_on_misses": total.recall_on_misses if total.missing else None,
        "precision": total.precision if total.sent else None,
    }
    columns = by_layer[0] if by_layer else told
    return (
        asdict(total)
        | shares
        | worth(total)
        | {"layers": {name: [each[name] for each in by_layer] for name in columns}}
    )


def predict_on_ladder(
    spec: ModelSpec, weights: ModelWeights, folder: Path, source: LadderSource, forecast: ReuseForecast | None, *,
    predict: Predict, digest: str | None = None, learnt: DefaultVectors | None = None, past: Verdict | None = None,
) -> Prediction:  # fmt: skip
    """`predict` off: only eviction is forecast; on: by the most promising predictor, untried. `past`: how trials ended
    in an earlier run with the same settings.
    """
    made = Prediction(fmean(source.pack.layout(expert.layer).block_bytes for expert in source.experts))
    geometry = geometry_of(spec)
    if forecast is not None and isinstance(source.policy, Reuse):
        made.taps.append(ReuseTap(forecast, spec.moe_layers, source.policy, lambda: source.tokens))
    if predict != "off" and geometry is not None:
        predictors = predictors_for(spec, weights, folder, digest, learnt, ON_A_LADDER)
        trials = settled([each.name for each in predictors]) if predict == "on" else None
        steering = Steering(
            predictors, geometry, spec.moe_layers, source, most_guesses=default_transient_limit(source.slots),
            trials=trials, report=made.verdicts.append, past=past,
        )  # fmt: skip
        made.steering, made.past, made.standing = steering, steering.past, steering.standing
        made.miss_seconds = lambda: source.counters().miss_seconds
        made.taps.append(steering)
    return made
