"""Routing as a stream of uses, for eviction: what was used how often, and when it is used next.

N tokens of a stream, n = L * E experts in the order of (layer, expert), k routed experts. Everything on the device of
`experts` [N, L, k]; 1 M tokens of 1,440 experts take 2.9 GB for each of the two tables.
"""

import torch
from torch import Tensor

from steerpipe.predict.reuse import normed
from steerpipe.store.policies import LEAST_COUNT

FARTHEST_TOKENS = 4_000  # a use farther away is as good as none
_CHUNK = 256


def used(experts: Tensor, per_layer: int) -> Tensor:
    """[N, n] bool: who is used by each token."""
    tokens, layers, _ = experts.shape
    hot = torch.zeros(tokens, layers, per_layer, dtype=torch.bool, device=experts.device)
    return hot.scatter_(2, experts.long(), True).flatten(1)


def next_use(experts: Tensor, per_layer: int) -> Tensor:
    """[N, n] int16: tokens until each expert's next use after this token, FARTHEST_TOKENS at most."""
    tokens, layers, _ = experts.shape
    until = torch.empty(tokens, layers * per_layer, dtype=torch.int16, device=experts.device)
    ahead = torch.full((1, layers * per_layer), FARTHEST_TOKENS, dtype=torch.int32, device=experts.device)
    for end in range(tokens, 0, -_CHUNK):  # backwards; `ahead`: of the first token after the chunk, itself included
        start = max(0, end - _CHUNK)
        hot = used(experts[start:end], per_layer)  # [C, n]
        places = torch.arange(end - start, device=experts.device, dtype=torch.int32)[:, None]
        own = torch.where(hot, places, 1 << 20)
        own = torch.cat([own, ahead + (end - start)])  # [C + 1, n]: place of the use in or after the chunk
        first = own.flip(0).cummin(0).values.flip(0)
        until[start:end] = (first[1:] - places).clamp_max(FARTHEST_TOKENS).to(torch.int16)
        ahead = first[:1].clamp_max(FARTHEST_TOKENS)
    return until


def log_counts(experts: Tensor, per_layer: int, half_life_tokens: float) -> Tensor:
    """[N, n] fp16: log2 of LFRU's count after each token, plus LEAST_COUNT."""
    tokens, layers, _ = experts.shape
    device = experts.device
    logs = torch.empty(tokens, layers * per_layer, dtype=torch.float16, device=device)
    age = torch.arange(_CHUNK, device=device)
    apart = (age[:, None] - age[None, :]).float()
    decay = torch.where(apart >= 0, torch.exp2(-apart / half_life_tokens), 0.0)  # [C, C]
    fading = torch.exp2(-(age + 1).float() / half_life_tokens)[:, None]
    carried = torch.zeros(1, layers * per_layer, device=device)
    for start in range(0, tokens, _CHUNK):
        hot = used(experts[start : start + _CHUNK], per_layer).float()
        size = len(hot)
        counts = decay[:size, :size] @ hot + fading[:size] * carried
        logs[start : start + size] = (counts + LEAST_COUNT).log2().half()
        carried = counts[-1:]
    return logs


def contexts(residual: Tensor, place: Tensor, keeps: float) -> Tensor:
    """[N, H] fp16: running mean of the normed `residual` [N, H] within each text; `place` [N] is 0 where one begins."""
    mean = torch.empty(residual.shape, dtype=torch.float16, device=residual.device)
    order = torch.argsort(place, stable=True)
    counts = torch.bincount(place).tolist()
    start = 0
    for depth, count in enumerate(counts):
        rows = order[start : start + count]
        fresh = (1 - keeps) * normed(residual[rows])
        mean[rows] = (fresh if depth == 0 else keeps * mean[rows - 1].float() + fresh).half()
        start += count
    return mean
