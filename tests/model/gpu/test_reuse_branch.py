"""A reuse forecast inside a step of one row: what it says, to whom, of which text; and that no bit depends on it."""

import functools
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe.core.protocols import RouterProbe
from steerpipe.model.gpu.decoder import GpuDecoder
from steerpipe.model.gpu.reuse import ReuseBranch, ReuseMap
from steerpipe.predict.reuse import LiveReuse, ReuseConfig, ReuseForecast
from steerpipe.runtime.reuse_gpu import ListeningReuse, attach_reuse, policy_on_gpu
from steerpipe.transfer.cuda.source import CudaSource
from tests.support.gpu import load_gpu, pack_of
from tests.support.running import CPU, Loaded
from tests.support.tiny import VOCAB, tiny

LAYERS, EXPERTS, HIDDEN, RANK, STEPS = 3, 8, 48, 5, 5  # a step takes the interpreter a second


@functools.cache
def model() -> Loaded:
    return load_gpu(pack_of(tiny("qwen2_moe", num_experts=EXPERTS).folder))


@functools.cache
def forecast() -> ReuseForecast:
    torch.manual_seed(2)
    count = LAYERS * EXPERTS
    config = ReuseConfig(LAYERS, EXPERTS, HIDDEN, (0, 2), context_tokens=3.0, count_tokens=32.0, horizon_tokens=12.0)
    drawn = [torch.randn(2, 2 * HIDDEN, RANK), torch.randn(2, RANK), torch.randn(1, RANK, count), torch.randn(2, count)]
    return ReuseForecast(config, *(each.half().float() for each in drawn), history=0.25)


class Told(ListeningReuse):
    """Keeps what it hears."""

    def __init__(self) -> None:
        super().__init__(LAYERS * EXPERTS, LAYERS, 32.0)
        self.heard: list[np.ndarray] = []

    def expect(self, scores: np.ndarray, now: float) -> None:
        self.heard.append(scores)
        super().expect(scores, now)


class Residuals:
    """A ForwardTap that keeps the residuals of decode steps at the taps of the forecast."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Tensor]] = []

    def begin(self, sequences: tuple, tokens: Tensor, *, decode: bool) -> bool:
        return decode

    def entering(self, layer: int, x: Tensor) -> None:
        pass

    def routed(self, probe: RouterProbe) -> None:
        if probe.layer in forecast().config.taps:
            self.seen.append((probe.layer, probe.residual.clone()))

    def end(self) -> None:
        pass


def source_of(loaded: Loaded, policy: object, slots: int = 8) -> CudaSource:
    return CudaSource.open(
        loaded.experts.pack, slots=slots, device=CPU, pinned_bytes=1 << 30, policy=policy  # type: ignore[arg-type]
    )  # fmt: skip


def drive(loaded: Loaded, source: object, tokens: list[int]) -> Tensor:
    """One text: a prompt, then one row after the other; bits of all logits."""
    kv = loaded.pool.sequence()
    use = Loaded(loaded.spec, loaded.decoder, source, loaded.pool)
    logits = torch.cat([use.prefill(tokens[:5], (), kv), use.one_row(tokens[5:], kv)])
    kv.free()
    return logits.view(torch.int32)


def tokens(seed: int) -> list[int]:
    return Random(seed).choices(range(VOCAB), k=5 + STEPS)


@pytest.fixture
def decoder() -> GpuDecoder:
    made = model().decoder
    assert isinstance(made, GpuDecoder)
    yield made
    made.reuse, made.tap = None, None


def test_the_policy_hears_what_the_forecast_says_of_the_text_that_decodes(decoder: GpuDecoder) -> None:
    policy, residuals = Told(), Residuals()
    attach_reuse(decoder, policy, forecast())
    decoder.tap = residuals
    with source_of(model(), policy) as source:
        for seed in (3, 4):  # the second text starts without the first one's past
            policy.heard.clear()
            residuals.seen.clear()
            drive(model(), source, tokens(seed))
            live = LiveReuse(forecast())
            said = [live.at(layer, residual) for layer, residual in residuals.seen]
            assert len(said) == 2 * STEPS
            assert len(policy.heard) == 2 * STEPS
            for own, other in zip(policy.heard, said, strict=False):
                torch.testing.assert_close(torch.from_numpy(own), other, atol=0.05, rtol=0.01)  # inputs are fp16


def test_no_bit_depends_on_the_forecast_and_it_changes_who_is_evicted(decoder: GpuDecoder) -> None:
    want = drive(model(), model().experts, tokens(5))
    misses = []
    for policy in ("lfru", policy_on_gpu("auto", forecast())):
        attach_reuse(decoder, policy, forecast())  # type: ignore[arg-type]
        with source_of(model(), policy) as source:
            assert torch.equal(drive(model(), source, tokens(5)), want)
            source.check_integrity()
            misses.append((source.counters().misses, source.residents))
    assert misses[0] != misses[1]


def test_a_batch_ends_what_was_said(decoder: GpuDecoder) -> None:
    policy = Told()
    attach_reuse(decoder, policy, forecast())
    loaded = model()
    with source_of(loaded, policy) as source:
        drive(loaded, source, tokens(7))
        assert policy._told is not None
        kvs = [loaded.pool.sequence(), loaded.pool.sequence()]
        Loaded(loaded.spec, decoder, source, loaded.pool).batch(kvs, [1, 2])
        assert policy._told is None, "not even by what was said last"
        for kv in kvs:
            kv.free()


def test_after_a_pause_the_newest_is_heard_and_taps_are_heard_in_step_again() -> None:
    taps, count = 4, 6
    told = ReuseMap(
        tuple(range(taps)), torch.zeros(taps, 2, 4), torch.zeros(taps, 2), torch.zeros(1, count, 2),
        torch.zeros(taps, count), 0.5,
    )  # fmt: skip
    branch = ReuseBranch(told, CPU, Told())

    def speak(turn: int, tap: int) -> None:
        bits = np.full(count, 10 * turn + tap, dtype=np.float32).view(np.uint32).astype(np.int64)
        branch._view[tap] = turn << 32 | bits

    def heard() -> float | None:
        found = branch.newest()
        return None if found is None else float(found[0])

    for tap in range(3):
        speak(1, tap)
        assert heard() == 10 + tap
    for turn, tap in [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]:  # that step's end, and one in which nobody listens
        speak(turn, tap)
    assert heard() == 23 and heard() is None
    for tap in range(4):
        speak(3, tap)
        assert heard() == 30 + tap and heard() is None
