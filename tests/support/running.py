"""A loaded tiny model, driven step by step: what the engine does, without the engine."""

import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steerpipe.core.errors import TransferError
from steerpipe.core.events import RoutingRecord
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import ExpertSource, Lease, RoutingSink, Wave
from steerpipe.model.cells import CELL
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.model.decoder import Decoder, StepDecoder
from steerpipe.model.kv_cache import KvPool, KvSequence
from steerpipe.model.spec import ModelSpec
from steerpipe.model.step import decode_rows, prefill_rows
from steerpipe.model.weights import build_weights
from steerpipe.store.resident import ResidentExperts

CPU = torch.device("cpu")
_ID = SequenceId(0)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Logits of every row, in every way in which a sequence can be computed. All return [tokens, vocab], fp32."""

    spec: ModelSpec
    decoder: StepDecoder[Any]
    experts: Any  # an ExpertSource, or on a GPU (tests/support/gpu.py) a BlockSource
    pool: KvPool

    def prefill(
        self, tokens: Sequence[int], splits: Sequence[int] = (), kv: KvSequence | None = None,
        experts: Any = None, sink: RoutingSink | None = None,
    ) -> Tensor:  # fmt: skip
        """In chunks that end at `splits` (positions within `tokens`); goes on after what `kv` holds."""
        own = self.pool.sequence() if kv is None else kv
        edges = sorted({0, len(tokens), *splits})
        parts = []
        for start, end in itertools.pairwise(edges):
            rows = prefill_rows(_ID, own, tokens[start:end], self.decoder.rows_device)
            parts.append(self.decoder.forward(rows, experts or self.experts, range(end - start), sink))
        if kv is None:
            own.free()
        return torch.cat(parts)

    def one_row(self, tokens: Sequence[int], kv: KvSequence | None = None, sink: RoutingSink | None = None) -> Tensor:
        """Token by token in the one-row class."""
        own = self.pool.sequence() if kv is None else kv
        parts = []
        for token in tokens:
            rows = decode_rows([_ID], [own], [token], self.decoder.rows_device, cell=1)
            parts.append(self.decoder.forward(rows, self.experts, [0], sink))
        if kv is None:
            own.free()
        return torch.cat(parts)

    def batch(
        self, kvs: Sequence[KvSequence], tokens: Sequence[int],
        experts: Any = None, sink: RoutingSink | None = None,
    ) -> Tensor:  # fmt: skip
        """One step of the batched class: [sequences, vocab]."""
        ids = [SequenceId(i) for i in range(len(kvs))]
        rows = decode_rows(ids, kvs, tokens, self.decoder.rows_device, cell=CELL)
        return self.decoder.forward(rows, experts or self.experts, range(len(kvs)), sink)

    def batched(self, tokens: Sequence[int], sink: RoutingSink | None = None) -> Tensor:
        """Token by token in the batched class, alone in the batch."""
        kv = self.pool.sequence()
        logits = torch.cat([self.batch([kv], [token], sink=sink) for token in tokens])
        kv.free()
        return logits


def load(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU, blocks: int = 64) -> Loaded:
    checkpoint = open_checkpoint(folder)
    weights = build_weights(checkpoint.spec, checkpoint.family.names, checkpoint.read_dense(), dtype, device)
    return Loaded(
        checkpoint.spec,
        Decoder(checkpoint.spec, weights, device),
        ResidentExperts.load(checkpoint, dtype, device),
        KvPool(checkpoint.spec, dtype, device, blocks),
    )


loaded = functools.cache(load)  # for tests that leave the pool as they found it


@dataclass(slots=True)
class Recorder:
    """A RoutingSink that keeps everything."""

    records: list[RoutingRecord] = field(default_factory=list)

    def observe(self, record: RoutingRecord) -> None:
        self.records.append(record)

    def experts(self, layer: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """[rows, k] of one layer in the order of the steps."""
        return np.concatenate([r.experts for r in self.records if r.layer == layer])

    def weights(self, layer: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
        return np.concatenate([r.weights for r in self.records if r.layer == layer])


@dataclass(frozen=True, slots=True)
class _Waves:
    order: tuple[Wave, ...]

    def waves(self) -> Iterator[Wave]:
        yield from self.order


@dataclass(slots=True)
class ShuffledExperts:
    """An ExpertSource whose experts arrive in random order, in waves of random size (of one, with `singly`)."""

    resident: ExpertSource
    random: Random
    singly: bool = True
    waves: int = 0

    @contextmanager
    def lease(self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None) -> Iterator[Lease]:
        with self.resident.lease(layer, routed, keep) as lease:
            table = {expert: wave.table[expert] for wave in lease.waves() for expert in wave.experts}
            left = list(table)
            self.random.shuffle(left)
            order = []
            while left:
                size = 1 if self.singly else self.random.randint(1, len(left))
                experts, left = tuple(sorted(left[:size])), left[size:]
                order.append(Wave(experts, {expert: table[expert] for expert in experts}))
            self.waves += len(order)
            yield _Waves(tuple(order))


@dataclass(slots=True)
class FailingExperts:
    """An ExpertSource that raises TransferError for one expert, `times` times (None: always)."""

    resident: ExpertSource
    layer: int
    expert: int
    times: int | None = None
    failures: int = 0
    open_leases: int = 0

    @contextmanager
    def lease(self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None) -> Iterator[Lease]:
        self.open_leases += 1
        try:
            with self.resident.lease(layer, routed, keep) as lease:
                broken = layer == self.layer and self.expert in routed
                if broken and (self.times is None or self.failures < self.times):
                    self.failures += 1
                    yield _Broken(lease)
                else:
                    yield lease
        finally:
            self.open_leases -= 1


@dataclass(frozen=True, slots=True)
class _Broken:
    lease: Lease

    def waves(self) -> Iterator[Wave]:
        yield from ()
        raise TransferError("an expert could not be read", fix="check the disk, then try again")
