"""What predicted steps said and came to, in the words that the device posted: kept between steps, counted later.

Counting takes the host longer than it has between two layers. Legend: S steps, L MoE layers, k experts per row, n
experts that are named, N guesses of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steerpipe.kernels.fetch import NOBODY, WHOLE
from steerpipe.model.gpu.mailbox import INDEX, MISSED, SENT

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """One step of one row. Words are stamp << 32 | what is said."""

    predictor: object
    stamp: int
    named: Counts  # [L, n]: behind each layer's router, of the layer that comes `ahead` layers later
    routed: Counts  # [L, k]: of the routers
    sent: Counts | None  # [L, N]: what each tap sent for; None: the host sends, and the router knows of no miss
    ahead: int = 1  # L at most


class LayerCounts(NamedTuple):
    """[L] each, by the layer that was predicted; see `predict.scorecard.Score`."""

    decisions: Counts
    routed: Counts
    named: Counts
    missing: Counts
    foreseen: Counts
    sent: Counts
    used: Counts
    ready: Counts


def count(new: Sequence[PredictedStep], last: PredictedStep | None = None) -> LayerCounts:
    """Of steps of one predictor, in their order, behind the `last` that was counted. A layer of which nothing was said
    counts nowhere: the first ones after a step in which nobody, or another, predicted.
    """
    steps = [*([] if last is None else [last]), *new]
    stamps = np.array([step.stamp for step in steps])  # [S]
    routed = np.stack([step.routed for step in steps])
    ahead = steps[0].ahead
    said, when = _shift(np.stack([step.named for step in steps]), stamps, ahead)
    spoken = (said & NOBODY != 0).any(2)  # who had been asked for another token posts nothing but the stamp
    known = (said >> 32 == when[..., None]).all(2) & (routed >> 32 == stamps[:, None, None]).all(2) & spoken  # [S, L]
    chosen, top_k = routed & INDEX, routed.shape[2]
    right = _among(chosen, said[..., :top_k] & INDEX)  # [S, L, k]
    missing = (routed & (MISSED | SENT) != 0) & known[..., None]
    sent = np.zeros((*known.shape, 1), dtype=np.bool_)
    used, ready = sent, sent
    if steps[0].sent is not None:
        mail, posted = _shift(np.stack([step.sent for step in steps if step.sent is not None]), stamps, ahead)
        low = mail & NOBODY
        begun = (low != NOBODY) & (low >> 16 > 0)
        sent = (mail >> 32 == posted[..., None]) & begun & known[..., None]  # [S, L, N]
        used = sent & _among(mail & INDEX, chosen)
        ready = used & (low >> 16 == WHOLE)
    every = np.broadcast_to(known[..., None], right.shape)
    masks = (known[..., None], every, right & every, missing, missing & right, sent, used, ready)
    return LayerCounts(*(mask[len(steps) - len(new) :].sum(axis=(0, 2)) for mask in masks))


def _shift(words: Counts, stamps: Counts, ahead: int) -> tuple[Counts, Counts]:
    """[S, L, …] by the layer that spoke → by the one `ahead` of it, across the boundary of two steps; and the stamps
    [S, L] of the steps in which it was said, -1 where there was none."""
    before, when = np.roll(words, ahead, axis=1), np.repeat(stamps[:, None], words.shape[1], axis=1)
    before[:, :ahead] = np.roll(words[:, -ahead:], 1, axis=0)  # of the step before; the first has none
    when[:, :ahead] = np.where(np.diff(stamps, prepend=stamps[:1]) == 1, stamps - 1, -1)[:, None]
    return before, when


def _among(these: Counts, those: Counts) -> NDArray[np.bool_]:
    """[…, a] and […, b] → […, a]: whether each is one of them."""
    found: NDArray[np.bool_] = (these[..., :, None] == those[..., None, :]).any(-1)
    return found
