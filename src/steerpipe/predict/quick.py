"""Heads and router lookahead in a running pass of one row on a CPU, with numpy: thirty operations of a few hundred
numbers each, of which torch takes three to five microseconds and numpy one.

They say what the predictors say (`predict.head`, `predict.lookahead`), to rounding. Several rows, one that was among
others in the step before, and whoever else predicts, are asked in the usual way: numpy takes all cores for a product of
matrices, whatever `threads` says.
L MoE layers, k routed experts, E experts, H hidden, D inputs, r rank.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.predict.by_horizon import ByHorizon
from steerpipe.predict.calibration import Calibration
from steerpipe.predict.head import Input, ResidualHead
from steerpipe.predict.live import LiveSight, Memory, StepMemory
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.protocol import RoutingPredictor
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Decision

Floats = NDArray[np.float32]


class Quick(Protocol):
    def probabilities(self, memory: Memory, number: int, horizon: int) -> Floats:
        """[R, E]: MoE layer `number` of the step that runs has just routed; what will the one `horizon` later?"""
        ...


def quick_of(predictor: RoutingPredictor) -> Quick:
    """As quick as there is a way; see `RoutingPredictor.probabilities`."""
    if isinstance(predictor, ByHorizon):
        return _ByHorizon({each: quick_of(own) for each in predictor.horizons if (own := predictor.at(each))})
    if isinstance(predictor, ResidualHead):
        return QuickHead(predictor)
    if isinstance(predictor, RouterLookahead):
        return QuickLookahead(predictor)
    return InSight(predictor)


class _ByHorizon:
    def __init__(self, of: Mapping[int, Quick]) -> None:
        self._of = of

    def probabilities(self, memory: Memory, number: int, horizon: int) -> Floats:
        return self._of[horizon].probabilities(memory, number, horizon)


class InSight:
    """The usual way."""

    def __init__(self, predictor: RoutingPredictor) -> None:
        self._predictor = predictor

    def probabilities(self, memory: Memory, number: int, horizon: int) -> Floats:
        target = (number + horizon) % memory.geometry.layers
        found: Floats = self._predictor.probabilities(LiveSight(memory, Decision(target, horizon))).numpy()
        return found


class _Scored(InSight):
    """What scores experts like a router: the target's own router, on what is known of its input."""

    def __init__(
        self, predictor: RoutingPredictor, routers: Routers, calibration: Calibration, *, shared: bool
    ) -> None:
        super().__init__(predictor)
        self._weights = [_floats(each) for each in routers.weights]  # [E, H] each
        self._biases = None if routers.biases is None else [_floats(each) for each in routers.biases]
        self._norms = [_floats(each) for each in routers.norms]  # [H] each
        self._eps, self._top_k, self._shared = np.float32(routers.eps), routers.top_k, shared
        self._scale, self._bias = _floats(calibration.scale), _floats(calibration.bias)  # [horizons, L]
        self._places = {horizon: place for place, horizon in enumerate(predictor.horizons)}

    def probabilities(self, memory: Memory, number: int, horizon: int) -> Floats:
        before = memory.at(1)
        if len(memory.now.sequences) > 1 or (before is not None and before.sequences != memory.now.sequences):
            return super().probabilities(memory, number, horizon)
        crosses, target = divmod(number + horizon, memory.geometry.layers)
        logits = self.logits(memory, number, target, back=0 if crosses else 1)
        return self._calibrated(logits, self._places[horizon], target)[None]

    def logits(self, memory: Memory, number: int, target: int, *, back: int) -> Floats:
        """[E]. `back`: in how many steps the newest routing of the target layer lies."""
        raise AssertionError("each kind has its own")

    def state(self, now: StepMemory, number: int) -> Floats:
        """[H]: the residual, and what the shared expert adds to it."""
        state: Floats = _floats(now.residual[number])[0]
        return state + _floats(now.shared[number])[0] if self._shared else state

    def normed(self, state: Floats, target: int) -> Floats:
        """[H] → [H]."""
        found: Floats = state / np.sqrt(state @ state / np.float32(len(state)) + self._eps) * self._norms[target]
        return found

    def routed(self, normed: Floats, target: int) -> Floats:
        """[E]: the router's logits."""
        logits: Floats = self._weights[target] @ normed
        return logits if self._biases is None else logits + self._biases[target]

    def _calibrated(self, logits: Floats, place: int, target: int) -> Floats:
        """See predict.calibration. `place` among the predictor's horizons."""
        cut = len(logits) - self._top_k
        ordered = np.partition(logits, (cut - 1, cut))
        margins = logits - (ordered[cut - 1] + ordered[cut]) * np.float32(0.5)
        return _sigmoid(self._scale[place, target] * margins + self._bias[place, target])


