"""What a decoder asks about routed experts before it leases them. The exact engine asks nobody.

V valid rows, H hidden.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.model.moe import Route, StandIns


@dataclass(frozen=True, slots=True)
class Settled:
    """The route that runs, and what stands in for some of its pairs; an expert with no other pair is not leased."""

    route: Route
    stand_ins: StandIns | None = None


class MissDesk(Protocol):
    """Decides, layer by layer, on the engine's thread. Its answers change numbers: lossy modes only."""

    def begin(self, sequences: tuple[SequenceId, ...], *, decode: bool) -> bool:
        """A pass over one row of each of `sequences` [V] starts; whether the desk has a say in it."""
        ...

    def mend(self, layer: int) -> Tensor | None:
        """[V, H] to be added to what enters `layer`; None: nothing."""
        ...

    def settle(self, layer: int, x: Tensor, route: Route) -> Settled:
        """x: [V, H] as router and experts are given it."""
        ...
