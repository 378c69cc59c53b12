"""Watches the experts of a transformers model through forward hooks. Nothing in the model is changed.

    with MoERouterTracker(model) as tracker:
        model(tokens)
        (routed,) = tracker.take()

Ids and weights are the ones that the experts module is called with, so they are right whatever the router did before
(groups, biases, scaling).

R rows of a pass (batch x positions, row after row), L MoE layers, k routed experts, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from steerpipe.core.errors import ConfigError, UnsupportedConfigError
from steerpipe.predict.records import Geometry, States
from steerpipe.trace.seams import Seam, find_seams
from steerpipe.trace.watch import RoutingWatch, StateWatch


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass, on the model's device."""

    experts: Tensor  # [R, L, k] int16, in the router's rank order
    weights: Tensor  # [R, L, k] in the router's dtype, as applied to the experts' outputs
    states: States | None  # [R, L, H] each


class MoERouterTracker:
    """Hooks from now until `close`. One thread at a time.

    What a pass leaves stays on the model's device until it is taken; nothing here waits for the device.
    """

    def __init__(self, model: PreTrainedModel, *, states: bool = False, state_dtype: torch.dtype | None = None) -> None:
        """`states`: the hidden states too, as `state_dtype` (None: the model's own); 2 or 3 x L x H numbers per token.

        ConfigError: not a transformers MoE model, or (with states) one whose layers are not understood.
        """
        seams = find_seams(model)
        self.layers = len(seams)
        self.experts = _experts_per_layer(seams)
        self.hidden = int(model.config.get_text_config().hidden_size)
        self._routing = [RoutingWatch(seam) for seam in seams]
        self._states = [StateWatch(seam, state_dtype) for seam in seams] if states else []
        self._watches: list[RoutingWatch | StateWatch] = [*self._routing, *self._states]
        self._handles = [handle for watch in self._watches for handle in watch.hooks()]

    def geometry(self, routed: Pass) -> Geometry:
        """Only a pass says how many experts a token gets: families have several names for it."""
        return Geometry(self.layers, self.experts, routed.experts.shape[-1], self.hidden)

    def take(self) -> list[Pass]:
        """Every forward pass since the last call, oldest first; they are forgotten here.

        ConfigError: the last pass did not go through every MoE layer, for instance because it was interrupted.
        """
        counts = {len(watch.experts) for watch in self._routing}
        if len(counts) > 1:
            self.forget()
            raise ConfigError("a forward pass ended before the last MoE layer", fix="run whole passes, then take them")
        passes = [self._pass(number) for number in range(counts.pop())]
        self.forget()
        return passes

    def forget(self) -> None:
        """Drops what was seen."""
        for watch in self._watches:
            watch.forget()

    def close(self) -> None:
        """Removes the hooks. Twice is once."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pass(self, number: int) -> Pass:
        widths = {watch.experts[number].shape[-1] for watch in self._routing}
        if len(widths) > 1:
            raise UnsupportedConfigError(
                f"layers route to {sorted(widths)} experts per token", fix="traces need the same number in every layer"
            )
        experts = torch.stack([watch.experts[number] for watch in self._routing], dim=1)
        weights = torch.stack([watch.weights[number] for watch in self._routing], dim=1)
        return Pass(experts, weights, self._pass_states(number) if self._states else None)

    def _pass_states(self, number: int) -> States:
        rows = len(self._routing[0].experts[number])
        kept = [state for watch in self._states for state in (watch.entering[number], watch.residual[number])]
        if any(state.shape != (rows, self.hidden) for state in kept):
            raise UnsupportedConfigError(
                f"a layer's state is not one vector of {self.hidden} numbers for each of {rows} tokens",
                fix="trace this model without hidden states",
            )
        shared = None
        if all(watch.shared for watch in self._states):
            shared = torch.stack([watch.shared[number] for watch in self._states], dim=1)
        return States(
            torch.stack([watch.entering[number] for watch in self._states], dim=1),
            torch.stack([watch.residual[number] for watch in self._states], dim=1),
            shared,
        )


def _experts_per_layer(seams: Sequence[Seam]) -> int:
    counts = {seam.experts.num_experts for seam in seams}
    if len(counts) > 1:
        raise UnsupportedConfigError(
            f"layers have {sorted(counts)} experts", fix="traces need the same number in every layer"
        )
    return counts.pop()
