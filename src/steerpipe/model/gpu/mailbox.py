"""Where a router's kernel tells the host what it chose, while the graph runs on: words in pinned memory.

A word is stamp << 32 | expert. Stamps count steps, so a word of an earlier step is never taken for one of this step,
and every word is whole: no order among them is needed. A step that reads what is missing by itself also says what it
missed and what it kept: kernels/router.py.
"""

import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.blocks import DirectReads, SentBlock
from steerpipe.kernels.fetch import NOBODY, WHOLE
from steerpipe.kernels.foretell import LEAST_PROBABILITY, SURE

_EXPERT = 0xFFFFFFFF  # mask of the lower half; all ones: this pair has no expert
LANDED, MISSED, SENT, INDEX = 1 << 16, 1 << 17, 1 << 18, 0xFFFF  # of the lower half, where a step reads by itself
_SPIN = 2_000  # polls of under 1 us before other threads get a turn; a layer takes 50 us
_LOOKS = 4  # before something else is done meanwhile, which takes as long as some ten of them
_ASK_DEVICE = 50_000  # polls between two looks at the device


def likely(words: Sequence[int]) -> list[int]:
    """Of the words of a tap: experts that are named with LEAST_PROBABILITY at least, the likeliest first."""
    least = int(LEAST_PROBABILITY * SURE)  # as kernels/foretell.py compares
    return [word & INDEX for word in words if word >> 16 & SURE >= least]


class Mailbox:
    """`layers` times `pairs` words. The device writes, one thread polls."""

    def __init__(self, layers: int, pairs: int, *, pinned: bool) -> None:
        self.words: Tensor = torch.zeros(layers, pairs, dtype=torch.int64, pin_memory=pinned)  # [L, R · k]
        self._pairs = pairs
        flat: NDArray[np.int64] = self.words.view(-1).numpy()
        self._view: memoryview[int] = flat.data.cast("B").cast("q")  # 0.3 us a look; a tensor or an array takes more

    def take(
        self, order: int, stamp: int, finished: Callable[[], bool], meanwhile: Callable[[], None] | None = None
    ) -> list[int]:
        """Waits for the `order`-th MoE layer of step `stamp`: its distinct experts, ascending.

        `finished` says whether the device has run everything, and raises if it has failed; `meanwhile` is called
        again and again while nothing has come.
        """
        return sorted({word & _EXPERT for word in self.wait(order, stamp, finished, meanwhile)} - {_EXPERT})

    def look(self, order: int, stamp: int) -> list[int] | None:
        """The words of that place, if all of them are of step `stamp`."""
        words = self._view[order * self._pairs : (order + 1) * self._pairs].tolist()
        return words if min(words) >> 32 == stamp else None

    def take_reads(self, order: int, stamp: int, finished: Callable[[], bool]) -> DirectReads:
        """As `take`, of a step that reads what is missing by itself."""
        words = [word for word in self.wait(order, stamp, finished) if word & _EXPERT != _EXPERT]
        return DirectReads(
            [word & INDEX for word in words],
            [word & INDEX for word in words if word & MISSED],
            [word & INDEX for word in words if word & LANDED],
            [word & INDEX for word in words if word & SENT],
        )

    def take_sent(self, order: int, stamp: int, finished: Callable[[], bool]) -> list[SentBlock]:
        """Waits for what a tap has sent for, in the order of its tickets (kernels/fetch.py)."""
        words = [word & _EXPERT for word in self.wait(order, stamp, finished)]
        return [SentBlock(word & INDEX, (word >> 16) / WHOLE) for word in words if word != NOBODY]

    def posted(self, order: int, stamp: int) -> bool:
        """Whether that layer of that step has posted."""
        return min(self._view[order * self._pairs : (order + 1) * self._pairs].tolist()) >> 32 == stamp

    def wait(
        self, order: int, stamp: int, finished: Callable[[], bool], meanwhile: Callable[[], None] | None = None
    ) -> list[int]:
        """As `take`: the words themselves."""
        words = self._view[order * self._pairs : (order + 1) * self._pairs]
        polls = 0
        while min(found := words.tolist()) >> 32 != stamp:
            polls += 1
            if meanwhile is not None and polls % _LOOKS == 0:
                meanwhile()
            if polls > _SPIN:
                os.sched_yield()  # sleep(0) takes 50 us
            if polls % _ASK_DEVICE == 0 and finished():
                found = words.tolist()
                assert min(found) >> 32 == stamp, f"the step ended, but MoE layer {order} never posted its experts"
        return found
