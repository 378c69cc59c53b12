"""A ladder for whoever does not wait: what is there is taken, what is not is sent for and done without."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.ids import ExpertId
from steerpipe.core.protocols import ExpertWeights
from steerpipe.model.moe import expert_ffn
from steerpipe.store.residency import Residency
from steerpipe.transfer.ladder import Ladder

_NEVER = 1e9  # seconds: such a deadline does not pass, and what was missed later is due sooner


def _others(ladder: Ladder) -> int:
    return max(1, ladder.transient_limit // 2)


class Impatient:
    """Nothing here waits. The engine's thread, beside its leases."""

    def __init__(
        self, ladder: Ladder, of_layer: Mapping[int, Sequence[ExpertId]], weights: Callable[[ExpertId], ExpertWeights]
    ) -> None:
        self._ladder = ladder
        self._of_layer = of_layer
        self._weights = weights

    def missing(self, layer: int, experts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[V, k] of `experts` [V, k]: those that are not in a slot, ready. No guess takes the slot of one that is,
        until this is asked again or somebody else protects experts: a lease of them does not wait.
        """
        own = self._of_layer[layer]
        distinct = np.unique(experts).tolist()
        absent = np.ones(len(own), dtype=np.bool_)
        with self._ladder.lock:
            self._ladder.table.protect(own[index] for index in distinct)
            for index in distinct:
                absent[index] = self._ladder.table.state(own[index]) is not Residency.READY
        return absent[experts]

    def send_for(self, layer: int, ranks: Mapping[int, int]) -> int:
        """Routed experts that are not there, and the best rank that each has: the policy hears of the use, and as many
        are sent for as the link can soon bring; how many. They are kept when they come.

        First choices overtake, the newest first: a router's first choice weighs most, and may yet come in time to be
        made good. The others share half of the room.
        """
        ladder, own, now = self._ladder, self._of_layer[layer], time.perf_counter()
        sent = 0
        with ladder.lock:
            ladder.check_usable()
            for index, rank in sorted(ranks.items(), key=lambda each: (each[1], each[0])):
                ladder.table.touch(own[index], ladder.now)
                first = rank == 0
                deadline, most = (_NEVER - now, ladder.transient_limit) if first else (math.inf, _others(ladder))
                sent += ladder.follow(own[index], deadline, most)
        return sent

    def compute(self, expert: ExpertId, x: Tensor) -> Tensor | None:
        """Its output for x [n, H]; None: it has not come. Counts as no use."""
        ladder = self._ladder
        with ladder.lock:
            there = ladder.table.state(expert) is Residency.READY
            if there:
                ladder.table.pin(expert)
        if not there:
            return None
        try:
            return expert_ffn(x, self._weights(expert))
        finally:
            with ladder.lock:
                ladder.let_go(expert)
