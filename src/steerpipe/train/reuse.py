"""Learns when experts are used next, from the hidden states and routing of a stream of texts.

The target of an expert whose next use is d tokens away is exp(-d / horizon): near uses count, far ones are equal. What
is learnt is its log-odds, by cross-entropy, from r features of the tap's state, plus a share of the log count.
N tokens, n experts of all layers, P taps, H hidden, B rows of a step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from steerpipe.core.errors import InputError
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.reuse import ReuseConfig, ReuseForecast, normed, tap_inputs
from steerpipe.train.fit import Schedule, fit
from steerpipe.train.progress import Progress, silent
from steerpipe.train.reuse_streams import contexts, log_counts, next_use

_FIRST_HISTORY = 0.3  # log-odds per doubling before training; nano ends near it


@dataclass(frozen=True, slots=True)
class ReuseMaterial:
    """A stream of texts, one after the other, as a cache lives through them."""

    experts: Tensor  # [N, L, k]
    until: Tensor  # [N, n]: see next_use
    counts: Tensor  # [N, n]: see log_counts
    states: Mapping[int, Tensor]  # by tap layer: residual [N, H]
    means: Mapping[int, Tensor]  # by tap layer: its running mean [N, H]

    @property
    def tokens(self) -> int:
        return len(self.experts)

    def inputs(self, layer: int, rows: Tensor) -> Tensor:
        """[B, 2H] of a tap."""
        return tap_inputs(normed(self.states[layer][rows]), self.means[layer][rows])

    def first(self, tokens: int) -> "ReuseMaterial":
        """Views of the first tokens: material of a learning curve."""
        states = {layer: state[:tokens] for layer, state in self.states.items()}
        means = {layer: mean[:tokens] for layer, mean in self.means.items()}
        return ReuseMaterial(self.experts[:tokens], self.until[:tokens], self.counts[:tokens], states, means)


def gather_material(trace: PackedTrace, config: ReuseConfig) -> ReuseMaterial:
    """From a trace with states. The tables take 4 bytes per token and expert."""
    until = next_use(trace.experts, config.experts)
    counts = log_counts(trace.experts, config.experts, config.count_tokens)
    return ReuseMaterial(trace.experts, until, counts, *gather_states(trace, config))


def gather_states(trace: PackedTrace, config: ReuseConfig) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """(residuals, running means), each by tap layer."""
    if trace.states is None:
        raise InputError(
            "a reuse forecast learns from hidden states, which this trace does not have",
            fix="trace with states, or give a model and prompts",
        )
    states = {layer: trace.states.residual[:, layer] for layer in config.taps}
    return states, {layer: contexts(state, trace.place, config.keeps) for layer, state in states.items()}


class ReuseNetwork(nn.Module):
    """The forecast as something that learns."""

    def __init__(self, config: ReuseConfig, rank: int, *, shared: bool, history: float | None) -> None:
        """`shared`: one expansion for all taps; `history`: as it shall be, None: learnt."""
        super().__init__()
        taps, experts = len(config.taps), config.layers * config.experts
        self.config = config
        self.project = nn.Parameter(torch.randn(taps, 2 * config.hidden, rank) / math.sqrt(config.hidden))
        self.offset = nn.Parameter(torch.zeros(taps, rank))
        self.expand = nn.Parameter(torch.zeros(1 if shared else taps, rank, experts))
        self.bias = nn.Parameter(torch.zeros(taps, experts))
        first = math.log(math.expm1(_FIRST_HISTORY if history is None else history))
        self.history = nn.Parameter(torch.tensor(first), requires_grad=history is None)

    def forecast(self) -> ReuseForecast:
        """Shares its tensors."""
        history = float(softplus(self.history.detach()))
        return ReuseForecast(self.config, self.project, self.offset, self.expand, self.bias, history)

    def loss(self, material: ReuseMaterial, tap: int, rows: Tensor) -> Tensor:
        """Mean cross-entropy of `rows` [B] (none of them 0) at one tap."""
        wanted, past = tap_targets(material, self.config, tap, rows)
        forecast = ReuseForecast(self.config, self.project, self.offset, self.expand, self.bias, 1.0)
        own = forecast.log_odds(tap, material.inputs(self.config.taps[tap], rows))  # [B, n]
        return binary_cross_entropy_with_logits(own + softplus(self.history) * past, wanted)


def tap_targets(material: ReuseMaterial, config: ReuseConfig, tap: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """([B, n] worth of the next use after the tap, [B, n] log2 of the counts there), both fp32.

    Layers up to the tap have been used by this token: their next use is a later one's. The others' may be its own.
    """
    layer = config.taps[tap]
    behind = (layer + 1) * config.experts  # experts of the layers up to the tap
    until = _at_tap(material.until, rows, behind)
    until[:, behind:] -= 1.0  # told of the token before
    past = _at_tap(material.counts, rows, behind)
    layers = torch.arange(config.layers, device=rows.device).repeat_interleave(config.experts)
    distance = until + (layers - layer) / config.layers  # in tokens
    return torch.exp(distance / -config.horizon_tokens), past


def _at_tap(table: Tensor, rows: Tensor, behind: int) -> Tensor:
    """[B, n] fp32: of this token for the layers up to the tap, of the token before for the others."""
    now, before = table.index_select(0, rows), table.index_select(0, rows - 1)
    return torch.cat([now[:, :behind], before[:, behind:]], dim=1).float()


def train_reuse(
    material: ReuseMaterial,
    config: ReuseConfig,
    schedule: Schedule,
    *,
    rank: int,
    shared: bool = True,
    history: float | None = None,
    progress: Progress = silent,
) -> ReuseForecast:
    """On the material's device; the same seed gives the same forecast on a CPU.

    `shared`: one expansion for all taps; `history`: log-odds per doubling of the count, None: learnt.
    """
    torch.manual_seed(schedule.seed)
    device = material.experts.device
    network = ReuseNetwork(config, rank, shared=shared, history=history).to(device)

    def loss_of(rows: Tensor) -> Tensor:
        parts = rows.tensor_split(len(config.taps))
        losses = [network.loss(material, tap, part) for tap, part in enumerate(parts) if len(part)]
        return torch.stack(losses).mean()

    learnt = [each for each in network.parameters() if each.requires_grad]
    fit(learnt, loss_of, _rows(material), schedule, what="reuse", progress=progress)
    return network.forecast().mapped(lambda tensor: tensor.detach().clone())


def _rows(material: ReuseMaterial) -> Tensor:
    """All but the first token, which nothing was before."""
    return torch.arange(1, material.tokens, device=material.experts.device)
