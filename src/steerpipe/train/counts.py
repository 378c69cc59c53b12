"""Predictors that are counted, not trained: frequency, previous token, co-activation, token affinity.

L layers, E experts, V vocabulary, N tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from steerpipe.predict.affinity import TokenAffinity
from steerpipe.predict.frequency import HORIZONS, Frequency
from steerpipe.predict.previous import PreviousToken
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.sight import Decision, Sight, rows_for
from steerpipe.predict.transition import Transition

_PSEUDO_TOKENS = 4.0  # a token seen so often is believed as much as the layer's mean; 2 and 8 are within .2 points
_LEAST = 0.5  # added to every count of a pair
_CHUNK = 65_536
_SCALES = torch.linspace(0.1, 1.0, 19)
_SCALE_ROWS = 8192


def count_frequency(trace: PackedTrace, horizons: Sequence[int] = HORIZONS) -> Frequency:
    return Frequency(_rates(trace), horizons)


def count_previous(trace: PackedTrace, horizons: Sequence[int] = HORIZONS) -> PreviousToken:
    """Pairs of neighbours within a sequence. What was never seen after use takes the expert's rate."""
    rates = _rates(trace)
    both, before = torch.zeros_like(rates), torch.zeros_like(rates)
    later = torch.nonzero(trace.place > 0).flatten()
    for layer in range(len(rates)):
        for rows in later.split(_CHUNK):
            now, then = trace.routed(rows, layer), trace.routed(rows - 1, layer)
            both[layer] += (now * then).sum(0)
            before[layer] += then.sum(0)
    uses = rates * len(trace.tokens)
    stays = (both + rates * _PSEUDO_TOKENS) / (before + _PSEUDO_TOKENS)
    comes = ((uses - both).clamp_min(0) + rates) / (len(later) - before + 1)
    return PreviousToken(stays.clamp(0, 1), comes.clamp(0, 1), horizons)


def count_transition(trace: PackedTrace, horizons: Sequence[int] = (1, 2, 3)) -> Transition:
    """Votes are log P(decided | target) - log P(decided | not target): naive Bayes. The scale is the best of a few."""
    rates = _rates(trace).clamp(1e-6, 1 - 1e-6)
    layers, experts = rates.shape
    votes = torch.zeros(len(horizons), layers, experts, experts, device=trace.device)
    for number, horizon in enumerate(horizons):
        for target in range(layers):
            votes[number, target] = _votes(trace, Decision(target, horizon))
    scale = torch.ones(len(horizons), layers, device=trace.device)
    counted = Transition(torch.logit(rates), votes, scale, horizons)
    for number, horizon in enumerate(horizons):
        for target in range(layers):
            scale[number, target] = _best_scale(counted, trace, Decision(target, horizon))
    return counted


def count_affinity(
    trace: PackedTrace,
    vocab: int,
    *,
    own_layers: int | None = None,
    crossing: int = 3,
    horizons: Sequence[int] = HORIZONS,
) -> TokenAffinity:
    """`own_layers`: layers that get a table (all by default); `crossing`: layers predicted from the token before."""
    rates = _rates(trace)
    layers = own_layers if own_layers is not None else trace.geometry.layers
    later = torch.nonzero(trace.place > 0).flatten()
    every = torch.arange(trace.rows, device=trace.device)
    own = _token_table(trace, every, every, vocab, rates[:layers])
    following = _token_table(trace, later, later - 1, vocab, rates[:crossing])
    return TokenAffinity(own.half(), following.half(), rates, horizons)


def _rates(trace: PackedTrace) -> Tensor:
    """[L, E] fp32: share of the tokens routed to each expert."""
    experts = trace.geometry.experts
    counts = [torch.bincount(layer.flatten().long(), minlength=experts) for layer in trace.experts.unbind(1)]
    return torch.stack(counts).float() / trace.rows


def _votes(trace: PackedTrace, decision: Decision) -> Tensor:
    """[E decided, E target]."""
    experts = trace.geometry.experts
    back, layer = decision.place(trace.geometry.layers)
    together = torch.zeros(experts, experts, device=trace.device)
    uses = torch.zeros(2, experts, device=trace.device)
    rows = rows_for(trace, decision)
    for piece in rows.split(_CHUNK):
        decided, target = trace.routed(piece - back, layer), trace.routed(piece, decision.target)
        together += decided.T @ target
        uses += torch.stack([decided.sum(0), target.sum(0)])
    with_target = (together + _LEAST) / (uses[1] + 2 * _LEAST)
    without = (uses[0][:, None] - together + _LEAST) / (len(rows) - uses[1] + 2 * _LEAST)
    return torch.log(with_target) - torch.log(without)


def _best_scale(counted: Transition, trace: PackedTrace, decision: Decision) -> Tensor:
    """The scale of least cross entropy on some rows."""
    rows = rows_for(trace, decision)[:_SCALE_ROWS]
    sight = Sight(trace, rows, decision)
    number = counted.horizons.index(decision.horizon)
    votes = counted.votes[number, decision.target][sight.experts(sight.layer)].sum(1)
    scales = _SCALES.to(trace.device)
    said = counted.prior[decision.target] + scales[:, None, None] * votes
    routed = sight.truth().expand(said.shape)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(said, routed, reduction="none").mean((1, 2))
    return scales[losses.argmin()]


def _token_table(trace: PackedTrace, rows: Tensor, tokens_at: Tensor, vocab: int, rates: Tensor) -> Tensor:
    """[V, A, E]: rates of the first A layers given a token, drawn to `rates` [A, E] where it is rare."""
    layers, experts = rates.shape
    tokens = trace.tokens[tokens_at]
    seen = torch.bincount(tokens, minlength=vocab).float()
    table = torch.empty(vocab, layers, experts, device=trace.device)
    for layer in range(layers):
        keys = tokens[:, None] * experts + trace.experts[rows, layer].long()
        counts = torch.bincount(keys.flatten(), minlength=vocab * experts).view(vocab, experts)
        table[:, layer] = (counts + _PSEUDO_TOKENS * rates[layer]) / (seen[:, None] + _PSEUDO_TOKENS)
    return table
