"""Weights of a blend. P parts, L layers, R rows, E experts."""

from collections.abc import Sequence

import torch

from steerpipe.predict.blend import Blend
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.stored import StoredPredictor
from steerpipe.train.logistic import logistic
from steerpipe.train.networks import sights_of, usable_rows
from steerpipe.train.progress import Progress, silent

_ROWS = 8192


@torch.no_grad()
def train_blend(
    parts: Sequence[StoredPredictor], trace: PackedTrace, horizon: int, progress: Progress = silent
) -> Blend:
    """Logistic regression on evenly spaced rows, per layer; best on rows that the parts were not trained on."""
    layers, count = trace.geometry.layers, len(parts)
    untuned = Blend(
        parts,
        horizon,
        torch.full((layers, count), 1 / count, device=trace.device),
        torch.zeros(layers, device=trace.device),
    )
    usable = usable_rows(trace)
    start = torch.tensor([1 / count] * count + [0.0], device=trace.device)
    found = []
    for sight in sights_of(trace, usable[:: max(1, len(usable) // _ROWS)], horizon):
        odds = untuned.log_odds(sight).flatten(0, 1)  # [R · E, P]
        columns = torch.cat([odds, torch.ones_like(odds[:, :1])], dim=1)
        found.append(logistic(columns, sight.truth().flatten(), start))
        progress("blend", len(found), layers)
    weights = torch.stack(found)  # [L, P + 1]
    return Blend(parts, horizon, weights[:, :-1].contiguous(), weights[:, -1].contiguous())
