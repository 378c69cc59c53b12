"""Default vectors: what an expert adds on average. L layers, E experts, H hidden, R rows."""

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steerpipe.predict.lookahead import DefaultVectors
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.routers import Routers
from steerpipe.trace.seams import find_seams
from steerpipe.train.progress import Progress, silent

_CHUNK = 65_536  # rows through one layer's experts at a time


@torch.no_grad()
def collect_defaults(
    model: PreTrainedModel, routers: Routers, trace: PackedTrace, progress: Progress = silent
) -> DefaultVectors:
    """Mean unweighted output of every expert over the tokens routed to it; an expert that none was routed to takes the
    mean over its layer's tokens. The experts run again on the traced residuals: model and trace on one device."""
    assert trace.states is not None, "default vectors need hidden states"
    geometry = trace.geometry
    sums = torch.zeros(geometry.layers, geometry.experts, geometry.hidden, device=trace.device)
    counts = torch.zeros(geometry.layers, geometry.experts, dtype=torch.int64, device=trace.device)
    for layer, seam in enumerate(find_seams(model)):
        for rows in torch.arange(trace.rows, device=trace.device).split(_CHUNK):
            inputs = routers.normed(layer, trace.states.residual[rows, layer]).to(model.dtype)
            _add_outputs(
                cast("Any", seam.experts), inputs, trace.experts[rows, layer].long(), sums[layer], counts[layer]
            )
        progress("default vectors", layer + 1, geometry.layers)
    return DefaultVectors.of_sums(sums, counts)


def _add_outputs(experts: Any, inputs: Tensor, routed: Tensor, sums: Tensor, counts: Tensor) -> None:
    """One expert per row and rank with weight 1: its output alone. inputs [R, H], routed [R, k]."""
    ones = torch.ones(len(inputs), 1, dtype=inputs.dtype, device=inputs.device)
    for rank in range(routed.shape[1]):
        chosen = routed[:, rank]
        outputs: Tensor = experts(inputs, chosen[:, None], ones)
        sums.index_add_(0, chosen, outputs.float())
        counts += torch.bincount(chosen, minlength=len(counts))
