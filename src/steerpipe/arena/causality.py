"""Does a predictor peek? What does not exist at its decision is scrambled: its answer must not change by a bit.

A sight refuses to show the future, but a predictor may keep a trace, or reach around the sight. This test needs no
co-operation.
"""

from dataclasses import replace

import torch
from torch import Tensor

from steerpipe.core.errors import PeekError
from steerpipe.predict.protocol import RoutingPredictor
from steerpipe.predict.records import PackedTrace, States
from steerpipe.predict.sight import Decision, Sight, rows_for


@torch.no_grad()
def check_causal(predictor: RoutingPredictor, trace: PackedTrace, decision: Decision, seed: int = 0) -> None:
    """PeekError if the answer for a row depends on what comes after its decision; all rows are asked for at once.

    Looked at are the last row, whose own token is half hidden, and a middle one, after which its text goes on.
    """
    rows = rows_for(trace, decision)
    if not len(rows):
        return
    said = predictor.probabilities(Sight(trace, rows, decision))
    for end in _cuts(trace, rows):
        hidden = scrambled(trace, int(rows[end - 1]), decision, seed)
        again = predictor.probabilities(Sight(hidden, rows, decision))
        if not torch.equal(_comparable(said[:end]), _comparable(again[:end])):
            raise PeekError(
                f"{predictor.name} answers for layer {decision.target} at horizon {decision.horizon} with what comes "
                "later",
                fix="use what `sight` shows and nothing else",
            )


def _comparable(said: Tensor) -> Tensor:
    """NaN is no probability, which is another fault than a peek: here it equals itself."""
    return said.nan_to_num(nan=2.0)


def _cuts(trace: PackedTrace, rows: Tensor) -> list[int]:
    """How many of `rows` are left: all, and those up to a middle one that is not the last of its text."""
    followed = torch.nonzero(trace.sequence[rows[:-1]] == trace.sequence[rows[1:]]).flatten()
    return [len(rows), *(int(row) + 1 for row in followed[len(followed) // 2 :][:1])]


def scrambled(trace: PackedTrace, row: int, decision: Decision, seed: int) -> PackedTrace:
    """`trace` with everything replaced by noise that does not exist when `decision` is taken for `row`."""
    random = torch.Generator().manual_seed(seed)
    back, layer = decision.place(trace.geometry.layers)
    at, routed_end = row - back, layer + (1 if decision.horizon else 0)  # the first layer whose routing is not there
    shape = trace.experts.shape
    drawn = torch.rand(shape[0], shape[1], trace.geometry.experts, generator=random).argsort(-1)[..., : shape[2]]

    def noise(tensor: Tensor, first_layer: int) -> Tensor:
        other = torch.randn(tensor.shape, generator=random).to(tensor)
        return _replaced(tensor, other, at, first_layer)

    states = trace.states
    if states is not None:
        shared = None if states.shared is None else noise(states.shared, routed_end)
        states = States(noise(states.entering, layer + 1), noise(states.residual, routed_end), shared)
    tokens = trace.tokens.clone()
    tokens[at + 1 :] = torch.randint(0, int(trace.tokens.max()) + 1, tokens[at + 1 :].shape, generator=random).to(
        tokens
    )
    return replace(
        trace,
        tokens=tokens,
        experts=_replaced(trace.experts, drawn.to(trace.experts), at, routed_end),
        weights=None if trace.weights is None else noise(trace.weights, routed_end),
        states=states,
    )


def _replaced(tensor: Tensor, other: Tensor, at: int, first_layer: int) -> Tensor:
    """`tensor` [N, L, ...] with `other` in rows after `at`, and in row `at` from `first_layer` on."""
    changed = tensor.clone()
    changed[at + 1 :] = other[at + 1 :]
    changed[at, first_layer:] = other[at, first_layer:]
    return changed
