"""Several taps in one forward pass."""

from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import ForwardTap, RouterProbe


class Taps:
    """A ForwardTap that passes on what it hears, to each of those who want the pass."""

    def __init__(self, *taps: ForwardTap) -> None:
        self._all = taps
        self._listening: list[ForwardTap] = []

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor, *, decode: bool) -> bool:
        self._listening = [tap for tap in self._all if tap.begin(sequences, tokens, decode=decode)]
        return bool(self._listening)

    def entering(self, layer: int, x: Tensor) -> None:
        for tap in self._listening:
            tap.entering(layer, x)

    def routed(self, probe: RouterProbe) -> None:
        for tap in self._listening:
            tap.routed(probe)

    def end(self) -> None:
        for tap in self._listening:
            tap.end()
