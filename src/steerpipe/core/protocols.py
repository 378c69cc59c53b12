"""The seams between stages. A stage sees these, never another stage's classes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from steerpipe.core.events import RoutingRecord


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


class RoutingSink(Protocol):
    """Where the engine publishes routing: the only way back from compute to prediction."""

    def observe(self, record: "RoutingRecord") -> None:
        """Called on the engine thread, once per MoE layer and step; must not block."""
        ...
