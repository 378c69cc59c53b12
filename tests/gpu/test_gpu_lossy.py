"""Lossy answers to a miss on a GPU: exact prompts, counted substitutions, and no wait for copies in decode."""

from pathlib import Path
from typing import Any

import pytest
import torch

from steerpipe import Pipeline
from steerpipe.bench.timeline import COMPUTE, record_step
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import ConfigError
from steerpipe.core.events import Completion
from steerpipe.core.ids import SequenceId
from steerpipe.core.quality import MissPolicy, QualityPlan
from steerpipe.core.timeline import Timeline
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.model.gpu.clock import Clock
from steerpipe.model.gpu.decoder import GpuDecoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.step import decode_rows, prefill_rows
from steerpipe.model.weights import build_weights
from steerpipe.runtime.models import EMBEDDED
from steerpipe.runtime.quality import Chosen, choose, identity_of, open_quality
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.pack import PackOptions, write_pack
from steerpipe.store.reader import open_pack
from steerpipe.tiny import write_tiny
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.cuda.timed import COPIES, WAITS, TimedCopier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA, CPU, ID = torch.device("cuda"), torch.device("cpu"), SequenceId(0)
LOSSY = ("drop", "surrogate", "patch", "commit", "commit-true", "high", "balanced", "fast")
SETTINGS: dict[str, Any] = {"device": "cuda", "profile": False, "kv_memory": "64MiB"}


def answer(pipe: Pipeline, tokens: int = 16) -> Completion:
    return pipe.generate("The dog", raw=True, temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def exact() -> Completion:
    with Pipeline(None, **SETTINGS) as whole:
        return answer(whole)


@pytest.mark.parametrize("quality", LOSSY)
def test_prompts_are_exact_and_every_answer_says_what_was_substituted(quality: str, exact: Completion) -> None:
    with Pipeline(None, **SETTINGS | {"fast_memory": "12.5%", "quality": quality}) as pipe:
        told = [answer(pipe), answer(pipe)]
        both = pipe.generate_batch(["The dog", "A cat sat"], raw=True, max_tokens=6, ignore_eos=True, temperature=0.0)
        pipe.experts.check_integrity()  # type: ignore[union-attr]
    assert told[0].logprobs[0] == exact.logprobs[0]
    for each in told:
        assert each.substituted is not None and each.substituted.uses == 15 * 24 * 4
        assert 0 < each.substituted.share < 1
    assert [each.substituted and each.substituted.uses for each in both] == [5 * 96, 5 * 96]


@pytest.mark.parametrize("form", ["int8", "bfloat16"])
def test_the_cpu_computes_what_is_pinned_and_the_answer_hardly_changes(form: str, tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path / "model")
    write_pack(open_checkpoint(tmp_path / "model"), tmp_path / form, PackOptions(ExpertFormat(form)))
    with Pipeline(tmp_path / form, **SETTINGS) as whole:
        expected = answer(whole)
    with Pipeline(tmp_path / form, **SETTINGS | {"fast_memory": "25%", "quality": "cpu"}) as pipe:
        found = answer(pipe)
        pipe.experts.check_integrity()  # type: ignore[union-attr]
    assert found.substituted is not None and found.substituted.computed and not found.substituted.substituted
    for own, other in zip(found.logprobs[:3], expected.logprobs[:3], strict=True):
        assert own.logprob == pytest.approx(other.logprob, abs=0.1)
    with pytest.raises(ConfigError, match="no expert lies in pinned memory") as raised:
        Pipeline(tmp_path / form, **SETTINGS | {"fast_memory": "25%", "quality": "cpu", "pin": "0"})
    assert "--pin" in raised.value.fix


def recorded(asked: str) -> tuple[Timeline, Any]:
    """Eight decode steps of nano behind a prompt, an eighth of the experts in slots, one timeline."""
    pack = open_pack(EMBEDDED)
    spec = pack.spec
    copier = TimedCopier(CUDA, lambda source, size_bytes: f"{size_bytes} bytes")
    weights = build_weights(spec, pack.family.names, pack.dense(torch.bfloat16), torch.bfloat16, CUDA)
    pool = KvPool(spec, torch.bfloat16, CUDA, 64)
    count = len(spec.moe_layers) * spec.moe(0).experts
    with CudaSource.open(
        pack, slots=count // 8, device=CUDA, pinned_bytes=count * pack.layout(0).block_bytes, copier=copier,
        direct=False,
    ) as source:  # fmt: skip
        config = EngineConfig(quality=asked)
        chosen = choose(config, spec, EMBEDDED, identity_of(pack), form="int4")
        chosen = chosen or Chosen("wait", QualityPlan.uniform(MissPolicy.WAIT, len(spec.moe_layers), spec.moe(0).top_k))
        quality = open_quality(chosen, config, spec, weights, EMBEDDED, source)
        assert quality is not None
        decoder = GpuDecoder(spec, weights, pool, CUDA, max_batch=1, misses=quality.desk)
        decoder.clock = clock = Clock(CUDA)
        kv = pool.sequence()
        decoder.forward(prefill_rows(ID, kv, list(range(40, 60)), CPU), source, [0])

        def step(token: int) -> None:
            decoder.forward(decode_rows([ID], [kv], [token], CPU, cell=1), source, [0])

        step(1)  # compiles
        timeline = record_step(lambda: [step(token) for token in range(100, 108)], clock, copier)
        source.check_integrity()
        return timeline, quality.desk.accounts.total


@pytest.mark.parametrize("quality", ["fast", "patch", "surrogate", "drop"])
def test_decode_waits_for_no_copy_on_the_computing_stream(quality: str) -> None:
    timeline, counts = recorded(quality)
    assert not timeline.spans(WAITS)
    assert timeline.spans(COPIES) and timeline.spans(COMPUTE)  # what was missed is on its way meanwhile
    assert counts.substituted


def test_the_exact_policy_does_wait_there() -> None:
    timeline, counts = recorded("exact")
    assert len(timeline.spans(WAITS)) > 10 and timeline.spans(COPIES) and not counts.substituted
