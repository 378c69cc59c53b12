"""Small made-up traces for the arena's tests."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from steerpipe.predict.protocol import Cost
from steerpipe.predict.records import Geometry, PackedTrace, States, TracedSequence, pack_traces
from steerpipe.predict.sight import Sight
from steerpipe.trace.header import ModelIdentity, TraceHeader, TraceOptions
from steerpipe.trace.writer import TraceWriter

GEOMETRY = Geometry(layers=4, experts=12, top_k=2, hidden=6)


def draw(
    prompts: int = 6,
    tokens: int = 20,
    seed: int = 0,
    *,
    states: bool = False,
    first: int = 0,
    geometry: Geometry = GEOMETRY,
) -> list[TracedSequence]:
    """Layer l + 1 routes to the expert after each of layer l's: planted, so that something can be learnt."""
    random = np.random.default_rng(seed)
    drawn = []
    for prompt in range(first, first + prompts):
        experts = np.zeros((tokens, geometry.layers, geometry.top_k), dtype=np.uint8)
        for token in range(tokens):
            experts[token, 0] = random.permutation(geometry.experts)[: geometry.top_k]
            for layer in range(1, geometry.layers):
                experts[token, layer] = (experts[token, layer - 1] + 1) % geometry.experts
        weights = random.random(experts.shape).astype(np.float16)
        words = random.integers(0, 50, tokens).astype(np.int32)
        sequence = TracedSequence(f"prompt {prompt}", words, tokens // 2, experts, weights)
        drawn.append(replace(sequence, states=_states(tokens, geometry, random)) if states else sequence)
    return drawn


def packed(sequences: Sequence[TracedSequence], geometry: Geometry = GEOMETRY) -> PackedTrace:
    return pack_traces(sequences, geometry)


def _states(tokens: int, geometry: Geometry, random: np.random.Generator) -> States:
    def some() -> Tensor:
        return torch.from_numpy(random.standard_normal((tokens, geometry.layers, geometry.hidden)).astype(np.float32))

    return States(some(), some(), some())


class Successor:
    """Knows the planted rule at horizon 1 and 2, within the token."""

    name = "successor"
    horizons = (1, 2)

    def probabilities(self, sight: Sight) -> Tensor:
        if sight.crosses:
            return torch.full((sight.rows, sight.geometry.experts), 0.1)
        return sight.hot(sight.layer).roll(sight.decision.horizon, dims=1) * 0.9

    def cost(self) -> Cost:
        return Cost(parameters=0, multiply_adds=0)


def write(
    folder: Path, sequences: Sequence[TracedSequence], *, digest: str = "made up", geometry: Geometry = GEOMETRY
) -> Path:
    """A trace folder of them, with the weights."""
    options = TraceOptions(engine="transformers", dtype="float32", max_tokens=64, weights=True)
    header = TraceHeader(ModelIdentity("planted", digest), geometry, 50, "tests", options)
    with TraceWriter(folder, header) as writer:
        for sequence in sequences:
            writer.write([sequence], "drawn")
    return folder
