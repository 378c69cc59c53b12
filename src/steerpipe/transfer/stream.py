"""Layer streaming: while a prompt's next attention is computed, the experts behind it are read ahead.

A prompt that uses at least half of a layer's experts will use at least half of the next layer's, whoever they are.
Pure but for the ladder's queue; the caller holds its lock.
"""

import itertools
import math
from collections.abc import Mapping

from steerpipe.core.ids import ExpertId
from steerpipe.store.residency import Residency
from steerpipe.transfer.ladder import Ladder
from steerpipe.transfer.queue import Reason


class LayerStream:
    """Knows the MoE layers' order and how often each expert was used."""

    def __init__(self, ladder: Ladder, experts_of: Mapping[int, int]) -> None:
        """`experts_of`: experts of each MoE layer, in the order in which layers are computed."""
        self._ladder = ladder
        self._experts_of = dict(experts_of)
        layers = list(experts_of)
        self._after = dict(itertools.pairwise(layers))
        self._uses = {layer: [0] * count for layer, count in experts_of.items()}

    def arrive(self, layer: int, routed: frozenset[int]) -> None:
        """A lease of that layer begins: what was read ahead and is not wanted is cut."""
        for expert in routed:
            self._uses[layer][expert] += 1
        wanted = {ExpertId(layer, expert) for expert in routed}
        self._ladder.withdraw(self._ladder.ahead - wanted, Reason.PREFETCH)

    def leave(self, layer: int, routed: frozenset[int]) -> None:
        """A lease of that layer ends: reads ahead, the most frequent first, as far as transient slots go."""
        following = self._after.get(layer)
        if following is None or 2 * len(routed) < self._experts_of[layer]:
            return
        ladder = self._ladder
        by_use = sorted(range(self._experts_of[following]), key=lambda index: -self._uses[following][index])
        absent = (e for e in (ExpertId(following, i) for i in by_use) if ladder.table.state(e) is Residency.ABSENT)
        room = ladder.transient_limit - ladder.table.transients
        chosen = [expert for _, expert in zip(range(room), absent, strict=False)]
        for expert in sorted(chosen, key=lambda expert: ladder.addresses[expert].offset):
            if not ladder.guess(expert, Reason.PREFETCH, math.inf, transient=True):
                return
            ladder.ahead.add(expert)
