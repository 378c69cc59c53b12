"""Caches of many streams, policies and sizes at once, by hits alone: no link, no clock.

A cache keeps `slots` experts of all layers. Layer after layer the routed experts of a token are used; those that are
absent take a free slot, else that of the lowest-ranked expert that this layer does not use: what `transfer.replay`
does on a machine without time in it, and what its policies rank.

S streams of T tokens each, K rankings, Z sizes, n = L * E experts, k routed experts.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from steerpipe.store.policies import LEAST_COUNT
from steerpipe.train.reuse_streams import used

_NEVER = 1 << 24  # a layer step that no stream reaches
_ABOVE_ALL = float(1 << 40)
_LEAST = 2.0**-40  # between the log counts of experts with the same past


class Ranking(Protocol):
    """Says who is worth keeping: the lowest goes first. No two experts that were used are equal: where their past says
    nothing, the lower number has the lower rank."""

    def token(self, number: int) -> tuple[Tensor, Tensor]:
        """([S, n] ranks of experts whose layer is still to come in this token, [S, n] of those whose layer is over).

        Asked once per token, in order.
        """
        ...

    def told(self, number: int, layer: int) -> Tensor | None:
        """[S, n] to be added from the next layer on, instead of what was told before; None: nothing new."""
        ...


class History:
    """Ranks by past or future uses alone."""

    def told(self, number: int, layer: int) -> Tensor | None:
        return None


class LruRanking(History):
    def __init__(self, hot: Tensor, layers: int) -> None:
        """`hot` [S, T, n]: see `hot_streams`."""
        self._hot, self._layers = hot, layers
        self._number, self._layer = _numbers(hot, layers)
        self._last = torch.full((len(hot), hot.shape[2]), -torch.inf, dtype=torch.float64, device=hot.device)

    def token(self, number: int) -> tuple[Tensor, Tensor]:
        before, steps = self._last, number * self._layers + self._layer
        now = steps * len(self._number) + self._number  # of one step: in the order of their numbers
        self._last = torch.where(self._hot[:, number], now.double(), before)
        return before, self._last


class LfruRanking(History):
    """As the policy holds it: log2 of a sum that ages alike for all."""

    def __init__(self, hot: Tensor, layers: int, half_life_tokens: float) -> None:
        self._hot, self._half_life = hot, half_life_tokens
        number, layer = _numbers(hot, layers)
        self._layer, self._order = layer.double() / layers, number * _LEAST
        self.weight = torch.full((len(hot), hot.shape[2]), -torch.inf, dtype=torch.float64, device=hot.device)

    def token(self, number: int) -> tuple[Tensor, Tensor]:
        before = self.weight
        now = (number + self._layer) / self._half_life
        self.weight = torch.where(self._hot[:, number], torch.logaddexp2(before, now), before)
        return before + self._order, self.weight + self._order


class BeladyRanking(History):
    """Knows the next use: the bound."""

    def __init__(self, hot: Tensor, layers: int) -> None:
        tokens = hot.shape[1]
        self._number, layer = _numbers(hot, layers)
        coming = torch.full((len(hot), hot.shape[2]), _NEVER, dtype=torch.int32, device=hot.device)
        self._next = torch.empty(tokens + 1, *coming.shape, dtype=torch.int32, device=hot.device)  # steps
        self._next[tokens] = coming
        for number in range(tokens - 1, -1, -1):
            coming = torch.where(hot[:, number], (number * layers + layer).int(), coming)
            self._next[number] = coming

    def steps(self, number: int) -> tuple[Tensor, Tensor]:
        """[S, n] each: the layer step of the next use, of experts whose layer is to come and whose layer is over."""
        return self._next[number], self._next[number + 1]

    def token(self, number: int) -> tuple[Tensor, Tensor]:
        before, after = (self._number - steps.double() * len(self._number) for steps in self.steps(number))
        return before, after


class SightedRanking(History):
    """Knows the uses of this token and the next `tokens`, and ranks the rest by LFRU: what sight is worth."""

    def __init__(self, future: BeladyRanking, past: "LfruRanking", layers: int, tokens: int) -> None:
        self._future, self._past = future, past
        self._layers, self._tokens = layers, tokens

    def token(self, number: int) -> tuple[Tensor, Tensor]:
        last = (number + self._tokens + 1) * self._layers  # the first step that is out of sight
        seen = zip(self._future.steps(number), self._future.token(number), self._past.token(number), strict=True)
        before, after = (torch.where(steps < last, _ABOVE_ALL + use, past) for steps, use, past in seen)
        return before, after


class ReuseRanking:
    """LFRU's count and what a forecast says, as the policy `reuse` adds them up."""

    def __init__(self, hot: Tensor, layers: int, half_life_tokens: float, forecasts: "Forecasts") -> None:
        self._past = LfruRanking(hot, layers, half_life_tokens)
        self._half_life, self._forecasts = half_life_tokens, forecasts
        self._order = _numbers(hot, layers)[0] * _LEAST

    def token(self, number: int) -> tuple[Tensor, Tensor]:
        before, after = (
            torch.log2(torch.exp2(weight - number / self._half_life) + LEAST_COUNT) + self._order
            for weight in self._past.token(number)
        )
        return before, after

    def told(self, number: int, layer: int) -> Tensor | None:
        return self._forecasts.at(number, layer)


