"""How each predictor that looks at hidden states is trained: material in, calibrated predictor out."""

from collections.abc import Sequence
from typing import TypeVar

import torch

from steerpipe.predict.calibration import uncalibrated
from steerpipe.predict.estimator import Estimator, EstimatorNetwork, Hybrid
from steerpipe.predict.head import HeadNetwork, Input, ResidualHead
from steerpipe.predict.logits import LogitPredictor
from steerpipe.predict.lookahead import DefaultVectors, RouterLookahead
from steerpipe.predict.preattention import WIDTH, Architecture, PreAttention, PreAttentionNetwork
from steerpipe.train.defaults import collect_defaults
from steerpipe.train.drift import drifting_layers
from steerpipe.train.fit import Schedule
from steerpipe.train.losses import Loss, divergence_loss, margin_loss, ranking_loss
from steerpipe.train.material import Material
from steerpipe.train.networks import fit_calibration, fit_network
from steerpipe.train.progress import Progress, silent

P = TypeVar("P", bound=LogitPredictor)

HEAD_INPUTS = (Input.GATES, Input.PREVIOUS_RESIDUAL)  # the previous token's experts add nothing beside its residual
PREATTENTION_INPUTS = (Input.PREVIOUS_RESIDUAL,)  # what enters the layer holds the gates' part already


def train_lookahead(
    material: Material, *, defaults: DefaultVectors | None, shared: bool, horizons: Sequence[int] = (0, 1, 2, 3)
) -> RouterLookahead:
    """Nothing is learnt but the calibration."""
    routers = material.needed_routers(RouterLookahead.kind)
    plain = RouterLookahead(routers, shared=shared, defaults=defaults, horizons=horizons)
    calibration = fit_calibration(plain, material.trace)
    return RouterLookahead(routers, shared=shared, defaults=defaults, horizons=horizons, calibration=calibration)


def train_defaults(material: Material, progress: Progress = silent) -> DefaultVectors:
    model, routers = material.needed_model("lookahead"), material.needed_routers("lookahead")
    return collect_defaults(model, routers, material.trace, progress)


def train_head(
    material: Material, horizon: int, schedule: Schedule, *, rank: int, progress: Progress = silent
) -> ResidualHead:
    routers = material.needed_routers(ResidualHead.kind)
    inputs = HEAD_INPUTS if horizon else PREATTENTION_INPUTS
    torch.manual_seed(schedule.seed)
    network = HeadNetwork(routers, rank=rank, shared=has_shared(material), inputs=inputs)
    fit_network(network, material.trace, routers, horizon, margin_loss, schedule, progress=progress)
    return calibrated(ResidualHead(network, routers, horizon, uncalibrated(1, routers.layers)), material)


def train_estimator(
    material: Material,
    horizon: int,
    schedule: Schedule,
    *,
    width: int,
    defaults: DefaultVectors | None,
    progress: Progress = silent,
) -> Estimator:
    routers = material.needed_routers(Estimator.kind)
    torch.manual_seed(schedule.seed)
    network = EstimatorNetwork(routers, width=width, shared=has_shared(material), defaults=defaults)
    fit_network(network, material.trace, routers, horizon, divergence_loss, schedule, progress=progress)
    return calibrated(Estimator(network, routers, horizon, uncalibrated(1, routers.layers)), material)


def make_hybrid(estimator: Estimator, material: Material) -> Hybrid:
    """The layers that drift are found on the material itself."""
    untuned = uncalibrated(1, estimator.routers.layers)
    drifting = drifting_layers(estimator, Hybrid(estimator, (), untuned).lookahead, material.trace)
    return calibrated(Hybrid(estimator, drifting, untuned), material)


def train_preattention(
    material: Material,
    schedule: Schedule,
    *,
    architecture: Architecture,
    width: int = WIDTH,
    loss: Loss = ranking_loss,
    progress: Progress = silent,
) -> PreAttention:
    routers = material.needed_routers(PreAttention.kind)
    torch.manual_seed(schedule.seed)
    network = PreAttentionNetwork(routers, architecture=architecture, width=width)
    fit_network(network, material.trace, routers, 0, loss, schedule, progress=progress)
    return calibrated(PreAttention(network, routers, 0, uncalibrated(1, routers.layers)), material)


def has_shared(material: Material) -> bool:
    return material.trace.states is not None and material.trace.states.shared is not None


def calibrated(predictor: P, material: Material) -> P:
    """The same predictor, whose probabilities hold on the material."""
    predictor.calibration = fit_calibration(predictor, material.trace)
    return predictor
