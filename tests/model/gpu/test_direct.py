"""Steps that read what is missing by themselves, in Triton's interpreter: the step runs, then the host follows."""

import functools
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.model.gpu.direct import Follower, ReadThrough
from steerpipe.model.gpu.mailbox import Mailbox
from steerpipe.model.gpu.rows import passes
from steerpipe.model.kv_cache import KvSequence
from steerpipe.model.step import decode_rows
from steerpipe.store.formats import ExpertFormat
from steerpipe.transfer.cuda.source import CudaSource
from tests.support.gpu import load_gpu, pack_of
from tests.support.running import CPU, Loaded
from tests.support.tiny import tiny

SMALL = {
    "num_hidden_layers": 2, "vocab_size": 83, "max_position_embeddings": 256, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
STEPS = 3


@functools.cache
def model(form: str) -> Loaded:
    return load_gpu(pack_of(tiny("qwen3_moe", **SMALL).folder, ExpertFormat(form)))


def tokens(count: int, seed: int) -> list[int]:
    return Random(seed).choices(range(SMALL["vocab_size"]), k=count)


def open_direct(loaded: Loaded, slots: int) -> CudaSource:
    return CudaSource.open(loaded.experts.pack, slots=slots, device=CPU, pinned_bytes=1 << 30, direct=True)


class Stepper:
    """What StepGraphs does, without a graph."""

    def __init__(self, loaded: Loaded, source: Any) -> None:
        landing, layers = source.landing, loaded.spec.moe_layers
        assert landing is not None
        top_k = loaded.spec.moe(layers[0]).top_k
        self._loaded = loaded
        self._mailbox = Mailbox(len(layers), top_k, pinned=False)
        self._run = ReadThrough(source, landing, top_k, CPU)
        self._follower = Follower(source, landing, layers, self._mailbox)
        self._stamp = 0

    def step(self, token: int, kv: KvSequence) -> Tensor:
        decoder: Any = self._loaded.decoder
        (part,) = passes(decode_rows([SequenceId(0)], [kv], [token], CPU, cell=1))
        self._stamp += 1
        step = replace(decoder._eager_step(part), mailbox=self._mailbox.words)
        step.stamp[0] = self._stamp
        logits: list[Tensor] = []

        def run() -> None:
            logits.append(decoder._network.head(decoder._network.hidden(step, self._run)))

        with torch.inference_mode():
            self._follower.run(run, self._stamp, lambda: True, lambda: None)
        return logits[0]


@functools.cache
def resident_bits(form: str) -> Tensor:
    loaded = model(form)
    kv = loaded.pool.sequence()
    logits = [loaded.one_row(tokens(STEPS, 1), kv), loaded.prefill(tokens(7, 2), (), kv)]
    logits.append(loaded.one_row(tokens(STEPS, 3), kv))
    kv.free()
    return torch.cat(logits)


def drive(loaded: Loaded, source: Any) -> Tensor:
    stepper, kv = Stepper(loaded, source), loaded.pool.sequence()
    logits = [stepper.step(token, kv) for token in tokens(STEPS, 1)]
    logits.append(loaded.prefill(tokens(7, 2), (), kv, source))
    logits += [stepper.step(token, kv) for token in tokens(STEPS, 3)]
    kv.free()
    return torch.cat(logits)


@pytest.mark.parametrize(("form", "slots"), [("int4", 4), ("int4", 8), ("int8", 6), ("bfloat16", 6)])
def test_no_bit_depends_on_who_brings_an_expert(form: str, slots: int) -> None:
    with open_direct(model(form), slots) as source:
        assert torch.equal(drive(model(form), source), resident_bits(form))
        source.check_integrity()
        counts = source.counters()
        assert counts.misses and counts.leased == counts.hits + counts.late + counts.misses


class Interrupted:
    """A landing whose third `follow` is interrupted, before or after its work."""

    def __init__(self, landing: Any, *, after: bool) -> None:
        self._landing, self._after, self._calls = landing, after, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._landing, name)

    def follow(self, layer: int, reads: Any, ticket: int) -> int:
        self._calls += 1
        if self._calls == 3 and not self._after:
            raise KeyboardInterrupt
        following: int = self._landing.follow(layer, reads, ticket)
        if self._calls == 3:
            raise KeyboardInterrupt
        return following


@pytest.mark.parametrize("after", [False, True])
def test_a_step_that_the_host_was_interrupted_in_leaves_everything_true(*, after: bool) -> None:
    loaded = model("int4")
    with open_direct(loaded, 6) as source:
        kv = loaded.pool.sequence()
        stepper = Stepper(loaded, source)
        stepper._follower._landing = Interrupted(source.landing, after=after)
        stepper.step(3, kv)
        with pytest.raises(KeyboardInterrupt):
            stepper.step(4, kv)
        source.check_integrity()
        kv.truncate(1)
        stepper.step(4, kv)
        source.check_integrity()
        kv.free()
        assert torch.equal(drive(loaded, source), resident_bits("int4"))


def test_a_step_that_was_never_queued_is_not_followed() -> None:
    loaded = model("int4")
    with open_direct(loaded, 6) as source:
        stepper = Stepper(loaded, source)

        def fail() -> None:
            raise RuntimeError("no memory for a graph")

        with pytest.raises(RuntimeError, match="no memory"):
            stepper._follower.run(fail, 1, lambda: True, lambda: None)
        source.check_integrity()
