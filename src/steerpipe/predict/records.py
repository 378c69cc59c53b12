"""One traced sequence, and many of them packed into tensors.

T tokens of a sequence, N of all, L MoE layers (numbered 0 to L - 1 in the order of the forward pass, whatever decoder
layers they are), k routed experts, E experts per layer, H hidden.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Geometry:
    layers: int
    experts: int
    top_k: int
    hidden: int


@dataclass(frozen=True, slots=True)
class States:
    """Hidden states, in any float dtype on any device; 24 layers of 192 are 27 KB per token in 16 bits."""

    entering: Tensor  # [T, L, H]: the residual stream before the layer's attention and its norm
    residual: Tensor  # [T, L, H]: after attention, before the norm in front of the MoE
    shared: Tensor | None  # [T, L, H]: the shared expert's own output, switch included; None: the family has none


@dataclass(frozen=True, slots=True)
class TracedSequence:
    """One prompt, with or without an answer, as the model routed it."""

    prompt: str  # names the prompt: splits go by it
    tokens: NDArray[np.int32]  # [T]
    prompt_tokens: int  # the rest was generated
    experts: NDArray[Any]  # [T, L, k] unsigned, in the router's rank order: its own indices, never recomputed
    weights: NDArray[np.float16] | None = None  # [T, L, k] as applied to the experts' outputs
    states: States | None = None


@dataclass(frozen=True, slots=True)
class PackedTrace:
    """Sequences one after the other, on one device. A row is a token."""

    geometry: Geometry
    tokens: Tensor  # [N] int64
    sequence: Tensor  # [N] int64: which of the packed sequences
    place: Tensor  # [N] int64: position in it
    experts: Tensor  # [N, L, k] int16
    weights: Tensor | None  # [N, L, k] float16
    states: States | None  # [N, L, H] each

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def routed(self, rows: Tensor, layer: int) -> Tensor:
        """[R, E] fp32: 1 for each expert that `rows` were routed to: the truth that a prediction is held against."""
        hot = torch.zeros(len(rows), self.geometry.experts, device=self.device)
        return hot.scatter_(1, self.experts[rows, layer].long(), 1.0)


def pack_traces(
    sequences: Iterable[TracedSequence], geometry: Geometry, device: torch.device | str = "cpu"
) -> PackedTrace:
    """All of `sequences` in one piece; states and weights only if every sequence has them."""
    listed = list(sequences)
    assert listed, "nothing to pack"
    lengths = [len(each.tokens) for each in listed]
    numbers = torch.arange(len(listed)).repeat_interleave(torch.tensor(lengths))
    place = torch.cat([torch.arange(length) for length in lengths])
    experts = np.concatenate([each.experts for each in listed]).astype(np.int16)
    weights = [each.weights for each in listed if each.weights is not None]
    states = [each.states for each in listed if each.states is not None]
    complete = len(weights) == len(listed)
    return PackedTrace(
        geometry,
        torch.from_numpy(np.concatenate([each.tokens for each in listed]).astype(np.int64)).to(device),
        numbers.to(device),
        place.to(device),
        torch.from_numpy(experts).to(device),
        torch.from_numpy(np.concatenate(weights)).to(device) if complete else None,
        _pack_states(states, device) if len(states) == len(listed) else None,
    )


def _pack_states(states: Sequence[States], device: torch.device | str) -> States:
    shared = [each.shared for each in states if each.shared is not None]
    return States(
        torch.cat([each.entering.to(device) for each in states]),
        torch.cat([each.residual.to(device) for each in states]),
        torch.cat([each.to(device) for each in shared]) if len(shared) == len(states) else None,
    )
