"""Predictors as graphs on a GPU carry them: a model's trained heads, its routers, and what became of their words.

L MoE layers, r rank, H hidden, E experts.
"""

import copy
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import fields
from enum import Enum
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
from torch import Tensor

from steerpipe.core.blocks import BlockSource
from steerpipe.core.config import Predict
from steerpipe.kernels.history import TransformerKernels
from steerpipe.model.gpu.apart import ApartForecaster, Network, Questions
from steerpipe.model.gpu.decoder import GpuDecoder
from steerpipe.model.gpu.fetching import NAMED
from steerpipe.model.gpu.predicted import LayerCounts, PredictedStep, count
from steerpipe.model.gpu.tap import Forecaster, Head, History, Lookahead
from steerpipe.model.spec import ModelSpec
from steerpipe.model.weights import ModelWeights
from steerpipe.predict import files
from steerpipe.predict.by_horizon import ByHorizon
from steerpipe.predict.calibration import Calibration
from steerpipe.predict.head import Input, ResidualHead
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.protocol import RoutingPredictor
from steerpipe.predict.scorecard import Score, Scorecard
from steerpipe.predict.shipped import for_model
from steerpipe.predict.sight import Decision
from steerpipe.predict.stored import StoredPredictor
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.trajectory_networks import Architecture
from steerpipe.predict.trials import Verdict, settled
from steerpipe.predict.window import Window
from steerpipe.runtime.predicting import Choice, PredictingDecoder, Speaker
from steerpipe.runtime.prediction import Prediction, geometry_of, mark_of, predictors_for
from steerpipe.store.reader import Pack

COUNTED_AT_ONCE = 64  # steps

assert LayerCounts._fields == tuple(each.name for each in fields(Score)), "both count the same"


def predict_on_gpu(
    decoder: GpuDecoder, source: BlockSource, weights: ModelWeights, folder: Path, pack: Pack, *,
    predict: Predict = "auto", exact: bool = True, past: Verdict | None = None,
) -> tuple[Prediction, PredictingDecoder | None]:  # fmt: skip
    """Who predicts in this model's steps of one row; None: nobody does, and the line says why if it was wanted
    (`predict`: see EngineConfig). `past`: how trials ended in an earlier run with the same settings. InputError: the
    predictors that lie beside the model are of another one."""
    spec, digest = decoder.spec, pack.manifest.source
    sizes = [pack.layout(layer).block_bytes for layer in spec.moe_layers for _ in range(spec.moe(layer).experts)]
    made = Prediction(fmean(sizes))
    if predict == "off":
        return made, None
    if why := _why_not(source, spec, exact=exact):
        made.standing = lambda: f"prediction: none, {why}"
        return made, None
    found, history = predictors_for(spec, weights, folder, digest), history_for(spec, folder, digest)
    drivers, layers = drivers_of(source, spec), len(spec.moe_layers)
    both = [speaker_of(predictor, spec, weights, driver) for predictor in found for driver in drivers]
    speakers = [each for each in both if each is not None]
    if history is not None and (why := why_silent(history, layers, drivers)):
        made.beside = lambda: f"prediction: {history.name} is not asked, {why}"
    elif history is not None:
        speakers += (asked := history_speakers(history, spec, weights, drivers))
        made.beside = partial(beside_line, asked, made.verdicts, layers)
    if not speakers:
        made.standing = lambda: "prediction: none, for the model's predictors look at what graphs on a GPU do not show"
        return made, None
    scores = GpuScores(decoder, speakers)
    trials = settled([each.name for each in speakers]) if predict == "on" else None
    choice = Choice(speakers, scores, made.verdicts.append, trials, past)
    made.steering, made.standing, made.past = choice, choice.standing, choice.past
    return made, PredictingDecoder(decoder, choice)


def _why_not(source: BlockSource, spec: ModelSpec, *, exact: bool) -> str | None:
    """Why nobody can predict here."""
    if not exact:
        return "for misses are answered without waiting"
    if geometry_of(spec) is None:
        return "for layers differ in their experts, or there is one alone"
    if (top_k := spec.moe(spec.moe_layers[0]).top_k) > NAMED:
        return f"for a row takes {top_k} experts, and a forecast on a GPU names {NAMED}"
    return None if drivers_of(source, spec) else "for there are too few slots to bring experts ahead of time"


class Driver(Enum):
    """Who brings what a predicted row misses, and what is named for it."""

    DEVICE = "device"  # by itself, one layer ahead
    HOST = "host"
    HOST_INSTEAD = "host instead"  # where the device could


