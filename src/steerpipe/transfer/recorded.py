"""A recorded run: which experts each token was routed to. Pure; `transfer.trace_file` reads one."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steerpipe.core.errors import InputError
from steerpipe.transfer.synthetic import SyntheticRouting, draw_routing

MOST_EXPERTS = 1 << 16  # of all layers: more than any model has, and what a table of them takes in a second
FIX = "give a safetensors file with an integer tensor 'routing' of [tokens, MoE layers, top_k]"


@dataclass(frozen=True, slots=True)
class Recording:
    """`routing` [tokens, layers, top_k]: distinct experts per layer; `sequence` [tokens]: where a new text begins."""

    name: str
    routing: NDArray[np.int64]
    sequence: NDArray[np.int32]
    experts: int  # per layer

    def __post_init__(self) -> None:
        shape = self.routing.shape
        if self.routing.ndim != 3 or not self.routing.size:
            raise InputError(f"'routing' in {self.name} has shape {list(shape)}", fix=FIX)
        least, most = int(self.routing.min()), int(self.routing.max())
        if not 0 <= least <= most < self.experts:
            raise InputError(f"{self.name} routes to experts {least} to {most} of {self.experts}", fix=FIX)
        if self.all_experts > MOST_EXPERTS:
            raise InputError(
                f"{self.name} has {self.all_experts:,} experts in all, at most {MOST_EXPERTS:,} are replayed", fix=FIX
            )
        ordered = np.sort(self.routing, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise InputError(f"{self.name} routes a token twice to one expert", fix=FIX)
        if self.sequence.shape != (len(self.routing),):
            raise InputError(
                f"'sequence' in {self.name} has shape {list(self.sequence.shape)} for {len(self.routing)} tokens",
                fix="give one number per token, or leave the tensor 'sequence' out",
            )

    @property
    def tokens(self) -> int:
        return len(self.routing)

    @property
    def layers(self) -> int:
        return int(self.routing.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.routing.shape[2])

    @property
    def all_experts(self) -> int:
        return self.layers * self.experts

    def uses(self) -> Iterator[tuple[int, float]]:
        """(number, time in tokens) of every use."""
        for token, rows in enumerate(self.routing.tolist()):
            for layer, experts in enumerate(rows):
                now = token + layer / self.layers
                yield from ((layer * self.experts + expert, now) for expert in experts)


def draw_recording(plan: SyntheticRouting) -> Recording:
    """A recording that nobody recorded."""
    return Recording("synthetic routing", draw_routing(plan), plan.sequences(), plan.experts)
