"""The host's half of prediction in a served step: reads what is said of the next layers while it waits, and passes it
on to the source. Legend: L MoE layers, h horizons.
"""

from collections.abc import Sequence

from steerpipe.core.blocks import Guessing
from steerpipe.model.gpu.mailbox import Mailbox, likely


class Steer:
    """One step at a time, on the engine's thread. A look takes under a microsecond while nothing has come."""

    def __init__(self, source: Guessing, words: Mailbox, layers: Sequence[int], horizon: int) -> None:
        """`words`: place (layer · h + horizon - 1) has what is said at a layer, of the one so far ahead."""
        self._source, self._words, self._layers, self._horizon = source, words, layers, horizon
        self._stamp = 0
        self._next = 0  # the place that is awaited
        self._served = 0  # layers that have come
        self._unsaid = False  # something was said that the source does not know
        self._said: dict[int, list[int]] = {}  # by the step's layer, counted on over its end: likely experts

    def begin(self, stamp: int) -> None:
        """What was said of the first layers across the boundary of two tokens is kept, if this is the next token."""
        layers, follows = len(self._layers), stamp == self._stamp + 1
        self._said = {order - layers: said for order, said in self._said.items() if follows and order >= layers}
        self._stamp, self._next, self._served = stamp, 0, 0

    @property
    def resting(self) -> bool:
        """Whether too few of the last guesses were used: nothing would be sent now."""
        return self._source.throttled

    def rest(self) -> None:
        """A step has gone by in which nobody predicted: so many questions less until the next try."""
        for _ in self._layers:
            self._source.expect(())

    def served(self, routed: Sequence[int]) -> None:
        """The next layer's experts are on their way: what was said of it is of no more use."""
        self._said.pop(self._served, None)
        self._served += 1

    @property
    def waiting(self) -> bool:
        """Whether a tap of a layer that has come has not spoken yet."""
        return self._next < self._served * self._horizon

    def end(self) -> None:
        """The last layer has been served: until the next step's first router nobody else asks for the link."""
        if self._unsaid:
            self._source.expect(self._expected())
            self._unsaid = False
        self._source.send_last()

    def poll(self) -> None:
        """Passes on what has been said since, and lets the source go on sending."""
        if self._listen() or (self._unsaid and self._source.idle):
            self._source.expect(self._expected())
            self._unsaid = False
        self._source.pump()

    def _listen(self) -> bool:
        """Whether anything new was said of the next layer. What is said of later ones has time."""
        heard = False
        while self._next < self._served * self._horizon:
            words = self._words.look(self._next, self._stamp)
            if words is None:
                break
            order, number = divmod(self._next, self._horizon)
            self._next += 1
            heard = self._heard(order + number + 1, words) or heard
        return heard

    def _heard(self, target: int, words: Sequence[int]) -> bool:
        if target < self._served:
            return False
        self._said[target] = likely(words)
        self._unsaid = True
        return target == self._served

    def _expected(self) -> list[tuple[int, int]]:
        """(layer, expert), the nearest layer first, the likeliest of a layer first."""
        count = len(self._layers)
        return [(self._layers[order % count], each) for order in sorted(self._said) for each in self._said[order]]
