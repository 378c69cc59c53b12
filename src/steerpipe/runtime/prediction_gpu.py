"""Predictors as graphs on a GPU carry them: a model's trained heads, its routers, and what became of their words.

L MoE layers, r rank, H hidden, E experts.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean

import numpy as np
from torch import Tensor

from steerpipe.core.blocks import BlockSource
from steerpipe.model.gpu.decoder import GpuDecoder
from steerpipe.model.gpu.fetching import NAMED
from steerpipe.model.gpu.predicted import LayerCounts, PredictedStep, count
from steerpipe.model.gpu.tap import Forecaster, Head, Lookahead
from steerpipe.model.spec import ModelSpec
from steerpipe.model.weights import ModelWeights
from steerpipe.predict.by_horizon import ByHorizon
from steerpipe.predict.calibration import Calibration
from steerpipe.predict.head import Input, ResidualHead
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.protocol import RoutingPredictor
from steerpipe.predict.scorecard import Score, Scorecard
from steerpipe.runtime.predicting import Choice, PredictingDecoder, Speaker
from steerpipe.runtime.prediction import Prediction, geometry_of, predictors_for
from steerpipe.store.reader import Pack

COUNTED_AT_ONCE = 64  # steps

assert LayerCounts._fields == tuple(each.name for each in fields(Score)), "both count the same"


def predict_on_gpu(
    decoder: GpuDecoder, source: BlockSource, weights: ModelWeights, folder: Path, pack: Pack, *,
    moves: bool = True, exact: bool = True,
) -> tuple[Prediction, PredictingDecoder | None]:  # fmt: skip
    """Who predicts in this model's steps of one row; None: nobody does, and the line says why if it was wanted
    (`moves`). InputError: the predictors that lie beside the model are of another one."""
    spec = decoder.spec
    sizes = [pack.layout(layer).block_bytes for layer in spec.moe_layers for _ in range(spec.moe(layer).experts)]
    made = Prediction(fmean(sizes))
    if not moves:
        return made, None
    if why := _why_not(source, spec, exact=exact):
        made.standing = lambda: f"prediction: none, {why}"
        return made, None
    most = 1 if source.landing is not None else None
    found = predictors_for(spec, weights, folder, pack.manifest.source)
    speakers = [each for predictor in found if (each := speaker_of(predictor, spec, weights, most)) is not None]
    if not speakers:
        made.standing = lambda: "prediction: none, for the model's predictors look at what graphs on a GPU do not show"
        return made, None
    scores = GpuScores(decoder, speakers)
    choice = Choice(speakers, scores, made.verdicts.append)
    made.steering, made.standing = choice, choice.standing
    return made, PredictingDecoder(decoder, choice)


def _why_not(source: BlockSource, spec: ModelSpec, *, exact: bool) -> str | None:
    """Why nobody can predict here."""
    if not exact:
        return "for misses are answered without waiting"
    if geometry_of(spec) is None:
        return "for layers differ in their experts, or there is one alone"
    landing, top_k = source.landing, spec.moe(spec.moe_layers[0]).top_k
    if top_k > NAMED:
        return f"for a row takes {top_k} experts, and a forecast on a GPU names {NAMED}"
    able = source.serves(top_k) if landing is None else landing.guesses is not None
    return None if able else "for there are too few slots to bring experts ahead of time"


def speaker_of(
    predictor: RoutingPredictor, spec: ModelSpec, weights: ModelWeights, most: int | None = None
) -> Speaker | None:
    """`most` layers ahead. None: it looks at what graphs do not show, or not one layer ahead."""
    ways: list[Head | Lookahead] = []
    for horizon in range(1, max(predictor.horizons, default=0) + 1)[:most]:
        way = _way(predictor, horizon, spec, weights)
        if way is None:
            break
        ways.append(way)
    if not ways:
        return None
    ahead = " and ".join(str(horizon + 1) for horizon in range(len(ways)))
    return Speaker(f"{_plain_name(predictor)}, {ahead} ahead", Forecaster(tuple(ways)))


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
