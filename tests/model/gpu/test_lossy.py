"""GpuDecoder with a desk that answers misses, against Decoder with the same desk, in Triton's interpreter."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe.core.errors import ConfigError
from steerpipe.core.ids import ExpertId, SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.core.quality import MissPolicy, QualityPlan, Substituted
from steerpipe.model.decoder import Decoder
from steerpipe.model.gpu.decoder import GpuDecoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.moe import Nearby, expert_ffn
from steerpipe.model.weights import build_weights
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.proposals import CommittedRoutes
from steerpipe.predict.records import Geometry
from steerpipe.predict.routers import routers_of_weights
from steerpipe.runtime.substitutes import Shelf, Substitutes, best_ranks
from steerpipe.store.blocks import decode, encode
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import plan_block
from steerpipe.store.reader import Pack
from steerpipe.store.resident import ResidentExperts
from steerpipe.transfer.cuda.copier import HostCopier, Mark
from steerpipe.transfer.cuda.nearby import block_ffn
from steerpipe.transfer.cuda.source import CudaSource
from tests.support.gpu import MAX_BATCH, MemoryBlocks, pack_of
from tests.support.running import CPU, Loaded, Recorder
from tests.support.tiny import tiny

LAYERS, EXPERTS, RANKS, VOCAB = 3, 8, 2, 83
SMALL = {
    "num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": RANKS, "vocab_size": VOCAB,
    "max_position_embeddings": 256, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
RELATIVE = 1e-4  # of the rms of all logits


@functools.cache
def pack(form: str | None = None) -> Pack:
    return pack_of(tiny("qwen2_moe", **SMALL).folder, None if form is None else ExpertFormat(form))


@functools.cache
def experts() -> ResidentExperts:
    return ResidentExperts.load(pack(), torch.float32, CPU)


@dataclass
class EveryOther:
    """A Shelf on which odd experts are missing, and come two layers later; also what computes them where they lie."""

    newest: int = 0

    def missing(self, layer: int, experts: np.ndarray) -> np.ndarray:
        self.newest = layer
        return experts % 2 == 1

    def send_for(self, layer: int, ranks: Mapping[int, int]) -> int:
        return len(ranks)

    def compute(self, expert: ExpertId, x: Tensor) -> Tensor | None:
        return None if self.newest + 1 - expert.layer < 2 else self.output(expert, x)

    def take(self, layer: int, experts: list[int]) -> Nearby:
        return Near(self, layer, tuple(sorted(experts)))

    def output(self, expert: ExpertId, x: Tensor) -> Tensor:
        with experts().lease(expert.layer, [expert.expert]) as lease:
            (wave,) = lease.waves()
            return expert_ffn(x, wave.table[expert.expert])


@dataclass
class Near:
    shelf: EveryOther
    layer: int
    experts: tuple[int, ...]
    held: bool = True

    def compute(self, expert: int, x: Tensor) -> Tensor:
        assert self.held
        return self.shelf.output(ExpertId(self.layer, expert), x)

    def let_go(self) -> None:
        self.held = False


def desk_and_tap(policy: MissPolicy) -> tuple[Substitutes, CommittedRoutes]:
    spec = pack().spec
    weights = build_weights(spec, pack().family.names, pack().read_dense(), torch.float32, CPU)
    lookahead = RouterLookahead(routers_of_weights(spec, weights), shared=True)
    routes = CommittedRoutes(
        dict.fromkeys(range(1, LAYERS), lookahead), Geometry(LAYERS, EXPERTS, RANKS, spec.hidden), spec.moe_layers,
        renormalise=spec.moe(0).renormalise, horizon=1,
    )  # fmt: skip
    defaults = torch.randn(LAYERS, EXPERTS, spec.hidden, generator=torch.Generator().manual_seed(1))
    plan, shelf = QualityPlan.uniform(policy, LAYERS, RANKS), EveryOther()
    return Substitutes(plan, shelf, spec.moe_layers, defaults, routes, nearby=shelf), routes


def on_cpu(policy: MissPolicy) -> tuple[Loaded, Substitutes]:
    desk, tap = desk_and_tap(policy)
    spec = pack().spec
    weights = build_weights(spec, pack().family.names, pack().read_dense(), torch.float32, CPU)
    return Loaded(
        spec, Decoder(spec, weights, CPU, tap, desk), experts(), KvPool(spec, torch.float32, CPU, 16)
    ), desk  # fmt: skip


def on_gpu(
    source: object, desk: Substitutes | None, tap: CommittedRoutes | None = None, form: str | None = None
) -> Loaded:
    own = pack(form)
    weights = build_weights(own.spec, own.family.names, own.read_dense(), torch.float32, CPU)
    pool = KvPool(own.spec, torch.float32, CPU, 16)
    decoder = GpuDecoder(own.spec, weights, pool, CPU, max_batch=MAX_BATCH, tap=tap, misses=desk)
    return Loaded(own.spec, decoder, source, pool)


def drive(model: Loaded, sink: Recorder | None = None) -> Tensor:
    """A prompt, a token of the one-row class, a batch of two: all logits."""
    random = Random(0)
    kv = model.pool.sequence()
    logits = [model.prefill(random.choices(range(VOCAB), k=3), (), kv)]
    other = kv.fork(3)
    logits.append(model.one_row(random.choices(range(VOCAB), k=1), kv, sink=sink))
    logits.append(model.batch([kv, other], random.choices(range(VOCAB), k=2), sink=sink))
    return torch.cat(logits)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < RELATIVE * expected.pow(2).mean().sqrt())


@pytest.mark.parametrize("policy", MissPolicy)
def test_every_policy_is_what_it_is_on_a_cpu(policy: MissPolicy) -> None:
    there, desk = on_cpu(policy)
    own, tap = desk_and_tap(policy)
    here = on_gpu(MemoryBlocks(pack(), CPU, Random(0)), own, tap)
    sinks = Recorder(), Recorder()
    found, expected = drive(here, sinks[0]), drive(there, sinks[1])
    assert close(found, expected)
    for layer in range(LAYERS):  # what is recorded is the routers' own choice
        assert np.array_equal(sinks[0].experts(layer), sinks[1].experts(layer))
    assert own.accounts.total == desk.accounts.total
    exact = resident_logits()
    lossless = policy in (MissPolicy.WAIT, MissPolicy.CPU)
    assert close(found, exact) == lossless and torch.equal(found[:3], exact[:3])  # prompts are exact
    if policy is MissPolicy.CPU:
        assert own.accounts.total.computed and not own.accounts.total.substituted


@functools.cache
def resident_logits(form: str | None = None) -> Tensor:
    return drive(on_gpu(MemoryBlocks(pack(form), CPU), None, form=form))


class CountedCopier(HostCopier):
    """Copies that come late: nothing is passed before somebody says so, or waits for it on the computing stream."""

    def __init__(self) -> None:
        super().__init__()
        self.joins = self.come = 0

    def join(self, mark: Mark) -> None:
        self.joins += 1
        self.come = max(self.come, mark.ordinal)

    def passed(self, mark: Mark) -> bool:
        return mark.ordinal <= self.come

    def wait(self, mark: Mark) -> None:
        self.come = max(self.come, mark.ordinal)

    def drain(self) -> None:
        self.come = self._marks


def opened(slots: int, form: str | None = None, pinned: int = LAYERS * EXPERTS) -> tuple[CudaSource, CountedCopier]:
    copier, own = CountedCopier(), pack(form)
    size = own.layout(0).block_bytes
    source = CudaSource.open(
        own, slots=slots, device=CPU, pinned_bytes=pinned * size, copier=copier, direct=False
    )  # fmt: skip
    return source, copier


def lossy_on(source: CudaSource, policy: MissPolicy, form: str | None = None) -> tuple[Loaded, Substitutes]:
    spec = pack().spec
    defaults = torch.randn(LAYERS, EXPERTS, spec.hidden, generator=torch.Generator().manual_seed(1))
    plan = QualityPlan.uniform(policy, LAYERS, RANKS)
    desk = Substitutes(plan, source.impatient(), spec.moe_layers, defaults, nearby=source.nearby())
    return on_gpu(source, desk, form=form), desk


@pytest.mark.parametrize(("policy", "pinned"), [(MissPolicy.DROP, LAYERS * EXPERTS), (MissPolicy.PATCH, 4)])
def test_decode_puts_no_wait_for_copies_on_the_computing_stream(policy: MissPolicy, pinned: int) -> None:
    source, copier = opened(6, pinned=pinned)
    with source:
        model, desk = lossy_on(source, policy)
        kv = model.pool.sequence()
        model.prefill(list(range(3)), (), kv)
        before, sent = copier.joins, source.counters().read_bytes
        assert before  # the prompt waits: it is exact
        for token in range(4):
            model.one_row([token], kv)
            if token % 2 == 1:
                copier.drain()  # what was sent for has come
        assert copier.joins == before
        assert source.counters().read_bytes > sent
        assert desk.accounts.total.substituted and desk.accounts.total.uses == 4 * LAYERS * RANKS
        source.check_integrity()


@dataclass
class Greedy:
    """A tap that sends for all experts of the next layer, as `commit` does for some."""

    shelf: Shelf
    sent: int = 0

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor, *, decode: bool) -> bool:
        return decode

    def entering(self, layer: int, x: Tensor) -> None:
        pass

    def routed(self, probe: RouterProbe) -> None:
        if probe.layer + 1 < LAYERS:
            everybody = np.arange(EXPERTS)[None]
            missing = self.shelf.missing(probe.layer + 1, everybody)
            self.sent += self.shelf.send_for(probe.layer + 1, best_ranks(everybody, missing))

    def end(self) -> None:
        pass


def test_who_sends_for_the_next_layer_takes_no_expert_that_this_one_has_found() -> None:
    source, copier = opened(6)
    with source:
        model, desk = lossy_on(source, MissPolicy.DROP)
        kv = model.pool.sequence()
        model.prefill(list(range(3)), (), kv)
        model.decoder.tap = tap = Greedy(source.impatient())  # type: ignore[union-attr]
        copier.drain()
        before = copier.joins
        for token in range(4):
            model.one_row([token], kv)
            copier.drain()
        assert copier.joins == before and tap.sent
        assert 0 < desk.accounts.total.substituted < desk.accounts.total.uses
        source.check_integrity()


def use_shelf(shelf: Shelf, x: Tensor) -> None:
    """One of every word to it."""
    shelf.missing(1, np.array([[0, 5]]))
    shelf.send_for(1, {0: 0, 5: 1})
    shelf.compute(ExpertId(0, 1), x)


@pytest.mark.parametrize(
    ("word", "pinned"),
    [*((word, LAYERS * EXPERTS) for word in ("begin", "fetch", "settle_marked", "read")), ("land", 0)],
)
def test_what_an_interrupt_left_half_done_is_mended_before_the_next_word(
    monkeypatch: pytest.MonkeyPatch, word: str, pinned: int
) -> None:
    source, copier = opened(6, pinned=pinned)
    with source:
        shelf, x = source.impatient(), torch.randn(1, pack().spec.hidden)
        with source.lease(0, [1]) as lease:
            list(lease.waves())
        shelf.send_for(2, {3: 0})
        copier.drain()
        done = getattr(source._shelf, word)

        def interrupted(*given: Any, **named: Any) -> None:
            done(*given, **named)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(source._shelf, word, interrupted)
            with pytest.raises(KeyboardInterrupt):
                use_shelf(shelf, x)
        use_shelf(shelf, x)
        with source.lease(1, [0, 5]) as lease:
            list(lease.waves())
        source.check_integrity()


@pytest.mark.slow
def test_a_batch_that_uses_most_of_a_layer_does_not_wait_either() -> None:
    source, copier = opened(16)
    with source:
        model, desk = lossy_on(source, MissPolicy.DROP)
        kvs = [model.pool.sequence() for _ in range(6)]
        for kv in kvs:
            model.prefill([1], (), kv)
        model.batch(kvs, range(6))
        copier.drain()
        before = copier.joins
        leased = source.counters().leased
        model.batch(kvs, range(6, 12))
        assert copier.joins == before and desk.accounts.total.substituted
        assert source.counters().leased - leased >= EXPERTS // 2  # else nothing would have been streamed


def test_the_exact_engine_does_wait_there() -> None:
    source, copier = opened(6)
    with source:
        model = on_gpu(source, None)
        kv = model.pool.sequence()
        model.prefill(list(range(3)), (), kv)
        before = copier.joins
        for token in range(4):
            model.one_row([token], kv)
        assert copier.joins > before


def test_what_a_token_went_without_comes_is_kept_and_mends_it() -> None:
    source, copier = opened(12)
    with source:
        shelf = source.impatient()
        routed = np.array([[0, 5], [5, 7]])
        assert shelf.missing(1, routed).all()
        assert shelf.send_for(1, {0: 0, 5: 0, 7: 1}) == 3
        x = torch.randn(3, pack().spec.hidden)
        assert shelf.missing(1, routed).all() and shelf.compute(ExpertId(1, 5), x) is None  # on its way is not there
        assert shelf.send_for(1, {5: 0}) == 0  # nor sent for twice
        copier.drain()
        assert not shelf.missing(1, routed).any()
        for rows in (1, 3, 17):
            given = torch.randn(rows, pack().spec.hidden)
            found = shelf.compute(ExpertId(1, 5), given)
            expected = EveryOther().output(ExpertId(1, 5), given)
            assert found is not None and close(found, expected)
        source.check_integrity()
        assert ExpertId(1, 5) in source.residents


def test_only_so_many_are_on_their_way_and_first_choices_have_half_for_themselves() -> None:
    source, _ = opened(20)
    with source:
        shelf = source.impatient()
        assert shelf.send_for(0, dict.fromkeys(range(EXPERTS), 1)) == 8
        assert shelf.send_for(1, dict.fromkeys(range(EXPERTS), 1)) == 0
        assert shelf.send_for(2, dict.fromkeys(range(EXPERTS), 0)) == 8


@pytest.mark.parametrize("form", ["int8", "bfloat16"])
def test_what_is_pinned_is_computed_there_nearly_as_the_kernels_do(form: str) -> None:
    for hidden, width in ((48, 24), (64, 32), (512, 48)):
        layout = plan_block(ExpertFormat(form), hidden, width)
        gate, up, down = (torch.randn(*shape) / 8 for shape in ((width, hidden), (width, hidden), (hidden, width)))
        block = encode(layout, gate, up, down, "an expert")
        for rows in (1, 3, 16):
            x = torch.randn(rows, hidden).to(torch.bfloat16)
            found, expected = (
                block_ffn(x, block, layout.form),
                expert_ffn(x.float(), decode(layout, block, torch.float32)),
            )
            assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_misses_are_shared_between_link_and_cpu() -> None:
    source, _ = opened(6, "int8")
    with source:
        model, desk = lossy_on(source, MissPolicy.CPU, "int8")
        nearby = source.nearby()
        assert nearby.link_seconds > 0
        found, expected = drive(model), resident_logits("int8")
        counts: Substituted = desk.accounts.total
        assert counts.computed and not counts.substituted
        assert (found - expected).abs().max() < 0.05 * expected.pow(2).mean().sqrt()
        source.check_integrity()


def test_what_is_not_pinned_is_left_to_the_link() -> None:
    source, _ = opened(6, "int8", pinned=2)
    with source:
        nearby = source.nearby()
        nearby.cpu.note(0.0)  # as quick as can be: all of them
        taken = nearby.take(0, [5, 1, 0])
        assert taken is not None and taken.experts == (0, 1)
        assert nearby.take(2, [0, 1]) is None


def test_nothing_pinned_nobody_computes() -> None:
    source, _ = opened(6, "int8", pinned=0)
    with source, pytest.raises(ConfigError, match="no expert lies in pinned memory") as raised:
        source.nearby()
    assert "--pin" in raised.value.fix
