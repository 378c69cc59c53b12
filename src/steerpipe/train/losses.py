"""What a layered network is told: its logits against those of the true routers. T layers, R rows, E experts."""

from collections.abc import Callable
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from steerpipe.predict.calibration import margins

Loss = Callable[[Tensor, Tensor, int], Tensor]  # (said, true logits, top_k) → scalar

SHARPNESS = 8.0  # nano, one ahead, rank 32, 300 steps: recall .8905 / .8918 / .8926 / .8924 at 2 / 4 / 8 / 16
_RANK_WEIGHTS = ((10, 3.0), (30, 1.5))  # up to this true rank, this weight; .5 beyond (arXiv 2511.10676)
_HINGE_SHARE, _HINGE_MARGIN = 0.3, 0.1


def margin_loss(said: Tensor, true: Tensor, top_k: int, sharpness: float = SHARPNESS) -> Tensor:
    """Cross entropy between soft memberships: how far each expert lies above the cut, in both. [T, R, E] each.

    The hard labels alone teach less: with them a head of rank 32 lost to the untrained router in nano's layer 12.
    """
    wanted = torch.sigmoid(sharpness * margins(true, top_k))
    return _by_layer(F.binary_cross_entropy_with_logits(sharpness * margins(said, top_k), wanted, reduction="none"))


def divergence_loss(said: Tensor, true: Tensor, top_k: int) -> Tensor:
    """KL of the true router's distribution to the predicted one: the estimator's."""
    del top_k  # the distribution is over all experts
    each = F.kl_div(F.log_softmax(said, -1), F.log_softmax(true, -1), reduction="none", log_target=True)
    return _by_layer(each) * said.shape[-1]


def weighted_loss(said: Tensor, true: Tensor, top_k: int) -> Tensor:
    """The pre-attention predictor's first loss: cross entropy of membership, weighted by true rank."""
    ranks = true.argsort(-1, descending=True).argsort(-1)
    weights = torch.full_like(said, 0.5)
    for last, weight in reversed(_RANK_WEIGHTS):
        weights = torch.where(ranks < last, weight, weights)
    routed = (ranks < top_k).to(said.dtype)
    return _by_layer(F.binary_cross_entropy_with_logits(said, routed, weights, reduction="none"))


def ranking_loss(said: Tensor, true: Tensor, top_k: int) -> Tensor:
    """Its second: the first, plus a hinge that keeps the order of neighbours among the true top 10."""
    best = true.topk(min(_RANK_WEIGHTS[0][0], true.shape[-1]), dim=-1).indices
    ordered = said.gather(-1, best)
    hinge = F.relu(_HINGE_MARGIN - (ordered[..., :-1] - ordered[..., 1:]))
    return weighted_loss(said, true, top_k) + _HINGE_SHARE * _by_layer(hinge)


class PreAttentionLoss(StrEnum):
    """The two that were published with the pre-attention predictor."""

    WEIGHTED = "weighted"
    RANKING = "ranking"

    @property
    def function(self) -> Loss:
        return ranking_loss if self is PreAttentionLoss.RANKING else weighted_loss


def _by_layer(values: Tensor) -> Tensor:
    """Mean over rows and experts, sum over layers: each layer learns as if it were alone."""
    return values.mean((1, 2)).sum()
