"""Which experts a benchmark routes to: recorded, generated, forced to miss, or whatever the model's routers choose.

Random weights route degenerately, so a benchmark of caches never asks them. The generator is `transfer.synthetic` with
its strengths fitted to what is published of Qwen3-30B-A3B (`benchmarks/fit_routing.py`); it prints its own curves
beside the published points. Legend: T tokens, L MoE layers, k top-k.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steerpipe.bench.shapes import Shape
from steerpipe.core.errors import ConfigError
from steerpipe.transfer.machine import Machine, slots_of_share
from steerpipe.transfer.recorded import Recording, draw_recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.synthetic import SyntheticRouting
from steerpipe.transfer.trace_file import read_recording

# Strengths by shape. Qwen3's are the best of 60 draws of benchmarks/fit_routing.py; three points do not settle five
# numbers (benchmarks/notes/2026-11-15-cuda-routing.md). Other shapes borrow them, and their hit rates are made up; the
# pilot's geometry (24 x 60, top-4) has the defaults of SyntheticRouting, which are fitted to its recorded routing.
_QWEN3 = {"zipf": 1.08, "topic": 0.74, "topic_tokens": 400.0, "passage": 1.53, "passage_tokens": 8.0}
_STRENGTHS: Mapping[str, Mapping[str, float]] = {"qwen1.5-moe": {}, "nano": {}}
_SEQUENCE_TOKENS = 1024
SHARES = (0.25, 0.4, 0.5)
POLICIES = ("lru", "lfru", "belady")
# Hit rates: {(policy, share): rate}, of Qwen3-30B-A3B, per bytes.
PUBLISHED: Mapping[tuple[str, float], float] = {("lru", 0.25): 0.70, ("lfru", 0.4): 0.82, ("belady", 0.4): 0.901}


@dataclass(frozen=True, slots=True)
class Routing:
    """`ids` [T, L, k]: distinct experts of each layer. Rows of a batch read it at different places."""

    name: str
    ids: NDArray[np.int64]

    def step(self, token: int, rows: int) -> NDArray[np.int32]:
        """[L, rows, k]: the experts of one step. Row r is r / rows of the recording ahead of row 0."""
        length = len(self.ids)
        places = [(token + row * length // rows) % length for row in range(rows)]
        return np.ascontiguousarray(self.ids[places].transpose(1, 0, 2), dtype=np.int32)

    def union(self, tokens: int, rows: int) -> float:
        """Distinct experts that a layer uses in one step, on average over the first `tokens` steps."""
        steps = [self.step(token, rows) for token in range(min(tokens, len(self.ids)))]
        return float(np.mean([len(np.unique(layer)) for step in steps for layer in step]))


def generated(shape: Shape, tokens: int, seed: int = 0) -> Routing:
    """Routing with the locality of trained models, in this shape's geometry."""
    plan = SyntheticRouting(
        tokens=tokens, layers=shape.layers, experts=shape.moe.experts, top_k=shape.moe.top_k, seed=seed,
        sequence_tokens=_SEQUENCE_TOKENS, **_STRENGTHS.get(shape.name, _QWEN3),
    )  # fmt: skip
    return Routing("generator", draw_recording(plan).routing)


def recorded(shape: Shape, file: Path, tokens: int | None = None) -> Routing:
    """What a run recorded. Its layers, experts and top-k have to be the shape's."""
    recording = read_recording(file, shape.moe.experts, tokens)
    found, wanted = (recording.layers, recording.top_k), (shape.layers, shape.moe.top_k)
    if found != wanted:
        raise ConfigError(
            f"{file} has {found[0]} layers with top-{found[1]}; {shape.name} has {wanted[0]} with top-{wanted[1]}",
            fix="give a recording of this geometry (nano's fits qwen1.5-moe), or --routing generator",
        )
    return Routing(file.name, recording.routing)


def never_again(shape: Shape, tokens: int) -> Routing:
    """Each layer goes round all of its experts, so that one comes back only when every other has been used.

    With fewer slots than one round of all layers needs, under LRU and LFRU alike, everything is a miss: this is what
    "nothing resident" means here. The rounds of two layers begin at different experts.
    """
    experts, top_k = shape.moe.experts, shape.moe.top_k
    begin = np.arange(tokens)[:, None, None] * top_k + 7 * np.arange(shape.layers)[None, :, None]
    return Routing("every expert a miss", (begin + np.arange(top_k)) % experts)


@dataclass(frozen=True, slots=True)
class Curve:
    """Hit rates of one policy at SHARES, and what is published beside them (None: nothing is)."""

    policy: str
    rates: tuple[float, ...]
    published: tuple[float | None, ...]


def curves(routing: Routing, shape: Shape, tokens: int = 600, layers: int = 8) -> tuple[Curve, ...]:
    """Hit rates at SHARES by the simulator, on the first `tokens` tokens and `layers` layers: a few seconds."""
    ids = routing.ids[:tokens, :layers]
    recording = Recording(routing.name, ids, np.zeros(len(ids), dtype=np.int32), shape.moe.experts)
    return tuple(
        Curve(
            policy,
            tuple(hit_rate(recording, policy, share) for share in SHARES),
            tuple(PUBLISHED.get((policy, share)) if shape.name == "qwen3-30b" else None for share in SHARES),
        )
        for policy in POLICIES
    )


def hit_rate(recording: Recording, policy: str, share: float) -> float:
    """On a machine without any time in it: only who lies where counts. The first quarter of the tokens warms it up."""
    slots = slots_of_share(share, recording.all_experts)
    machine = Machine(slots, block_bytes=1, link_bytes_per_second=1.0, layer_seconds=0.0)
    return replay(recording, machine, policy, warmup_tokens=recording.tokens // 4).hit_rate


def open_routing(choice: str, shape: Shape, tokens: int) -> Routing | None:
    """`choice` as the command line has it: a file, "generator", or "model", for which there is nothing to force."""
    if choice == "model":
        return None
    if choice == "generator":
        return generated(shape, tokens)
    return recorded(shape, Path(choice))