def drivers_of(source: BlockSource, spec: ModelSpec) -> list[Driver]:
    """Where the device could, the host can, too: for large blocks it is quicker, for small ones slower (ADR 0011), so
    both take turns."""
    landing, serves = source.landing, source.serves(spec.moe(spec.moe_layers[0]).top_k)
    if landing is None:
        return [Driver.HOST] if serves else []
    return [*([Driver.DEVICE] if landing.guesses is not None else []), *([Driver.HOST_INSTEAD] if serves else [])]


def speaker_of(
    predictor: RoutingPredictor, spec: ModelSpec, weights: ModelWeights, driver: Driver = Driver.HOST
) -> Speaker | None:
    """None: it looks at what graphs do not show, or not one layer ahead."""
    ways: list[Head | Lookahead] = []
    for horizon in range(1, max(predictor.horizons, default=0) + 1)[: 1 if driver is Driver.DEVICE else None]:
        way = _way(predictor, horizon, spec, weights)
        if way is None:
            break
        ways.append(way)
    if not ways:
        return None
    ahead = " and ".join(str(horizon + 1) for horizon in range(len(ways)))
    by = ", by the host" if driver is Driver.HOST_INSTEAD else ""
    return Speaker(f"{_plain_name(predictor)}, {ahead} ahead{by}", Forecaster(tuple(ways), served=bool(by)))


def history_for(spec: ModelSpec, folder: Path, digest: str | None = None) -> StoredPredictor | None:
    """The model's network of routing history. On a GPU alone: a CPU takes .7 ms a layer at nano's shape, and lookahead
    recalls more."""
    shipped = for_model(folder)
    file = None if shipped is None else shipped.files.get(Trajectory.kind)
    return None if file is None else files.load(file, here=mark_of(spec, digest))


def why_silent(history: StoredPredictor, layers: int, drivers: Collection[Driver]) -> str | None:
    """Why it is not asked. Beside the steps it can only be where the host serves them."""
    if not isinstance(history, Trajectory) or history.window is not Window.LAYERS or history.without:
        return "for it does not look at the last layers alone (steerpipe train transformer --window layers)"
    if not history.networks or any(each not in history.networks for each in _asked(history, layers)):
        return "for it does not know every layer (train it with --horizon 2, and without --target)"
    served = any(driver is not Driver.DEVICE for driver in drivers)
    if served or (Driver.DEVICE in drivers and inside(history, layers)):
        return None
    return "for there are too few slots for the host to serve one row"


def _asked(history: Trajectory, layers: int) -> list[Decision]:
    """As far ahead as it looks, a token at most; of the first layers in the token before."""
    horizon = min(max(history.horizons[-1], 1), layers)
    return [Decision(target, horizon) for target in range(layers)]


def inside(history: Trajectory, layers: int) -> bool:
    """Whether its questions can be a branch of the step's graph: those of an ExpertTransformer, whose kernels take a
    part of a layer's time, about a layer after the next, so that nobody has to wait for them."""
    return history.architecture is Architecture.TRANSFORMER and _asked(history, layers)[0].horizon > 1


def history_speakers(
    history: StoredPredictor, spec: ModelSpec, weights: ModelWeights, drivers: Sequence[Driver]
) -> list[Speaker]:
    """Where the device sends by itself inside the graph, if it can be; where the host serves beside the step, so that
    its answers are there a layer sooner (figures: ADR 0011)."""
    assert isinstance(history, Trajectory), "`why_silent` said so"
    like, moe, layers = weights.embed, spec.moe(spec.moe_layers[0]), len(spec.moe_layers)
    asked = _asked(history, layers)
    horizon = asked[0].horizon
    networks = [copy.deepcopy(history.networks[each]).to(like.device, like.dtype) for each in asked]

    def kernels() -> tuple[TransformerKernels, ...]:
        """Each with room of their own for what kernels leave: a question of the host may still be open."""
        return tuple(TransformerKernels(each.state_dict(), history.steps, moe.top_k) for each in networks)

    name, found = f"{history.name}, {horizon} ahead", list[Speaker]()
    if Driver.DEVICE in drivers and inside(history, layers):
        found.append(Speaker(name, Forecaster((History(kernels(), horizon),))))
    if any(driver is not Driver.DEVICE for driver in drivers):
        told: tuple[Network, ...] = tuple(networks)
        if history.architecture is Architecture.TRANSFORMER:
            told = kernels()
        apart = ApartForecaster(told, moe.experts, moe.top_k, history.steps, horizon, like.dtype)
        found.append(Speaker(f"{name}, by the host" if found else name, apart))
    return found


