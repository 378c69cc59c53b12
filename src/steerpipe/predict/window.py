"""The routing history that the trajectory predictors read: multi-hot vectors, oldest first.

R rows, S steps of the window, E experts.
"""

from collections.abc import Collection
from enum import StrEnum

import torch
from torch import Tensor

from steerpipe.predict.sight import Sight

STEPS = 10  # the seed's window


class Window(StrEnum):
    LAYERS = "layers"  # the last layers of the token in which the decision is taken
    TOKENS = "tokens"  # the last tokens at the target layer
    BOTH = "both"  # the two, one after the other


def read_window(sight: Sight, window: Window, steps: int = STEPS, without: Collection[int] = ()) -> Tensor:
    """[R, S, E]; S is `steps`, or twice that for both. What does not exist is zeros, as are the layers `without`."""
    history = []
    if window in (Window.TOKENS, Window.BOTH):
        newest = 0 if sight.crosses else 1
        history += [sight.hot(sight.decision.target, back=newest + age) for age in reversed(range(steps))]
    if window in (Window.LAYERS, Window.BOTH):
        nothing = torch.zeros(sight.rows, sight.geometry.experts, device=sight.device)
        newest = sight.layer if sight.decision.horizon else sight.layer - 1
        for layer in range(newest - steps + 1, newest + 1):
            history.append(nothing if layer < 0 or layer in without else sight.hot(layer))
    return torch.stack(history, dim=1)


def window_length(window: Window, steps: int) -> int:
    return 2 * steps if window is Window.BOTH else steps
