"""Traces whose routing follows a known rule. L layers, E experts, k routed, H hidden, N tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from steerpipe.predict.lookahead import DefaultVectors
from steerpipe.predict.records import Geometry, PackedTrace, States
from steerpipe.predict.routers import Routers

GEOMETRY = Geometry(layers=4, experts=8, top_k=2, hidden=16)
SEQUENCE_TOKENS = 25
VOCAB = 16  # even over the experts


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def planted_routers(seed: int = 0, geometry: Geometry = GEOMETRY) -> Routers:
    draw = generator(seed)
    layers, hidden = geometry.layers, geometry.hidden
    return Routers(
        tuple(torch.randn(geometry.experts, hidden, generator=draw) for _ in range(layers)),
        None,
        tuple(torch.rand(hidden, generator=draw) + 0.5 for _ in range(layers)),
        tuple(torch.rand(hidden, generator=draw) + 0.5 for _ in range(layers)),
        eps=1e-6,
        top_k=geometry.top_k,
    )


def planted_defaults(seed: int = 1, geometry: Geometry = GEOMETRY) -> DefaultVectors:
    vectors = torch.randn(geometry.layers, geometry.experts, geometry.hidden, generator=generator(seed))
    return DefaultVectors(2 * vectors, torch.ones(geometry.layers, geometry.experts, dtype=torch.int64))


def model_trace(tokens: int = 500, seed: int = 2, *, memory: float = 0.0, geometry: Geometry = GEOMETRY) -> PackedTrace:
    """A model whose experts answer with `planted_defaults` whatever they are given, with a random shared expert.

    Attention adds `memory` times the residual that the token before had in the same layer. Without memory the quasi
    state with default vectors and shared expert is exact.
    """
    routers, defaults, draw = planted_routers(geometry=geometry), planted_defaults(geometry=geometry), generator(seed)
    shape = (tokens, geometry.hidden)
    sequence = torch.arange(tokens) // SEQUENCE_TOKENS
    place = torch.arange(tokens) % SEQUENCE_TOKENS
    entering, found = torch.randn(shape, generator=draw), []
    for layer in range(geometry.layers):
        residual = entering + memory * _before(entering, place)
        gates, experts = routers.logits(layer, routers.normed(layer, residual)).softmax(-1).topk(geometry.top_k, dim=-1)
        shared = torch.randn(shape, generator=draw)
        found.append((entering, residual, shared, experts, gates))
        added = (gates[..., None] * defaults.vectors[layer][experts]).sum(1)
        entering = residual + shared + added
    stacked = [torch.stack(each, dim=1) for each in zip(*found, strict=True)]
    states = States(stacked[0], stacked[1], stacked[2])
    ids = torch.randint(0, VOCAB, (tokens,), generator=draw)
    return PackedTrace(geometry, ids, sequence, place, stacked[3].to(torch.int16), stacked[4].half(), states)


def ruled_trace(
    rule: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: int = 2000, seed: int = 3, geometry: Geometry = GEOMETRY
) -> PackedTrace:
    """Without states. `rule(tokens [N], place [N], free [N, L] random) → first expert of each layer [N, L]`; the others
    follow it in number."""
    draw = generator(seed)
    place = torch.arange(tokens) % SEQUENCE_TOKENS
    ids = torch.randint(0, VOCAB, (tokens,), generator=draw)
    free = torch.randint(0, geometry.experts, (tokens, geometry.layers), generator=draw)
    first = rule(ids, place, free) % geometry.experts
    experts = (first[..., None] + torch.arange(geometry.top_k)) % geometry.experts
    weights = torch.full(experts.shape, 0.25, dtype=torch.float16)
    sequence = torch.arange(tokens) // SEQUENCE_TOKENS
    return PackedTrace(geometry, ids, sequence, place, experts.to(torch.int16), weights, None)


def by_layer_before(_ids: Tensor, _place: Tensor, free: Tensor) -> Tensor:
    """Layer l routes to what layer l - 1 routed to, three further."""
    return free[:, :1] + 3 * torch.arange(free.shape[1])


def by_token(ids: Tensor, _place: Tensor, free: Tensor) -> Tensor:
    return ids[:, None] + torch.arange(free.shape[1])


def by_token_before(_ids: Tensor, place: Tensor, free: Tensor) -> Tensor:
    """The experts of a layer stay for a whole sequence."""
    return free[torch.arange(len(place)) - place]


def recall(said: Tensor, routed: Tensor) -> float:
    """said, routed [R, E]: of the routed experts, among as many named first."""
    top_k = int(routed[0].sum())
    return float(routed.gather(1, said.topk(top_k).indices).mean())


def _before(states: Tensor, place: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(states[:1]), states[:-1]]) * (place > 0)[:, None]
