"""A predictor of your own in the arena: each expert of the layer before votes for those that followed it in training.

    python examples/write_a_predictor.py TRACES                   (a folder that `steerpipe trace` wrote)
    steerpipe arena TRACES --plugin examples/write_a_predictor.py

It answers from what `sight` shows and from nothing else: asking for what does not exist yet is a PeekError.
"""

import sys

import torch
from torch import Tensor

from steerpipe.predict.protocol import Cost
from steerpipe.predict.sight import Decision, Sight, rows_for
from steerpipe.train.material import Material


class Followers:
    name = "followers"
    horizons = (1,)  # one layer ahead: the router of the layer before has just decided

    def __init__(self, after: Tensor) -> None:
        self.after = after  # [layers, experts, experts]: how often each expert followed each expert

    @classmethod
    def trained(cls, material: Material) -> "Followers":
        """The arena calls it with the training prompts; the held-out ones are not in `material`."""
        trace, shape = material.trace, material.trace.geometry
        after = torch.zeros(shape.layers, shape.experts, shape.experts)
        for layer in range(shape.layers):
            decision = Decision(layer, horizon=1)
            rows = rows_for(trace, decision)  # layer 0 is decided in the token before: not for the first token
            sight = Sight(trace, rows, decision)
            before = sight.hot(sight.layer)  # [rows, experts]: 1 for each that was routed to
            together, alone = before.T @ sight.truth(), before.sum(0)
            after[layer] = together / alone.clamp_min(1)[:, None]
        return cls(after)

    def probabilities(self, sight: Sight) -> Tensor:
        """[rows, experts], from 0 to 1."""
        voters = sight.experts(sight.layer)  # [rows, k]
        return self.after[sight.decision.target][voters].mean(1)

    def cost(self) -> Cost:
        return Cost(parameters=self.after.numel(), multiply_adds=sum(self.after.shape[2:]))


if __name__ == "__main__":
    from steerpipe.cli import app

    app(["arena", *sys.argv[1:], "--plugin", __file__])
