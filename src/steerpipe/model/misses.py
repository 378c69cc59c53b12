"""What a decoder asks about routed experts before it leases them. The exact engine asks nobody.

V valid rows, H hidden.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.model.moe import Nearby, Route, StandIns, pair_up


@dataclass(frozen=True, slots=True)
class Settled:
    """The route that runs; what stands in for some of its pairs; and who is computed elsewhere and not leased, like an
    expert all of whose pairs have stand-ins."""

    route: Route
    stand_ins: StandIns | None = None
    nearby: Nearby | None = None

    def leased(self) -> list[int]:
        """Who is to be leased."""
        near = () if self.nearby is None else self.nearby.experts
        return [expert for expert in pair_up(self.route, self.stand_ins) if expert not in near]


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
