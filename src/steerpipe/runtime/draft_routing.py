"""Keeps where the tokens of drafts were routed: what is known of an answer before it begins."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RouterProbe

Routing = NDArray[np.uint16]  # [layers with experts, experts]: uses


class DraftRouting:
    """A ForwardTap that counts the uses in passes over the prompts that it was told to `watch`."""

    def __init__(self, moe_layers: Sequence[int], experts: int) -> None:
        self._number = {layer: number for number, layer in enumerate(moe_layers)}
        self._experts = experts
        self._uses: dict[SequenceId, Routing] = {}
        self._now: Routing | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self._number), self._experts

    def watch(self, sequence: SequenceId) -> None:
        self._uses[sequence] = np.zeros(self.shape, dtype=np.uint16)

    def take(self, sequence: SequenceId) -> Routing | None:
        """What was counted, once; None for one that was not watched."""
        return self._uses.pop(sequence, None)

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor, *, decode: bool) -> bool:
        self._now = None if decode else self._uses.get(sequences[0])
        return self._now is not None

    def entering(self, layer: int, x: Tensor) -> None:
        pass

    def routed(self, probe: RouterProbe) -> None:
        assert self._now is not None, "a pass that nobody watches"
        chosen = probe.experts.flatten().numpy()
        self._now[self._number[probe.layer]] += np.bincount(chosen, minlength=self._experts).astype(np.uint16)

    def end(self) -> None:
        self._now = None
