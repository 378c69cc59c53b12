"""The same choice on a GPU as on the host, from the same logits."""

import contextlib
from typing import Any

import pytest
import torch

from steerpipe.core.random import philox4x32, random_word
from steerpipe.core.sampling import SamplingSettings
from steerpipe.model.sampling import SamplingContext, candidates, sample, sample_row

pytestmark = pytest.mark.gpu

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"min_p": 0.05, "repetition_penalty": 1.2},
    {"top_p": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.1},
]


def _contexts() -> list[SamplingContext]:
    return [SamplingContext(SamplingSettings(**KINDS[i % 4]), i, 100 + i, (1, 2), (3, 3)) for i in range(16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_draws_the_tokens_that_the_host_draws(dtype: torch.dtype) -> None:
    logits = (torch.randn(16, 151_937, generator=torch.Generator().manual_seed(0)) * 2.5).to(dtype)
    logits[:, :50] += torch.linspace(12, 2, 50).to(dtype)
    there = sample(logits.cuda(), _contexts())
    assert there == sample(logits, _contexts())
    alone = [sample_row(row.cuda(), context) for row, context in zip(logits, _contexts(), strict=True)]
    assert there == alone


def test_integer_weights_of_host_and_gpu_differ_by_one_step_at_most() -> None:
    logits = torch.randn(151_936, generator=torch.Generator().manual_seed(1)) * 3
    context = SamplingContext(SamplingSettings(temperature=0.7), 0, 0)
    here, there = candidates(logits, context), candidates(logits.cuda(), context)
    differences = (here.weights - there.weights.cpu()).abs()
    assert int(differences.max()) <= 1
    assert int((differences > 0).sum()) < 200  # of 151,936


def test_triton_gives_the_words_of_the_host() -> None:
    triton = pytest.importorskip("triton")
    kernel = triton.jit(_philox_kernel)
    for seed, position in [(0, 0), (2**63 + 12345, 7), (42, 2**40 + 3)]:
        words = torch.zeros(4, dtype=torch.int32, device="cuda")
        place = torch.tensor([position & 0xFFFFFFFF, position >> 32], device="cuda")
        signed = seed - 2**64 if seed >= 2**63 else seed
        kernel[(1,)](torch.tensor([signed], device="cuda"), place, words)
        expected = philox4x32((position & 0xFFFFFFFF, position >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
        assert tuple(word & 0xFFFFFFFF for word in words.tolist()) == expected
        assert expected[1] << 32 | expected[0] == random_word(seed, position)


with contextlib.suppress(ModuleNotFoundError):  # a machine without CUDA collects this file too
    import triton.language as tl


def _philox_kernel(seed_at, place_at, words_at):  # type: ignore[no-untyped-def]  # triton reads the source, not the types
    low = tl.load(place_at).to(tl.uint32)
    high = tl.load(place_at + 1).to(tl.uint32)
    zero = low * 0
    w0, w1, w2, w3 = tl.philox(tl.load(seed_at), low, high, zero, zero)
    tl.store(words_at, w0.to(tl.int32, bitcast=True))
    tl.store(words_at + 1, w1.to(tl.int32, bitcast=True))
    tl.store(words_at + 2, w2.to(tl.int32, bitcast=True))
    tl.store(words_at + 3, w3.to(tl.int32, bitcast=True))
