"""Engines over packs: resident or on a ladder, with every logit recorded."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steerpipe.core.errors import SteerpipeError
from steerpipe.core.events import Completion, SequenceFailed
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import ExpertSource, ForwardTap, RoutingSink
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.engine import Engine
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.model.decoder import Decoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.step import StepRows
from steerpipe.model.weights import build_weights
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.resident import ResidentExperts
from tests.support.bits import random_tokens
from tests.support.running import CPU
from tests.transfer.packs import pack_folder, tiny_pack

GREEDY = SamplingSettings(temperature=0.0, max_tokens=6, logprobs=3)
SAMPLED = SamplingSettings(temperature=1.2, top_p=0.95, seed=11, max_tokens=6, logprobs=3)


class RecordingDecoder(Decoder):
    """Keeps a copy of all logits, in the order of the steps."""

    def __init__(self, decoder: Decoder, tap: ForwardTap | None = None) -> None:
        self.__dict__.update(decoder.__dict__ | {"_tap": tap})
        self.seen: list[Tensor] = []

    def forward(
        self, rows: StepRows, experts: ExpertSource, wanted: Sequence[int], sink: RoutingSink | None = None
    ) -> Tensor:
        logits = super().forward(rows, experts, wanted, sink)
        self.seen.append(logits.clone())
        return logits


@dataclass
class Run:
    """What came of some requests."""

    completions: dict[SequenceId, Completion] = field(default_factory=dict)
    errors: dict[SequenceId, SteerpipeError] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)

    def same_bits(self, other: "Run") -> bool:
        if self.errors or other.errors or self.completions.keys() != other.completions.keys():
            return False
        for key, mine in self.completions.items():
            its = other.completions[key]
            if (mine.token_ids, mine.logprobs, mine.top_logprobs) != (its.token_ids, its.logprobs, its.top_logprobs):
                return False
        pairs = zip(self.logits, other.logits, strict=True)
        return all(torch.equal(mine.view(torch.int32), its.view(torch.int32)) for mine, its in pairs)


@functools.cache
def dense_decoder(family: str = "qwen3_moe", dtype: torch.dtype = torch.float32) -> Decoder:
    pack = tiny_pack(family)
    return Decoder(pack.spec, build_weights(pack.spec, pack.family.names, pack.read_dense(), dtype, CPU), CPU)


@functools.cache
def _codec() -> TextCodec:
    return TextCodec.load(pack_folder())


@functools.cache
def resident(family: str, form: ExpertFormat | None, dtype: torch.dtype) -> ResidentExperts:
    return ResidentExperts.load(tiny_pack(family, form), dtype, CPU)


def prompt(seed: int, count: int) -> tuple[int, ...]:
    return tuple(random_tokens(301, count, seed))


def requests() -> list[Request]:
    """Greedy and sampled, one-row and batched, shorter and longer than a chunk."""
    return [
        Request(prompt(1, 21), GREEDY),
        Request(prompt(2, 5), SAMPLED),
        Request(prompt(3, 40), SAMPLED, batched=True),
        Request(prompt(4, 3), GREEDY, batched=True),
    ]


def run(
    experts: ExpertSource, family: str = "qwen3_moe", dtype: torch.dtype = torch.float32,
    asked: Sequence[Request] | None = None, tap: ForwardTap | None = None, pool: KvPool | None = None,
) -> Run:  # fmt: skip
    """All requests through one engine. Everything that the engine held is free again afterwards."""
    decoder = RecordingDecoder(dense_decoder(family, dtype), tap)
    kv = KvPool(decoder.spec, dtype, CPU, 24) if pool is None else pool
    engine = Engine(
        decoder, experts, kv, _codec(), end_tokens=frozenset(), max_context=300, max_batch=8, prefill_chunk=32
    )
    ids = [engine.submit(request) for request in (requests() if asked is None else asked)]
    found = Run(logits=decoder.seen)
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, SequenceFailed):
                found.errors[event.sequence] = event.error
    engine.check_integrity()
    found.completions = {i: engine.take_completion(i) for i in ids if i not in found.errors}
    return found