class QuickLookahead(_Scored):
    def __init__(self, lookahead: RouterLookahead) -> None:
        super().__init__(lookahead, lookahead.routers, lookahead.calibration, shared=lookahead.shared)
        self._vectors = None if lookahead.defaults is None else _floats(lookahead.defaults.vectors)  # [L, E, H]

    def logits(self, memory: Memory, number: int, target: int, *, back: int) -> Floats:
        now = memory.now
        state = self.state(now, number)
        if self._vectors is not None:
            told = self._vectors[number][now.experts[number][0].numpy()]  # [k, H]
            state = state + _floats(now.weights[number])[0] @ told
        return self.routed(self.normed(state, target), target)


class QuickHead(_Scored):
    """A head of one horizon."""

    def __init__(self, head: ResidualHead) -> None:
        network = head.network
        super().__init__(head, head.routers, head.calibration, shared=network.shared)
        self._inputs = frozenset(network.inputs)
        self._down, self._down_bias = _floats(network.down), _floats(network.down_bias)  # [L, r, D], [L, r]
        self._up, self._up_bias = _floats(network.up), _floats(network.up_bias)  # [L, E, r], [L, E]

    def logits(self, memory: Memory, number: int, target: int, *, back: int) -> Floats:
        normed = self.normed(self.state(memory.now, number), target)
        x = np.concatenate([normed, *self._told(memory, number, target, back)])  # [D]
        hidden = self._down[target] @ x + self._down_bias[target]  # [r]
        hidden *= _sigmoid(hidden)
        correction: Floats = self._up[target] @ hidden + self._up_bias[target]
        return self.routed(normed, target) + correction

    def _told(self, memory: Memory, number: int, target: int, back: int) -> list[Floats]:
        """Beside the state: the gates of the layer that has routed, and the newest of the target layer itself."""
        now, then, geometry = memory.now, memory.at(back), memory.geometry
        if then is not None and target not in then.residual:
            then = None
        told = []
        if Input.GATES in self._inputs:
            told.append(_spread(now.experts[number], _floats(now.weights[number])[0], geometry.experts))
        if Input.PREVIOUS_EXPERTS in self._inputs:
            nobody = np.zeros(geometry.experts, dtype=np.float32)
            told.append(nobody if then is None else _spread(then.experts[target], 1.0, geometry.experts))
        if Input.PREVIOUS_RESIDUAL in self._inputs:
            past = np.zeros(geometry.hidden, dtype=np.float32) if then is None else _floats(then.residual[target])[0]
            told.append(self.normed(past, target))
        return told


def _floats(tensor: Tensor) -> Floats:
    """A view where it can be one."""
    found: Floats = tensor.detach().float().numpy()
    return found


def _spread(experts: Tensor, values: Floats | float, count: int) -> Floats:
    """[1, k] numbers and [k] values, or one for all → [E]."""
    hot = np.zeros(count, dtype=np.float32)
    hot[experts[0].numpy()] = values
    return hot


def _sigmoid(x: Floats) -> Floats:
    """By tanh, which overflows nowhere."""
    half = np.float32(0.5)
    found: Floats = np.tanh(x * half) * half + half
    return found
