"""The four families on CUDA: against transformers, against the CPU, and across chunkings.

GpuDecoder over a CudaSource with every expert resident; decode is captured graphs. cuBLAS picks its kernel by shape and
may look at a row's place, so across chunkings the claim on a GPU is a tolerance, not bits (DESIGN, the row rule); how
many rows are bit-identical is printed.
"""

import pytest
import torch

from steerpipe import Pipeline
from tests.support import reference, tiny
from tests.support.running import Loaded, Recorder, loaded
from tests.support.tiny import FAMILIES, Tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LENGTH = 150
FP32 = 1e-4
BF16 = 0.2  # of the rms of all logits, for rows routed alike so far: tests/golden/test_bf16.py says why
SPLITS = (5, 6, 22, 80, 127, 129)

every_family = pytest.mark.parametrize("family", FAMILIES)


def model_of(family: str) -> Tiny:
    """Heads of one width in all families: they share most kernels, and compiling takes longer than running."""
    return tiny.tiny(family, **({"head_dim": 12} if family == "qwen3_moe" else {}))


def on(device: str, family: str, dtype: torch.dtype) -> Loaded:
    if device == "cpu":
        return loaded(model_of(family).folder, dtype)
    from tests.support.gpu import loaded_gpu, pack_of  # needs Triton

    return loaded_gpu(pack_of(model_of(family).folder), dtype, torch.device(device))


def tokens_of(family: str) -> list[int]:
    return model_of(family).tokens(LENGTH)


def run(model: Loaded, way: str, tokens: list[int]) -> tuple[torch.Tensor, Recorder]:
    sink = Recorder()
    if way == "in chunks":
        logits = model.prefill(tokens, SPLITS, sink=sink)
    elif way == "token by token":
        logits = model.one_row(tokens, sink=sink)
    elif way == "token by token in the batched class":
        logits = model.batched(tokens, sink=sink)
    else:
        logits = model.prefill(tokens, sink=sink)
    return logits.cpu(), sink


def alike_so_far(left: Recorder, right: Recorder) -> torch.Tensor:
    """[rows] bool: up to here every layer of both chose the same experts."""
    layers = {record.layer for record in left.records}
    same = [
        torch.from_numpy(left.experts(layer)).sort().values == torch.from_numpy(right.experts(layer)).sort().values
        for layer in layers
    ]
    return torch.stack([rows.all(-1) for rows in same]).all(0).cumprod(0).bool()


@pytest.mark.parametrize("way", ["whole", "in chunks", "token by token", "token by token in the batched class"])
@every_family
def test_fp32_on_cuda_is_within_1e_4_of_transformers(family: str, way: str) -> None:
    want = reference.compute(model_of(family).reference, tokens_of(family))
    logits, sink = run(on("cuda", family, torch.float32), way, tokens_of(family))
    difference = float((logits - want.logits).abs().max())
    print(f"{family}, {way}: {difference:.1e}")
    assert difference < FP32
    for layer, experts in want.experts.items():
        clear = want.clear_rows(layer, 1e-5)
        assert torch.equal(torch.from_numpy(sink.experts(layer))[clear], experts[clear])


@every_family
def test_bf16_on_cuda_is_within_tolerance_of_bf16_on_the_cpu(family: str) -> None:
    here, there = (run(on(device, family, torch.bfloat16), "whole", tokens_of(family)) for device in ("cpu", "cuda"))
    alike = alike_so_far(here[1], there[1])
    difference = (here[0] - there[0]).abs().amax(-1)[alike] / here[0].pow(2).mean().sqrt()
    print(f"{family}: {int(alike.sum())} rows, median {difference.median():.3f}, largest {difference.max():.3f}")
    assert alike.sum() > 3
    assert difference.max() < BF16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_family
def test_chunkings_on_cuda_agree_within_tolerance(family: str, dtype: torch.dtype) -> None:
    model = on("cuda", family, dtype)
    whole, chunks = (run(model, way, tokens_of(family)) for way in ("whole", "in chunks"))
    equal = (whole[0] == chunks[0]).all(-1).float().mean()
    alike = alike_so_far(whole[1], chunks[1])
    difference = float((whole[0] - chunks[0]).abs().amax(-1)[alike].max())
    print(f"{family}, {dtype}: {equal:.0%} of the rows bit-identical, largest difference {difference:.1e}")
    assert difference < (FP32 if dtype is torch.float32 else BF16 * float(whole[0].pow(2).mean().sqrt()))


@every_family
def test_64_greedy_tokens_on_cuda_are_those_of_transformers(family: str) -> None:
    prompt = model_of(family).tokens(21, seed=1)
    with Pipeline(model_of(family).folder, dtype="float32", device="cuda", prefill_chunk=16) as pipe:
        answer = pipe.generate(prompt, temperature=0.0, max_tokens=64, ignore_eos=True)
    assert list(answer.token_ids) == reference.greedy(model_of(family).reference, prompt, 64)
