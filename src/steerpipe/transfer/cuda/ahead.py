"""Layer streaming: while a prompt's next attention is computed, the experts behind it are copied ahead.

A prompt that uses at least half of a layer's experts will use at least half of the next layer's, whoever they are. As
`transfer.stream`, in stream order: what was sent ahead and is not wanted stays as a transient expert, first to go.
"""

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from steerpipe.transfer.cuda.backing import LayerBlocks
from steerpipe.transfer.cuda.shelf import Shelf


class LayerAhead:
    """Knows the MoE layers' order and how often each expert was used. What it has sent (`Shelf.sent`) is pinned."""

    def __init__(self, shelf: Shelf, layers: Mapping[int, LayerBlocks]) -> None:
        self._shelf = shelf
        self._layers = layers
        self._after = dict(itertools.pairwise(layers))
        self._uses: NDArray[np.int64] = np.zeros(len(shelf.experts), dtype=np.int64)
        self._here = np.frombuffer(shelf.here, dtype=np.uint8)

    def arrive(self, layer: int, routed: Iterable[int]) -> None:
        """A lease of that layer begins: what was sent ahead is hers if she wants it, and free otherwise."""
        wanted = [self._shelf.base[layer] + index for index in routed]
        self._uses[wanted] += 1
        self.drop(set(wanted))

    def drop(self, wanted: set[int]) -> None:
        """Gives up the pins. What the ring has not brought yet is cut, unless it is wanted now."""
        shelf = self._shelf
        shelf.table.unpin_many(shelf.sent)
        if shelf.loading:
            for number in shelf.sent:
                unwanted = number not in wanted or number in shelf.broken  # a guess that failed is asked for anew
                if unwanted and number in shelf.loading:
                    shelf.cut(number)
        shelf.sent.clear()

    def leave(self, layer: int, used: int) -> None:
        """A lease of that layer ends: sends ahead, the most frequent first, as far as transient slots go."""
        following = self._after.get(layer)
        if following is None or 2 * used < self._layers[layer].experts:
            return
        shelf, base = self._shelf, self._shelf.base[following]
        absent = base + np.flatnonzero(self._here[base : base + self._layers[following].experts] == 0)
        by_use = absent[np.argsort(-self._uses[absent], kind="stable")].tolist()
        coming = {*shelf.loading, *shelf.moving}
        chosen = [number for number in by_use if number not in coming][: shelf.transient_limit]
        pinned = [number for number in chosen if shelf.places[number]]
        read = [number for number in chosen if not shelf.places[number]]
        slabs = shelf.backing.ring.slabs if shelf.backing.ring is not None else 0  # more would come no sooner
        shelf.sent = shelf.send([*sorted(pinned, key=shelf.order), *read[:slabs]], transient=True)
        shelf.table.pin_many(shelf.sent)