class Forecasts(Protocol):
    def at(self, number: int, layer: int) -> Tensor | None:
        """[S, n] scores after the router of `layer` in token `number` of each stream."""
        ...


@torch.no_grad()
def miss_rates(
    experts: Tensor, per_layer: int, rankings: Sequence[Ranking], slots: Sequence[int], warmup_tokens: int = 0
) -> Tensor:
    """[K, Z] fp64 share of the uses that find their expert absent, over all streams, after the warm-up.

    `experts` [S, T, L, k]; every cache starts empty.
    """
    streams, tokens, layers, top_k = experts.shape
    assert min(slots) >= top_k, f"{min(slots)} slots: a layer uses {top_k} at once"
    device = experts.device
    numbers = experts.long() + (torch.arange(layers, device=device) * per_layer)[:, None]  # [S, T, L, k]
    caches = _Caches(len(rankings), slots, streams, layers * per_layer, device)
    added = torch.zeros(len(rankings), streams, layers * per_layer, dtype=torch.float64, device=device)
    for number in range(tokens):
        if number == warmup_tokens:
            caches.misses.zero_()
        pairs = [ranking.token(number) for ranking in rankings]
        rank = torch.stack([before for before, _ in pairs]) + added  # [K, S, n]
        after = torch.stack([after for _, after in pairs])
        for layer in range(layers):
            own = slice(layer * per_layer, (layer + 1) * per_layer)
            rank[..., own] = after[..., own] + added[..., own]
            caches.use(numbers[:, number, layer], rank)
            for place, ranking in enumerate(rankings):
                told = ranking.told(number, layer)
                if told is not None:
                    rank[place] += told - added[place]
                    added[place] = told
    counted = streams * (tokens - min(warmup_tokens, tokens)) * layers * top_k
    return caches.misses.double() / max(1, counted)


class _Caches:
    def __init__(self, rankings: int, slots: Sequence[int], streams: int, experts: int, device: torch.device) -> None:
        shape = (rankings, len(slots), streams)
        self._there = torch.zeros(*shape, experts, dtype=torch.bool, device=device)
        self._free = torch.tensor(slots, device=device)[None, :, None].expand(shape).clone()  # slots that are empty
        self.misses = torch.zeros(shape[:2], dtype=torch.int64, device=device)

    def use(self, routed: Tensor, rank: Tensor) -> None:
        """`routed` [S, k] in the router's order; `rank` [K, S, n]."""
        shape = (*self._there.shape[:3], routed.shape[1])
        wanted = routed[None, None].expand(shape)
        absent = ~self._there.gather(3, wanted)  # [K, Z, S, k]
        missing = absent.sum(3)
        self.misses += missing.sum(2)
        evicted = (missing - self._free).clamp_min(0)
        self._free = (self._free - missing).clamp_min(0)
        keep = self._there.scatter(3, wanted, False)
        open_to = torch.where(keep, rank[:, None], torch.inf)  # [K, Z, S, n]
        lowest = open_to.topk(routed.shape[1], dim=3, largest=False).indices  # [K, Z, S, k], lowest first
        stays = torch.arange(routed.shape[1], device=routed.device) >= evicted.unsqueeze(3)
        self._there.scatter_(3, lowest, self._there.gather(3, lowest) & stays)
        self._there.scatter_(3, wanted, True)


def _numbers(hot: Tensor, layers: int) -> tuple[Tensor, Tensor]:
    """([n] numbers of the experts, [n] their layers)."""
    number = torch.arange(hot.shape[2], device=hot.device)
    return number, number // (hot.shape[2] // layers)


def streams_of(experts: Tensor, streams: int) -> Tensor:
    """[S, T, L, k]: a long stream [N, L, k] cut into equal ones; what is left over at the end is dropped."""
    length = len(experts) // streams
    return experts[: streams * length].reshape(streams, length, *experts.shape[1:])


def hot_streams(experts: Tensor, per_layer: int) -> Tensor:
    """[S, T, n] bool of [S, T, L, k]."""
    return torch.stack([used(each, per_layer) for each in experts])
