"""Training of layered networks: every target layer at once. T target layers, R rows, E experts."""

from collections.abc import Collection

import torch
from torch import Tensor

from steerpipe.predict.calibration import Calibration, margins
from steerpipe.predict.logits import LayeredNetwork, LogitPredictor
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Decision, Sight
from steerpipe.train.fit import Schedule, batches_of, fit_batches
from steerpipe.train.logistic import logistic_line
from steerpipe.train.losses import Loss
from steerpipe.train.progress import Progress, silent

_CALIBRATION_ROWS = 8192


def fit_network(
    network: LayeredNetwork,
    trace: PackedTrace,
    routers: Routers,
    horizon: int,
    loss: Loss,
    schedule: Schedule,
    *,
    fixed: Collection[str] = (),
    progress: Progress = silent,
) -> None:
    """In place. `fixed`: parameters that stay as they are."""
    network.train()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name not in fixed)

    def gather(drawn: Tensor) -> tuple[Tensor, ...]:
        sights = sights_of(trace, drawn, horizon)
        gathered = zip(*(network.gather(sight) for sight in sights), strict=True)
        return (_true_logits(trace, routers, sights), *(torch.stack(each) for each in gathered))

    def loss_of(true: Tensor, *gathered: Tensor) -> Tensor:
        with torch.autocast(true.device.type, torch.bfloat16, enabled=schedule.half, cache_enabled=False):
            said = network(gathered, slice(0, len(true)))
        return loss(said.float(), true, routers.top_k)

    batches = batches_of(usable_rows(trace), schedule, gather, axis=1)
    learnt = [parameter for parameter in network.parameters() if parameter.requires_grad]
    fit_batches(learnt, batches, loss_of, schedule, what=f"horizon {horizon}", progress=progress)
    network.eval().requires_grad_(False)


@torch.no_grad()
def fit_calibration(predictor: LogitPredictor, trace: PackedTrace) -> Calibration:
    """Scale and bias of every horizon and layer by logistic regression on what was really routed."""
    fitted = [_fit_horizon(predictor, trace, horizon) for horizon in predictor.horizons]
    scale, bias = (torch.stack(each) for each in zip(*fitted, strict=True))
    return Calibration(scale, bias)


def usable_rows(trace: PackedTrace) -> Tensor:
    """Rows of sequences of at least two tokens: a decision in the token before needs one."""
    lengths = torch.bincount(trace.sequence)
    return torch.nonzero(lengths[trace.sequence] > 1).flatten()


class TrainingSight(Sight):
    """A Sight that also tells the trainer which rows it is about."""

    def __init__(self, trace: PackedTrace, rows: Tensor, decision: Decision) -> None:
        super().__init__(trace, rows, decision)
        self.target_rows = rows


def sights_of(trace: PackedTrace, rows: Tensor, horizon: int) -> list[TrainingSight]:
    """One for each target layer. Where the decision is taken in the token before, a sequence's first token is replaced
    by its second."""
    found = []
    for target in range(trace.geometry.layers):
        decision = Decision(target, horizon)
        back, _ = decision.place(trace.geometry.layers)
        assert back <= 1, f"horizon {horizon} of {trace.geometry.layers} layers reaches back {back} tokens"
        own = torch.where(trace.place[rows] < back, rows + 1, rows)
        found.append(TrainingSight(trace, own, decision))
    return found


def _true_logits(trace: PackedTrace, routers: Routers, sights: list[TrainingSight]) -> Tensor:
    """[T, R, E]: what the true routers said; the traced ids are their best k."""
    assert trace.states is not None, "networks learn from hidden states"
    residual = trace.states.residual
    said = [
        routers.logits(target, routers.normed(target, residual[sight.target_rows, target]))
        for target, sight in enumerate(sights)
    ]
    return torch.stack(said)


def _fit_horizon(predictor: LogitPredictor, trace: PackedTrace, horizon: int) -> tuple[Tensor, Tensor]:
    """([L], [L])."""
    usable = usable_rows(trace)
    sights = sights_of(trace, usable[:: max(1, len(usable) // _CALIBRATION_ROWS)], horizon)
    fitted = [
        logistic_line(margins(predictor.logits(sight), predictor.routers.top_k), sight.truth()) for sight in sights
    ]
    scale, bias = torch.stack(fitted).unbind(1)
    return scale, bias