def beside_line(asked: Sequence[Speaker], verdicts: Sequence[Verdict], layers: int) -> str:
    """What a question takes each of them and, where the host asks, how often it was answered in time."""
    layer = f" beside layers of {verdicts[-1].seconds[0] / layers * 1e6:.0f} us" if verdicts else ""
    told = []
    for each in asked:
        of = questions_of(each)
        if of.seconds is not None:
            said = f"{each.name} takes {of.seconds * 1e6:.0f} us a question{layer}"
            counted = f" ({of.asked} of {of.possible} were asked, {of.in_time} answered in time)" if of.asked else ""
            told.append(said + counted)
    return "prediction: " + ("; ".join(told) or f"{asked[0].name} was not asked yet")


def questions_of(speaker: Speaker) -> Questions:
    """Of a network of routing history."""
    predictor = speaker.predictor
    found = predictor.questions if isinstance(predictor, ApartForecaster) else predictor.history.questions
    assert isinstance(found, Questions), "every network of history counts them"
    return found


def _plain_name(predictor: RoutingPredictor) -> str:
    """Default vectors are not in the graphs, and the shared expert is in all of them."""
    return "lookahead" if isinstance(predictor, RouterLookahead) else predictor.name


def _way(predictor: RoutingPredictor, horizon: int, spec: ModelSpec, weights: ModelWeights) -> Head | Lookahead | None:
    if isinstance(predictor, ByHorizon):
        own = predictor.at(horizon)
        return None if own is None else _way(own, horizon, spec, weights)
    if horizon not in predictor.horizons:
        return None
    number = list(predictor.horizons).index(horizon)
    if isinstance(predictor, RouterLookahead):
        return Lookahead(*_sharpness(predictor.calibration, number, weights))
    if isinstance(predictor, ResidualHead) and predictor.network.shared == _shares(spec):
        return _head(predictor, number, spec, weights)
    return None


def _head(predictor: ResidualHead, number: int, spec: ModelSpec, weights: ModelWeights) -> Head:
    network, like = predictor.network, weights.embed

    def here(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device=like.device, dtype=like.dtype)

    down = spread(network.down.detach(), network.inputs, spec.hidden, network.up.shape[1])
    sharpness = _sharpness(predictor.calibration, number, weights)
    return Head(here(down), here(network.down_bias), here(network.up), here(network.up_bias), *sharpness)


def spread(down: Tensor, inputs: Sequence[Input], hidden: int, experts: int) -> Tensor:
    """[L, r, what it was trained on] → [L, r, 2 H + 2 E], as kernels/foretell.py reads it: zeros where it looks at
    nothing."""
    widths = {Input.GATES: experts, Input.PREVIOUS_EXPERTS: experts, Input.PREVIOUS_RESIDUAL: hidden}
    wide = down.new_zeros(*down.shape[:2], hidden + sum(widths.values()))
    wide[..., :hidden] = down[..., :hidden]
    start = at = hidden
    for each, width in widths.items():
        if each in inputs:
            wide[..., at : at + width] = down[..., start : start + width]
            start += width
        at += width
    assert start == down.shape[2], f"{start} of {down.shape[2]} inputs are known"
    return wide


def _sharpness(calibration: Calibration, number: int, weights: ModelWeights) -> tuple[Tensor, Tensor]:
    """[L] fp32 each."""
    device = weights.embed.device
    return calibration.scale[number].float().to(device), calibration.bias[number].float().to(device)


def _shares(spec: ModelSpec) -> bool:
    return all(spec.moe(layer).shared_width for layer in spec.moe_layers)


class GpuScores:
    """Counts what the steps of one decoder came to, many at a time."""

    def __init__(self, decoder: GpuDecoder, speakers: Sequence[Speaker]) -> None:
        self._decoder = decoder
        self._names = {each.predictor: each.name for each in speakers}
        self._card = Scorecard(len(decoder.spec.moe_layers))
        self._steps: defaultdict[str, list[PredictedStep]] = defaultdict(list)
        self._counted: dict[str, PredictedStep] = {}  # the last one, for what it said of the next step's first layer
        decoder.noted = self.note

    def note(self, step: PredictedStep) -> None:
        name = self._names.get(step.predictor)
        if name is not None:
            self._steps[name].append(step)
            if len(self._steps[name]) >= COUNTED_AT_ONCE:
                self._count(name)

    @property
    def card(self) -> Scorecard:
        """Of all steps so far. Between steps, when the device has finished."""
        self._decoder.tell_predicted()
        for name in [each for each, steps in self._steps.items() if steps]:
            self._count(name)
        return self._card

    def _count(self, name: str) -> None:
        steps, self._steps[name] = self._steps[name], []
        self._card.add(name, np.stack(count(steps, self._counted.get(name)), axis=1))
        self._counted[name] = steps[-1]
