"""Which layers drift: where an estimator names more of the routed experts than the model's own router does."""

import torch

from steerpipe.predict.logits import LogitPredictor
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.sight import Decision, Sight, rows_for

_ROWS = 16_384


@torch.no_grad()
def recall_by_layer(predictor: LogitPredictor, trace: PackedTrace, horizon: int, rows: int = _ROWS) -> list[float]:
    """Of the k experts, among the k named first; on evenly spaced rows."""
    found = []
    for target in range(trace.geometry.layers):
        decision = Decision(target, horizon)
        usable = rows_for(trace, decision)
        taken = usable[:: max(1, len(usable) // rows)]
        sight = Sight(trace, taken, decision)
        named = predictor.logits(sight).topk(trace.geometry.top_k).indices
        found.append(sight.truth().gather(1, named).mean())
    return [float(each) for each in torch.stack(found)]


def drifting_layers(estimator: LogitPredictor, lookahead: LogitPredictor, trace: PackedTrace) -> tuple[int, ...]:
    """Target layers where the estimator is the better one, on `trace`."""
    (horizon,) = estimator.horizons
    pairs = zip(recall_by_layer(estimator, trace, horizon), recall_by_layer(lookahead, trace, horizon), strict=True)
    return tuple(layer for layer, (estimated, looked) in enumerate(pairs) if estimated > looked)
