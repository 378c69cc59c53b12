"""The seams between stages. A stage sees these, never another stage's classes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from steerpipe.core.events import RoutingRecord
    from steerpipe.core.ids import SequenceId


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The compute-ready form of one expert. H hidden, I expert width.

    gate and up lie in one matrix because they read the same input: one product instead of two.
    """

    gate_up: "Tensor"  # [2I, H]: gate rows, then up rows
    down: "Tensor"  # [H, I]
    gate_up_bias: "Tensor | None" = None  # [2I]
    down_bias: "Tensor | None" = None  # [H]


@dataclass(frozen=True, slots=True)
class Wave:
    """Experts of one layer that can be computed now. Valid until the next wave is asked for."""

    experts: tuple[int, ...]  # ascending
    table: "Mapping[int, ExpertWeights]"


class Lease(Protocol):
    """The right to use some experts of one layer. Every leased expert comes in exactly one wave."""

    def waves(self) -> Iterator[Wave]:
        """What is resident first, then whatever has landed. May wait between waves."""
        ...


class ExpertSource(Protocol):
    """Hands out expert weights by lease. The engine knows experts through this and nothing else."""

    def lease(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None
    ) -> AbstractContextManager[Lease]:
        """The right to use `routed` (distinct expert indices of `layer`) until the block ends. May wait.

        `keep` are those of them that are worth keeping for the tokens to come; None: all of them.
        """
        ...


@dataclass(frozen=True, slots=True)
class RouterProbe:
    """What there is when a layer's router has decided and none of its routed experts has run. V rows.

    The tensors stay on the device; nobody writes into them.
    """

    layer: int
    residual: "Tensor"  # [V, H]: after attention, before the norm in front of the MoE
    experts: "Tensor"  # [V, k] in rank order
    gates: "Tensor"  # [V, k] fp32
    shared: "Tensor | None"  # [V, H]: the shared expert's output, where the family has one


class ForwardTap(Protocol):
    """Watches a forward pass from inside, on the engine's thread. It may move experts; it never changes a number."""

    def begin(self, sequences: "tuple[SequenceId, ...]", tokens: "Tensor", *, decode: bool) -> bool:
        """A pass over `tokens` [V] starts. False: the tap wants to see nothing of it."""
        ...

    def entering(self, layer: int, x: "Tensor") -> None:
        """x: [V, H] is about to enter a layer with experts."""
        ...

    def routed(self, probe: RouterProbe) -> None:
        """A router has decided, and what it misses has been sent for."""
        ...

    def end(self) -> None:
        """The pass is complete; a pass that fails has no end."""
        ...


class OutputSink(Protocol):
    """Who learns from what experts give. On the engine's thread, once per MoE layer and pass; it must not block.

    The tensors may be kept, and nobody may write into them.
    """

    def observe(self, layer: int, experts: "Tensor", outputs: "Tensor", *, decode: bool) -> None:
        """experts: [V, k]; outputs: [V, k, H], before they are weighed."""
        ...


class RoutingSink(Protocol):
    """Where the engine publishes routing: the only way back from compute to prediction."""

    def observe(self, record: "RoutingRecord") -> None:
        """Called on the engine thread, once per MoE layer and step; must not block."""
        ...
