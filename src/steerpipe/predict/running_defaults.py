"""Default vectors that are learnt while a model answers. L MoE layers, E experts, H hidden, V rows, k experts a row."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from steerpipe.predict.lookahead import DefaultVectors
from steerpipe.predict.records import Geometry

LEAST_MET = 8  # tokens behind a vector that is kept
PSEUDO_TOKENS = 16  # of the layer's mean, beside an expert's own: on nano better than 0 and 4 from 100 tokens on


@dataclass(slots=True)
class RunningDefaults:
    """Sums of what each expert gave, and over how many tokens. One thread."""

    sums: Tensor  # [L, E, H] fp32
    counts: Tensor  # [L, E] int64

    @classmethod
    def nothing(cls, geometry: Geometry) -> Self:
        layers, experts, hidden = geometry.layers, geometry.experts, geometry.hidden
        return cls(torch.zeros(layers, experts, hidden), torch.zeros(layers, experts, dtype=torch.int64))

    @classmethod
    def of(cls, known: DefaultVectors) -> Self:
        """Goes on where another run ended."""
        return cls(known.vectors.float() * known.counts[..., None], known.counts.clone())

    def add(self, number: int, experts: Tensor, outputs: Tensor) -> None:
        """In MoE layer `number` experts [V, k] gave outputs [V, k, H]."""
        chosen = experts.flatten()
        self.sums[number].index_add_(0, chosen, outputs.flatten(0, 1).float())
        self.counts[number] += torch.bincount(chosen, minlength=self.counts.shape[1])

    def tokens(self, top_k: int) -> int:
        """How many were seen in every layer."""
        return int(self.counts.sum(1).min()) // top_k

    def means(self) -> DefaultVectors:
        """As they are."""
        return DefaultVectors.of_sums(self.sums, self.counts)

    def often(self) -> DefaultVectors:
        """Of experts that were seen often enough to tell of no single token: what is kept."""
        known = self.counts >= LEAST_MET
        return DefaultVectors.of_sums(self.sums * known[..., None], self.counts * known)

    def drawn(self) -> DefaultVectors:
        """Drawn to the layer's mean where few tokens were seen: what is predicted by."""
        counts = self.counts[..., None].float()  # [L, E, 1]
        layer = self.sums.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp_min(1)  # [L, 1, H]
        return DefaultVectors((self.sums + PSEUDO_TOKENS * layer) / (counts + PSEUDO_TOKENS), self.counts)
