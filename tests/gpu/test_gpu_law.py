"""The law on the GPU: memory and tiers change time, never a bit of the logits; nor does a graph against leases.

Every run feeds the same tokens: a prompt in two chunks, 64 tokens of one row, and batches of one and of five. A budget
that holds a layer's experts is served while a captured graph waits; a smaller one takes leases. All models are bf16.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from steerpipe.core.errors import TransferError
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.engine import Engine
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.store.formats import ExpertFormat
from tests.support.running import Loaded
from tests.support.tiny import VOCAB, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

if torch.cuda.is_available():  # importing kernels needs triton
    from tests.support.gpu import MemoryBlocks, load_gpu, open_blocks, pack_of

CUDA = torch.device("cuda")
FORMS = ("bfloat16", "int8", "int4")
BUDGETS = {"100 %": 1.0, "50 %": 0.5, "25 %": 0.25, "12.5 %: two slots": 0.125}  # of 18 experts
ONE_ROW, BATCHED = 64, 6


@functools.cache
def model(form: str) -> Loaded:
    return load_gpu(pack_of(tiny("qwen3_moe", head_dim=12).folder, ExpertFormat(form)), torch.bfloat16, CUDA)


def tokens(count: int, seed: int) -> list[int]:
    return Random(seed).choices(range(VOCAB), k=count)


@contextmanager
def no_graphs(loaded: Loaded) -> Iterator[None]:
    loaded.decoder.graphs = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        loaded.decoder.graphs = True  # type: ignore[attr-defined]


def drive(loaded: Loaded, experts: Any) -> Tensor:
    """All logits, as bits."""
    use = replace(loaded, experts=experts)
    kvs = [loaded.pool.sequence()]
    logits = [use.prefill(tokens(41, 0), (21,), kvs[0])]
    logits.append(use.one_row(tokens(ONE_ROW, 1), kvs[0]))
    kvs += [kvs[0].fork(length) for length in (40, 3, 16, 41)]
    for step in range(BATCHED):
        logits.append(use.batch(kvs[:1], tokens(1, 100 + step)))
        logits.append(use.batch(kvs, tokens(len(kvs), 200 + step)))
    for kv in kvs:
        kv.free()
    assert loaded.pool.live_blocks == 0
    return torch.cat(logits).cpu().view(torch.int32)


@functools.cache
def all_resident(form: str) -> Tensor:
    found = drive(model(form), model(form).experts)
    assert found.view(torch.float32).isfinite().all()
    return found


@pytest.mark.parametrize("budget", list(BUDGETS)[1:])
@pytest.mark.parametrize("form", FORMS)
def test_no_bit_depends_on_the_budget(form: str, budget: str) -> None:
    with open_blocks(model(form).experts.pack, BUDGETS[budget], CUDA) as source:
        assert source.serves(2) == (budget != "12.5 %: two slots"), "one row of top-2 is served at 25 %"
        assert torch.equal(drive(model(form), source), all_resident(form))
        source.check_integrity()
        assert source.counters().misses and source.counters().evictions


@pytest.mark.parametrize("form", FORMS)
def test_leases_and_single_launches_give_the_bits_of_graphs(form: str) -> None:
    leased = MemoryBlocks(model(form).experts.pack, CUDA, Random(1))
    with no_graphs(model(form)):
        assert torch.equal(drive(model(form), leased), all_resident(form))
        assert torch.equal(drive(model(form), model(form).experts), all_resident(form))
    assert leased.leases


def test_no_bit_depends_on_the_order_of_waves() -> None:
    shuffled = MemoryBlocks(model("int4").experts.pack, CUDA, Random(3))
    assert torch.equal(drive(model("int4"), shuffled), all_resident("int4"))
    assert shuffled.waves > len(shuffled.leases)


@pytest.mark.parametrize("tier", [(0.0, 0.0), (0.3, 0.0), (0.0, 1.0)], ids=["disk", "some pinned", "all in RAM"])
@pytest.mark.parametrize("budget", [0.5, 0.125])
@pytest.mark.parametrize("form", FORMS)
def test_no_bit_depends_on_the_tier(form: str, budget: float, tier: tuple[float, float]) -> None:
    with open_blocks(model(form).experts.pack, budget, CUDA, *tier) as source:
        assert torch.equal(drive(model(form), source), all_resident(form))
        source.check_integrity()


@dataclass
class Interrupted:
    """A source whose `serve` fails now and then, before or after it has done its work."""

    source: Any
    problem: Callable[[], BaseException]
    every: int = 7
    calls: int = 0
    failures: int = 0
    released: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def serve(self, layer: int, routed: Sequence[int], *given: Any, **named: Any) -> None:
        self.calls += 1
        fails = self.calls % self.every == 0
        if not fails or self.failures % 2:
            self.source.serve(layer, routed, *given, **named)
        if fails:
            self.failures += 1
            raise self.problem()

    def release(self) -> None:
        self.released += 1
        self.source.release()


def lost() -> TransferError:
    return TransferError("an expert could not be read", fix="check the disk, then try again")


@pytest.mark.parametrize("problem", [lost, KeyboardInterrupt], ids=["lost", "interrupted"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_step_that_serving_gave_up_leaves_everything_as_it_was(rows: int, problem: Any) -> None:
    loaded = model("int4")
    kvs = [loaded.pool.sequence() for _ in range(rows)]
    want = [decode(loaded, loaded.experts, kvs, tokens(rows, step)) for step in range(12)]
    for kv in kvs:
        kv.truncate(0)
    with open_blocks(loaded.experts.pack, 0.5, CUDA) as source:
        failing = Interrupted(source, problem)
        for step in range(12):
            try:
                found = decode(loaded, failing, kvs, tokens(rows, step))
            except (TransferError, KeyboardInterrupt):
                for kv in kvs:
                    kv.truncate(step)
                found = decode(loaded, failing, kvs, tokens(rows, step))
            assert torch.equal(found, want[step]), f"step {step}"
        assert failing.failures == failing.released >= 2
        source.check_integrity()
    for kv in kvs:
        kv.free()


def decode(loaded: Loaded, experts: Any, kvs: Any, fed: list[int]) -> Tensor:
    use = replace(loaded, experts=experts)
    return use.one_row(fed, kvs[0]) if len(kvs) == 1 else use.batch(kvs, fed)


def answers(experts: Any) -> list[tuple[int, ...]]:
    """Two greedy answers from one engine; a step that is interrupted is taken again."""
    loaded = model("int4")
    codec = TextCodec.load(tiny("qwen3_moe", head_dim=12).folder)
    engine = Engine(
        loaded.decoder, experts, loaded.pool, codec, end_tokens=frozenset(), max_context=200, max_batch=4,
        prefill_chunk=32,
    )  # fmt: skip
    greedy = SamplingSettings(temperature=0.0, max_tokens=16)
    ids = [engine.submit(Request(tuple(tokens(9, seed)), greedy, batched=seed == 1)) for seed in (0, 1)]
    while not engine.idle:
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    engine.check_integrity()
    return [engine.take_completion(i).token_ids for i in ids]


def test_an_engine_works_on_after_interrupts() -> None:
    with open_blocks(model("int4").experts.pack, 0.5, CUDA) as source:
        failing = Interrupted(source, KeyboardInterrupt, every=11)
        assert answers(failing) == answers(model("int4").experts)
        assert failing.failures
        source.check_integrity()
