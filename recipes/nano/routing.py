"""How a trained model routes: load, locality and lookahead, on held-out text.

load percent    of a layer's choices that fall on each expert; even is 100 / experts
load entropy    of these shares; 1 is even
reuse           share of a token's experts that the token before it used in the same layer
lookahead       share of layer l + d's experts among the top-k of its own norm and router applied to the residual stream
                after the attention of layer l, before any expert of layers l ... l + d - 1 has run
LRU hit rate    of one least-recently-used cache over all (layer, expert) pairs, decoding documents one after the other
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.nano.corpus import Tokens
from recipes.nano.device import DeviceBatch
from recipes.nano.evaluate import scoring_batches
from recipes.nano.model import Block, Decoder, MoeMlp, linear, load_entropy

DEPTHS = (1, 2, 3)
RESIDENCIES = (0.125, 0.25, 0.4, 0.5)


@dataclass(frozen=True)
class Routed:
    """One batch: the experts of every layer and token, and what lookahead from each layer would have said."""

    experts: Tensor  # [layers, T, k]
    guesses: dict[int, Tensor]  # depth -> [layers - depth, T, k]; entry l is the guess for layer l + depth
    follows: Tensor  # [T] bool: the position has one before it in the same window


@torch.no_grad()
def route(model: Decoder, batch: DeviceBatch) -> Routed:
    layout, x = model.layout(batch.positions, batch.bounds), model.embed(batch.inputs)
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    experts: list[Tensor] = []
    guesses: dict[int, list[Tensor]] = {depth: [] for depth in DEPTHS}
    for number, block in enumerate(blocks):
        x = block.attend(x, layout, model.compute)
        experts.append(_chosen(block, x, model))
        for depth in DEPTHS:
            if number + depth < len(blocks):
                guesses[depth].append(_chosen(blocks[number + depth], x, model))
        assert isinstance(block.mlp, MoeMlp), "routing is asked of a model whose layers all have experts"
        x = x + block.mlp(block.normed(x, model.compute))[0]
    return Routed(torch.stack(experts), {d: torch.stack(g) for d, g in guesses.items() if g}, batch.positions > 0)


def _chosen(block: Block, x: Tensor, model: Decoder) -> Tensor:
    assert isinstance(block.mlp, MoeMlp)
    return linear(block.normed(x, model.compute), block.mlp.router).float().topk(block.mlp.top_k).indices  # [T, k]


def overlap(left: Tensor, right: Tensor) -> Tensor:
    """Share of `left` [..., k] found in `right` [..., k]."""
    return (left[..., :, None] == right[..., None, :]).any(-1).double().mean(-1)


def routing_statistics(model: Decoder, tokens: Tokens, batch_tokens: int, lru_tokens: int = 8192) -> dict[str, Any]:
    """All figures of this file's head over the whole of `tokens`, the LRU's over its first `lru_tokens` positions."""
    model.eval()
    layers, experts = model.shape.layers, model.shape.experts
    load, reuse, pairs, positions = torch.zeros(layers, experts, dtype=torch.int64), torch.zeros(layers).double(), 0, 0
    hits = {depth: torch.zeros(layers - depth).double() for depth in DEPTHS if depth < layers}
    decoded: list[np.ndarray[Any, Any]] = []
    for batch, _ in scoring_batches(tokens, model.shape.context, batch_tokens, model.embedding.device):
        routed = route(model, batch)
        count = routed.experts.shape[1]
        load += torch.stack([layer.flatten().bincount(minlength=experts) for layer in routed.experts]).cpu()
        repeated = overlap(routed.experts[:, 1:], routed.experts[:, :-1])[:, routed.follows[1:]]
        reuse, pairs = reuse + repeated.sum(-1).cpu(), pairs + repeated.shape[1]
        for depth, guess in routed.guesses.items():
            hits[depth] += overlap(routed.experts[depth:], guess).sum(-1).cpu()
        if positions < lru_tokens:
            decoded.append(routed.experts[:, : lru_tokens - positions].transpose(0, 1).cpu().numpy())
        positions += count
    trace = np.concatenate(decoded)
    recall = {depth: (share / positions) for depth, share in hits.items()}
    return {
        "tokens": positions,
        "load_entropy": _rounded(load_entropy(load)),
        "least_expert_share_of_even": _rounded(load.min(-1).values * experts / load.sum(-1)),
        "most_expert_share_of_even": _rounded(load.max(-1).values * experts / load.sum(-1)),
        "load_percent": [_rounded(100 * layer / layer.sum()) for layer in load],
        "previous_token_reuse": _rounded(reuse / pairs),
        "lookahead_recall": {str(depth): round(float(share.mean()), 4) for depth, share in recall.items()},
        "lookahead_recall_by_source_layer": {str(depth): _rounded(share) for depth, share in recall.items()},
        "lru_hit_rate": {str(r): round(lru_hit_rate(trace, int(r * layers * experts)), 4) for r in RESIDENCIES},
        "lru_tokens": len(trace),
    }


def lru_hit_rate(trace: np.ndarray[Any, Any], slots: int) -> float:
    """Hits of one LRU of `slots` experts over a trace [tokens, layers, k], in the order of decoding."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = uses = 0
    for key in _uses(trace):
        uses += 1
        if key in cache:
            hits += 1
            cache.move_to_end(key)
        else:
            cache[key] = None
            if len(cache) > slots:
                cache.popitem(last=False)
    return hits / uses


def _uses(trace: np.ndarray[Any, Any]) -> Iterator[tuple[int, int]]:
    for token in trace.tolist():
        for layer, chosen in enumerate(token):
            for expert in chosen:
                yield layer, expert


def _rounded(values: Iterable[Any]) -> list[float]:
    return [round(float(value), 4) for value in values]
