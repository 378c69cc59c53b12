"""Layer streaming: while a prompt's next attention is computed, the experts behind it are read ahead.

A prompt that uses at least half of a layer's experts will use at least half of the next layer's, whoever they are.
Pure but for the ladder's queue; the caller holds its lock.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

from steerpipe.core.ids import ExpertId
from steerpipe.store.residency import Residency
from steerpipe.transfer.ladder import Ladder
from steerpipe.transfer.queue import Reason


class LayerStream:
    """Knows the MoE layers' order and how often each expert was used."""

    def __init__(self, ladder: Ladder, experts: Mapping[int, Sequence[ExpertId]]) -> None:
        """`experts` of each MoE layer, in the order in which layers are computed."""
        self._ladder = ladder
        self._experts = experts
        self._after = dict(itertools.pairwise(experts))
        self._uses = {layer: [0] * len(those) for layer, those in experts.items()}

    def arrive(self, layer: int, routed: frozenset[int]) -> None:
        """A lease of that layer begins: what was read ahead and is not wanted is cut."""
        for expert in routed:
            self._uses[layer][expert] += 1
        if self._ladder.ahead:
            wanted = {ExpertId(layer, expert) for expert in routed}
            self._ladder.withdraw(self._ladder.ahead - wanted, Reason.PREFETCH)

    def leave(self, layer: int, routed: frozenset[int]) -> None:
        """A lease of that layer ends: reads ahead, the most frequent first, as far as transient slots go."""
        following = self._after.get(layer)
        if following is None or 2 * len(routed) < len(self._experts[layer]):
            return
        ladder = self._ladder
        room = ladder.transient_limit - ladder.table.transients
        absent = [each for each in self._experts[following] if ladder.table.state(each) is Residency.ABSENT]
        chosen = sorted(absent, key=lambda each: -self._uses[following][each.expert])[: max(0, room)]
        for expert in sorted(chosen, key=lambda each: ladder.addresses[each].offset):
            if not ladder.guess(expert, Reason.PREFETCH, math.inf, transient=True):
                return
            ladder.ahead.add(expert)
