"""Which uses a cache would have missed: predictions of what lies there already are worth nothing. Pure numpy."""

import numpy as np
from numpy.typing import NDArray

from steerpipe.store.policies import HALF_LIFE_TOKENS, Lfru


def missed_uses(
    routing: NDArray[np.integer], experts: int, slots: int, half_life_tokens: float = HALF_LIFE_TOKENS
) -> NDArray[np.bool_]:
    """[N, L, k]: uses that an LFRU cache of `slots` blocks did not hold, over `routing` [N, L, k] in its order.

    Decode at batch 1, one sequence after the other, the cache carried over: what `transfer.replay` counts as a miss on
    the same recording without a predictor. About 1 ms per token of 24 layers.
    """
    tokens, layers, top_k = routing.shape
    assert slots >= top_k, f"{slots} slots do not hold the {top_k} experts of one layer"
    numbers = routing.astype(np.int64) + np.arange(layers)[None, :, None] * experts
    policy = Lfru(layers * experts, half_life_tokens)
    resident = np.zeros(layers * experts, dtype=np.bool_)
    held, missed = 0, np.zeros(routing.shape, dtype=np.bool_)
    for token in range(tokens):
        for layer in range(layers):
            routed, now = numbers[token, layer], token + layer / layers
            policy.touch_many(routed, now)
            absent = ~resident[routed]
            missed[token, layer] = absent
            held += int(absent.sum())
            if held > slots:
                resident[routed] = False  # the layer's own are pinned: no candidates
                resident[policy.victims(np.flatnonzero(resident), held - slots, now)] = False
                held = slots
            resident[routed] = True
    return missed
