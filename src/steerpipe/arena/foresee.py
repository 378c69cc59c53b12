"""Asks a predictor about whole texts and keeps its answers for the simulator."""

from collections.abc import Sequence

import numpy as np
import torch

from steerpipe.arena.evaluation import predictions
from steerpipe.arena.foresight import Foresight, ReuseForesight
from steerpipe.core.errors import InputError
from steerpipe.predict.protocol import RoutingPredictor, answers
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.reuse import LiveReuse, ReuseForecast
from steerpipe.predict.sight import Decision
from steerpipe.transfer.recorded import Recording


@torch.no_grad()
def foresee(predictor: RoutingPredictor, trace: PackedTrace, horizons: Sequence[int], named: int) -> Foresight:
    """Everything that `predictor` says over `trace` at `horizons` (of 1, 2 ... layers ahead), the `named` likeliest.

    A horizon of 0 may stand for one layer ahead: the simulator has all of a layer's compute before its router, so both
    have the same time to fetch in, which flatters horizon 0.
    """
    shape = (len(horizons), trace.rows, trace.geometry.layers, named)
    ranked, probability = np.zeros(shape, dtype=np.int16), np.zeros(shape, dtype=np.float32)
    for index, horizon in enumerate(horizons):
        for target in range(trace.geometry.layers):
            decision = Decision(target, horizon)
            if not answers(predictor, decision):
                continue
            for rows, said in predictions(predictor, trace, decision):
                ordered, experts = said.float().sort(dim=1, descending=True, stable=True)
                ranked[index, rows.cpu().numpy(), target] = experts[:, :named].to(torch.int16).cpu().numpy()
                probability[index, rows.cpu().numpy(), target] = ordered[:, :named].cpu().numpy()
    return Foresight(ranked, probability)


@torch.no_grad()
def foresee_reuse(forecast: ReuseForecast, trace: PackedTrace) -> ReuseForesight:
    """What `forecast` says over `trace`, which must have hidden states, token after token as in decode."""
    if trace.states is None:
        raise InputError(
            "a reuse forecast reads hidden states, which this trace does not have", fix="trace with states"
        )
    live, scores = LiveReuse(forecast), {}
    for token, place in enumerate(trace.place.tolist()):
        if place == 0:
            live.restart()
        for layer in live.taps:
            said = live.at(layer, trace.states.residual[token : token + 1, layer])
            assert said is not None, "it is a tap"
            scores[token, layer] = said.float().cpu().numpy()
    return ReuseForesight(scores, forecast.config.count_tokens)


def recording_of(trace: PackedTrace, name: str) -> Recording:
    """The same tokens for the simulator: decoded one after the other."""
    return Recording(
        name,
        trace.experts.cpu().numpy().astype(np.int64),
        trace.sequence.cpu().numpy().astype(np.int32),
        trace.geometry.experts,
    )
