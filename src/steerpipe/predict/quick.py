"""Heads and router lookahead in a running pass on a CPU, with numpy: a row asks some thirty operations of a few hundred
numbers each, of which torch takes three to five microseconds and numpy one.

They say what the predictors say (`predict.head`, `predict.lookahead`), to rounding; whoever else predicts is asked in
the usual way. R rows of the step, L MoE layers, k routed experts, E experts, H hidden, D inputs, r rank.
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
    return _InSight(predictor)


class _ByHorizon:
    def __init__(self, of: Mapping[int, Quick]) -> None:
        self._of = of

    def probabilities(self, memory: Memory, number: int, horizon: int) -> Floats:
        return self._of[horizon].probabilities(memory, number, horizon)


class _InSight:
    """The usual way."""

    def __init__(self, predictor: RoutingPredictor) -> None:
        self._predictor = predictor

    def probabilities(self, memory: Memory, number: int, horizon: int) -> Floats:
        target = (number + horizon) % memory.geometry.layers
        found: Floats = self._predictor.probabilities(LiveSight(memory, Decision(target, horizon))).numpy()
        return found


class _Scored:
    """What scores experts like a router: the target's own router, on what is known of its input."""

    def __init__(self, routers: Routers, calibration: Calibration, *, shared: bool) -> None:
        self._weights = [_floats(each) for each in routers.weights]  # [E, H] each
        self._biases = None if routers.biases is None else [_floats(each) for each in routers.biases]
        self._norms = [_floats(each) for each in routers.norms]  # [H] each
        self._eps, self._top_k, self._shared = np.float32(routers.eps), routers.top_k, shared
        self._scale, self._bias = _floats(calibration.scale), _floats(calibration.bias)  # [horizons, L]

    def state(self, now: StepMemory, number: int) -> Floats:
        """[R, H]: the residual, and what the shared expert adds to it."""
        state = _floats(now.residual[number])
        return state + _floats(now.shared[number]) if self._shared else state

    def normed(self, state: Floats, target: int) -> Floats:
        mean = np.einsum("rh,rh->r", state, state)[:, None] / np.float32(state.shape[1])
        found: Floats = state / np.sqrt(mean + self._eps) * self._norms[target]
        return found

    def routed(self, normed: Floats, target: int) -> Floats:
        """[R, E]: the router's logits."""
        logits: Floats = normed @ self._weights[target].T
        return logits if self._biases is None else logits + self._biases[target]

    def calibrated(self, logits: Floats, place: int, target: int) -> Floats:
        """See predict.calibration. `place` among the predictor's horizons."""
        cut = logits.shape[1] - self._top_k
        ordered = np.partition(logits, (cut - 1, cut), axis=1)
        margins = logits - (ordered[:, cut - 1] + ordered[:, cut])[:, None] * np.float32(0.5)
        odds = self._scale[place, target] * margins + self._bias[place, target]
        return _sigmoid(odds)


class QuickLookahead(_Scored):
    def __init__(self, lookahead: RouterLookahead) -> None:
        super().__init__(lookahead.routers, lookahead.calibration, shared=lookahead.shared)
        self._horizons = tuple(lookahead.horizons)
        self._vectors = None if lookahead.defaults is None else _floats(lookahead.defaults.vectors)  # [L, E, H]

    def probabilities(self, memory: Memory, number: int, horizon: int) -> Floats:
        now, target = memory.now, (number + horizon) % memory.geometry.layers
        state = self.state(now, number)
        if self._vectors is not None:
            told = self._vectors[number][now.experts[number].numpy()]  # [R, k, H]
            state = state + np.einsum("rk,rkh->rh", _floats(now.weights[number]), told)
        logits = self.routed(self.normed(state, target), target)
        return self.calibrated(logits, self._horizons.index(horizon), target)


class QuickHead(_Scored):
    """A head of one horizon."""

    def __init__(self, head: ResidualHead) -> None:
        network, routers = head.network, head.routers
        super().__init__(routers, head.calibration, shared=network.shared)
        self._inputs = frozenset(network.inputs)
        self._down, self._down_bias = _floats(network.down), _floats(network.down_bias)  # [L, r, D], [L, r]
        self._up, self._up_bias = _floats(network.up), _floats(network.up_bias)  # [L, E, r], [L, E]

    def probabilities(self, memory: Memory, number: int, horizon: int) -> Floats:
        crosses, target = divmod(number + horizon, memory.geometry.layers)
        normed = self.normed(self.state(memory.now, number), target)
        x = np.concatenate([normed, *self._told(memory, number, target, back=0 if crosses else 1)], axis=1)  # [R, D]
        hidden = x @ self._down[target].T + self._down_bias[target]  # [R, r]
        hidden *= _sigmoid(hidden)
        correction = hidden @ self._up[target].T + self._up_bias[target]
        return self.calibrated(self.routed(normed, target) + correction, 0, target)

    def _told(self, memory: Memory, number: int, target: int, *, back: int) -> list[Floats]:
        """Beside the state: the gates of the layer that has routed, and the newest of the target layer itself."""
        now, experts = memory.now, memory.geometry.experts
        told = []
        if Input.GATES in self._inputs:
            told.append(_spread(now.experts[number], _floats(now.weights[number]), experts))
        rows, chosen, state = _newest(memory, target, back)
        if Input.PREVIOUS_EXPERTS in self._inputs:
            hot = np.zeros((len(now.sequences), experts), dtype=np.float32)
            if rows is not None:
                hot[rows] = _spread(chosen, np.ones((1, 1), dtype=np.float32), experts)
            told.append(hot)
        if Input.PREVIOUS_RESIDUAL in self._inputs:
            past = np.zeros((len(now.sequences), memory.geometry.hidden), dtype=np.float32)
            if rows is not None:
                past[rows] = _floats(state)
            told.append(self.normed(past, target))
        return told


def _newest(memory: Memory, target: int, back: int) -> tuple[slice | NDArray[np.intp] | None, Tensor, Tensor]:
    """The rows [n] whose token of so many steps ago is known, and their experts [n, k] and residuals [n, H] at layer
    `target`; None: there is no such step."""
    now, then = memory.now, memory.at(back)
    if then is None or target not in then.residual:
        return None, now.tokens, now.tokens
    chosen, state = then.experts[target], then.residual[target]
    if then.sequences == now.sequences:
        return slice(None), chosen, state
    _, places, there = memory.back(back)
    return np.flatnonzero(there.numpy()), chosen[places[there]], state[places[there]]


def _floats(tensor: Tensor) -> Floats:
    """A view where it can be one."""
    found: Floats = tensor.detach().float().numpy()
    return found


def _spread(experts: Tensor, values: Floats, count: int) -> Floats:
    """[R, k] numbers and [R, k] or [R, 1] values → [R, E]."""
    hot = np.zeros((len(experts), count), dtype=np.float32)
    hot[np.arange(len(experts))[:, None], experts.numpy()] = values
    return hot


def _sigmoid(x: Floats) -> Floats:
    """By tanh, which overflows nowhere."""
    half = np.float32(0.5)
    found: Floats = np.tanh(x * half) * half + half
    return found
