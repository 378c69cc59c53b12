"""Eviction by the reuse forecast on a GPU: it says what it says on a CPU, victims change, and no bit does."""

import functools
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe import Pipeline
from steerpipe.core.protocols import RouterProbe
from steerpipe.predict.reuse import LiveReuse, ReuseConfig, ReuseForecast
from steerpipe.runtime import reuse_gpu
from steerpipe.runtime.reuse_gpu import ListeningReuse, attach_reuse
from steerpipe.store.formats import ExpertFormat
from steerpipe.transfer.cuda.source import CudaSource
from tests.support.running import Loaded
from tests.support.tiny import VOCAB, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

if torch.cuda.is_available():  # importing kernels needs triton
    from steerpipe.model.gpu.tap import Forecaster, Lookahead
    from tests.support.gpu import load_gpu, pack_of

CUDA = torch.device("cuda")
LAYERS, EXPERTS, HIDDEN, RANK, STEPS, PROMPT = 4, 24, 48, 5, 40, 41
SETTINGS: dict[str, Any] = {"device": "cuda", "profile": False, "kv_memory": "64MiB", "predict": "off"}


@functools.cache
def model(form: str) -> Loaded:
    made = tiny("qwen2_moe", num_experts=EXPERTS, num_experts_per_tok=4, num_hidden_layers=LAYERS)
    return load_gpu(pack_of(made.folder, ExpertFormat(form)), torch.bfloat16, CUDA)


@functools.cache
def forecast() -> ReuseForecast:
    torch.manual_seed(2)
    count = LAYERS * EXPERTS
    config = ReuseConfig(LAYERS, EXPERTS, HIDDEN, (0, 2, 3), 3.0, 32.0, 12.0)
    drawn = [torch.randn(3, 2 * HIDDEN, RANK), torch.randn(3, RANK), torch.randn(1, RANK, count), torch.randn(3, count)]
    return ReuseForecast(config, *(each.half().float() for each in drawn), history=0.25)


class Told(ListeningReuse):
    """Keeps what it hears; `spite`: and evicts who is wanted soonest."""

    def __init__(self, *, spite: bool = False) -> None:
        super().__init__(LAYERS * EXPERTS, LAYERS, 32.0)
        self.heard: list[np.ndarray] = []
        self._sign = -100.0 if spite else 1.0

    def expect(self, scores: np.ndarray, now: float) -> None:
        self.heard.append(scores)
        super().expect(self._sign * scores, now)


def drive(loaded: Loaded, experts: object) -> Tensor:
    """Two texts, one row after the other behind prompts: all logits, as bits."""
    use = Loaded(loaded.spec, loaded.decoder, experts, loaded.pool)
    bits = []
    for seed in (3, 4):
        tokens, kv = Random(seed).choices(range(VOCAB), k=PROMPT + STEPS), loaded.pool.sequence()
        bits += [use.prefill(tokens[:PROMPT], (), kv), use.one_row(tokens[PROMPT:], kv)]
        kv.free()
    return torch.cat(bits).cpu().view(torch.int32)


@pytest.fixture
def alone() -> Iterator[None]:
    yield
    for form in ("bfloat16", "int4"):
        decoder: Any = model(form).decoder
        decoder.reuse = decoder.forecaster = decoder.tap = None


@functools.cache
def truth(form: str) -> Tensor:
    return drive(model(form), model(form).experts)


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("spite", [False, True])
@pytest.mark.parametrize(("slots", "direct"), [(40, True), (40, False), (5, False)])
@pytest.mark.parametrize("form", ["bfloat16", "int4"])
def test_no_bit_depends_on_who_is_evicted(
    form: str, slots: int, direct: bool, spite: bool, predicts: bool, alone: None
) -> None:
    loaded, policy = model(form), Told(spite=spite)
    decoder: Any = loaded.decoder
    pack = loaded.experts.pack
    with CudaSource.open(pack, slots=slots, device=CUDA, pinned_bytes=1 << 30, policy=policy, direct=direct) as source:
        attach_reuse(decoder, policy, forecast())
        if predicts:
            ones, zeros = torch.ones(LAYERS, device=CUDA), torch.zeros(LAYERS, device=CUDA)
            decoder.forecaster = Forecaster((Lookahead(ones, zeros),))
        assert torch.equal(drive(loaded, source), truth(form))
        source.check_integrity()
        assert source.counters().misses
    assert len(policy.heard) > STEPS  # of two texts, three taps each


class Residuals:
    """A ForwardTap: the steps are launched one by one, and it sees what the forecast sees."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Tensor]] = []

    def begin(self, sequences: tuple, tokens: Tensor, *, decode: bool) -> bool:
        return decode

    def entering(self, layer: int, x: Tensor) -> None:
        pass

    def routed(self, probe: RouterProbe) -> None:
        self.seen.append((probe.layer, probe.residual.float()))

    def end(self) -> None:
        pass


def test_what_is_heard_is_what_the_forecast_says_on_a_cpu(alone: None) -> None:
    loaded, policy, residuals = model("bfloat16"), Told(), Residuals()
    decoder: Any = loaded.decoder
    pack = loaded.experts.pack
    with CudaSource.open(pack, slots=40, device=CUDA, pinned_bytes=1 << 30, policy=policy, direct=False) as source:
        attach_reuse(decoder, policy, forecast())
        decoder.tap = residuals
        drive(loaded, source)
    said: list[Tensor] = []
    live = LiveReuse(forecast())
    for number, (layer, residual) in enumerate(residuals.seen):
        if number == len(residuals.seen) // 2:
            live.restart()
        if (scores := live.at(layer, residual)) is not None:
            said.append(scores)
    assert len(policy.heard) > STEPS
    found = torch.stack([torch.from_numpy(each) for each in policy.heard])
    expected = torch.stack(said)
    nearest = torch.cdist(found, expected).min(dim=1).values
    assert (nearest < 0.02 * expected.norm(dim=1).mean()).all()  # inputs are fp16


def test_the_pipeline_evicts_by_the_forecast_and_says_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_gpu, "WARM_TOKENS", 8)
    monkeypatch.setattr(reuse_gpu, "TURN_TOKENS", 4)
    monkeypatch.setattr(reuse_gpu, "SETTLE_TOKENS", 1)  # on and off change in the middle of an answer

    def answers(pipe: Pipeline) -> list[Any]:
        one = pipe.generate("The dog", raw=True, temperature=0.0, max_tokens=80, ignore_eos=True, logprobs=0)
        many = pipe.generate_batch(["A cat", "Once upon"], raw=True, temperature=0.0, max_tokens=8, ignore_eos=True)
        again = pipe.generate("The sun", raw=True, temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
        return [one.text, one.logprobs, *(each.text for each in many), again.text, again.logprobs]

    with Pipeline(None, **SETTINGS) as whole:
        expected = answers(whole)
    for share in ("25%", "50%"):
        with Pipeline(None, **SETTINGS | {"fast_memory": share}) as pipe:
            assert answers(pipe) == expected
            policy = pipe.experts.policy  # type: ignore[union-attr]
            assert isinstance(policy, ListeningReuse)
            assert policy.verdict is not None and "LFRU" in str(policy.line())
            pipe.experts.check_integrity()  # type: ignore[union-attr]


def test_asked_for_lfru_nothing_is_forecast() -> None:
    with Pipeline(None, **SETTINGS | {"fast_memory": "25%", "policy": "lfru"}) as pipe:
        assert not isinstance(pipe.experts.policy, ListeningReuse)  # type: ignore[union-attr]
