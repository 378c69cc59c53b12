"""When is each expert used next? Read off the hidden state, for eviction towards Belady.

At a few *taps* (MoE layers) the residual stream of the token and its running mean say how soon every expert of every
layer is used again. A forecast is a score per expert: its log-odds of early use, in doublings of LFRU's count, so that
the policy `reuse` ranks by score + log2(count) and falls back to LFRU where nobody says anything.

n = L * E experts in the order of (layer, expert), H hidden, P taps, r rank, R rows.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from steerpipe.core.errors import ConfigError
from steerpipe.predict.protocol import Cost

_EPS = 1e-6  # of the mean square
_TENSORS = ("project", "offset", "expand", "bias")


@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """What a forecast was made for."""

    layers: int
    experts: int  # per layer
    hidden: int
    taps: tuple[int, ...]  # MoE layers after whose router a forecast is made, ascending
    context_tokens: float  # half-life of the running mean of a tap's residual
    count_tokens: float  # half-life of the LFRU counts that the scores are added to
    horizon_tokens: float  # a use in d tokens is worth exp(-d / horizon)

    def __post_init__(self) -> None:
        ordered = list(self.taps) == sorted(set(self.taps))
        if not self.taps or not ordered or not 0 <= self.taps[0] <= self.taps[-1] < self.layers:
            raise ConfigError(
                f"taps {list(self.taps)} of {self.layers} MoE layers", fix="name some of the layers, ascending"
            )
        if min(self.context_tokens, self.count_tokens, self.horizon_tokens) <= 0:
            raise ConfigError("a forecast of no tokens", fix="give half-lives and a horizon above 0")

    @property
    def keeps(self) -> float:
        """Share of the running mean that is left after a token."""
        return math.exp2(-1.0 / self.context_tokens)


def normed(states: Tensor) -> Tensor:
    """[..., H] fp32 with a mean square of 1: residuals grow from layer to layer and say no more for it."""
    return rms_norm(states.float(), states.shape[-1:], eps=_EPS)


def tap_inputs(residual: Tensor, context: Tensor) -> Tensor:
    """[R, 2H]: what a tap looks at. `residual` is normed; `context` its running mean, this token included."""
    return torch.cat([residual, normed(context)], dim=-1)


@dataclass(frozen=True, slots=True)
class ReuseForecast:
    """A trained forecast. Pure; all its tensors lie on one device."""

    config: ReuseConfig
    project: Tensor  # [P, 2H, r]
    offset: Tensor  # [P, r]
    expand: Tensor  # [P, r, n], or [1, r, n] for all taps
    bias: Tensor  # [P, n]
    history: float  # log-odds that one doubling of the count is worth

    def log_odds(self, tap: int, inputs: Tensor) -> Tensor:
        """[R, n] fp32 of an early use, without the history. `tap` counts taps; `inputs` [R, 2H] from `tap_inputs`."""
        seen = silu(torch.addmm(self.offset[tap], inputs, self.project[tap]))  # [R, r]
        return torch.addmm(self.bias[tap], seen, self.expand[min(tap, len(self.expand) - 1)])

    def scores(self, tap: int, inputs: Tensor) -> Tensor:
        """[R, n] fp32: the log-odds in doublings of the count."""
        return self.log_odds(tap, inputs) / self.history

    def cost(self) -> Cost:
        """Of one token: all taps."""
        taps, inputs, rank = self.project.shape
        tensors = self.tensors().values()
        return Cost(1 + sum(each.numel() for each in tensors), taps * rank * (inputs + self.bias.shape[1]))

    def to(self, device: torch.device | str) -> "ReuseForecast":
        return self.mapped(lambda tensor: tensor.to(device, torch.float32))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "ReuseForecast":
        """The same forecast with other tensors."""
        project, offset, expand, bias = map(change, self.tensors().values())
        return replace(self, project=project, offset=offset, expand=expand, bias=bias)

    def tensors(self) -> dict[str, Tensor]:
        return {"project": self.project, "offset": self.offset, "expand": self.expand, "bias": self.bias}

    def said(self) -> dict[str, Any]:
        """JSON-able: with `tensors` all that `restore` needs."""
        return {"history": self.history, **asdict(self.config)}

    @classmethod
    def restore(cls, said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """ValueError, KeyError or TypeError: not what `said` and `tensors` gave."""
        fields = dict(said)
        history = float(fields.pop("history"))
        config = ReuseConfig(**{**fields, "taps": tuple(fields["taps"])})
        project, offset, expand, bias = (tensors[name].float() for name in _TENSORS)
        taps, rank, experts = len(config.taps), project.shape[-1], config.layers * config.experts
        shapes = (project.shape[:-1], offset.shape, expand.shape[1:], bias.shape)
        expected = ((taps, 2 * config.hidden), (taps, rank), (rank, experts), (taps, experts))
        if shapes != expected or len(expand) not in (1, taps):
            raise ValueError(f"tensors of {[list(each.shape) for each in (project, offset, expand, bias)]}")
        if not history > 0:
            raise ValueError(f"a doubling of the count is worth {history}")
        return cls(config, project, offset, expand, bias, history)


class LiveReuse:
    """A forecast along one text as it is decoded. One row at a time; nothing waits for the device."""

    def __init__(self, forecast: ReuseForecast) -> None:
        self._forecast = forecast  # shared: a text of its own costs one running mean per tap
        self._tap_of = {layer: tap for tap, layer in enumerate(forecast.config.taps)}
        self._context: dict[int, Tensor] = {}  # by tap: [1, H]

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers at which `at` has something to say."""
        return self._forecast.config.taps

    def restart(self) -> None:
        """Another text begins."""
        self._context.clear()

    def at(self, layer: int, residual: Tensor) -> Tensor | None:
        """[n] fp32 scores, on the forecast's device, once per token and tap, in their order; None: `layer` is no tap.

        `residual` [1, H]: after the attention of `layer`, before the norm in front of its MoE.
        """
        tap = self._tap_of.get(layer)
        if tap is None:
            return None
        now = normed(residual)
        kept = self._forecast.config.keeps
        before = self._context.get(tap)
        mean = (1 - kept) * now if before is None else torch.lerp(before, now, 1 - kept)
        self._context[tap] = mean
        return self._forecast.scores(tap, tap_inputs(now, mean))[0]
