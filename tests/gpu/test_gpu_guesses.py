"""The law with predictors: right, wrong or random, guesses change no bit of a direct, a served or a leased step."""

import functools
import math
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
from torch import Tensor

from steerpipe.core.events import RoutingRecord
from steerpipe.core.ids import ExpertId
from steerpipe.store.formats import ExpertFormat
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.queue import Reason
from tests.support.running import Loaded
from tests.support.tiny import VOCAB, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

if torch.cuda.is_available():  # importing kernels needs triton
    from tests.support.gpu import load_gpu, pack_of

CUDA = torch.device("cuda")
STEPS = 40


@functools.cache
def model(form: str) -> Loaded:
    pack = pack_of(tiny("qwen2_moe", num_experts=24, num_experts_per_tok=4).folder, ExpertFormat(form))
    return load_gpu(pack, torch.bfloat16, CUDA)


@dataclass
class Recorder:
    """What every forward pass routed to, in order."""

    layers: int
    passes: list[set[ExpertId]] = field(default_factory=list)
    _records: int = 0

    def observe(self, record: RoutingRecord) -> None:
        if self._records % self.layers == 0:
            self.passes.append(set())
        self._records += 1
        self.passes[-1] |= {ExpertId(record.layer, int(expert)) for expert in record.experts.reshape(-1)}


@dataclass
class Predictor:
    """Guesses before each pass. `truth`: what the passes will route to."""

    source: CudaSource
    kind: str
    truth: list[set[ExpertId]]
    random: Random = field(default_factory=lambda: Random(7))
    at: int = 0

    def guess(self) -> None:
        wanted, every = self.truth[self.at], self.source.experts
        self.at += 1
        said = {
            "perfect": sorted(wanted),
            "wrong": [expert for expert in every if expert not in wanted][::3],
            "random": self.random.sample(every, 20),
        }[self.kind]
        if self.kind == "random":
            self.source.cancel_prefetches(self.random.sample(every, 20))
        self.source.protect(said[:6])
        self.source.prefetch(said, Reason.PREFETCH, math.inf)


def drive(loaded: Loaded, experts: object, recorder: Recorder | None, predictor: Predictor | None) -> Tensor:
    """A prompt, then one row and a batch in turn: all logits, as bits."""
    use = replace(loaded, experts=experts)
    tokens = Random(3).choices(range(VOCAB), k=41 + 5 * STEPS)
    kvs = [loaded.pool.sequence()]
    guess = predictor.guess if predictor is not None else lambda: None
    guess()
    logits = [use.prefill(tokens[:41], (), kvs[0], sink=recorder)]
    kvs += [kvs[0].fork(length) for length in (40, 3, 16)]
    for step in range(STEPS):
        own = tokens[41 + 5 * step : 46 + 5 * step]
        guess()
        logits.append(use.one_row(own[:1], kvs[0], sink=recorder))
        if step % 4 == 3:
            guess()
            logits.append(use.batch(kvs, own[1:], sink=recorder))
    for kv in kvs:
        kv.free()
    return torch.cat(logits).cpu().view(torch.int32)


@functools.cache
def truth(form: str) -> tuple[Tensor, Recorder]:
    recorder = Recorder(len(model(form).spec.moe_layers))
    return drive(model(form), model(form).experts, recorder, None), recorder


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "served"])
@pytest.mark.parametrize("kind", ["perfect", "wrong", "random"])
@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
def test_no_bit_depends_on_what_is_guessed(form: str, kind: str, direct: bool) -> None:
    bits, recorder = truth(form)
    pack = model(form).experts.pack
    with CudaSource.open(pack, slots=36, device=CUDA, pinned_bytes=1 << 30, direct=direct) as source:
        source._shelf.chunk_bytes = 2048  # blocks of 4 to 7 KB: several chunks each
        found = drive(model(form), source, None, Predictor(source, kind, recorder.passes))
        assert torch.equal(found, bits)
        counts = source.counters()
        assert counts.prefetch.transfers > 10 and counts.misses
        assert bool(counts.prefetch.hits + counts.prefetch.late) or kind == "wrong"
        source.check_integrity()
