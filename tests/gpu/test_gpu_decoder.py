"""GpuDecoder on CUDA: against the decoder on the CPU, graphs against leases, and what a captured graph must not do."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.model.decoder import Decoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.step import decode_rows
from steerpipe.model.weights import build_weights
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.resident import ResidentExperts
from tests.support.running import CPU, Loaded, Recorder
from tests.support.tiny import VOCAB, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

if torch.cuda.is_available():  # importing kernels needs triton
    from tests.support.gpu import MAX_BATCH, load_gpu, open_blocks, pack_of

CUDA = torch.device("cuda")
RELATIVE = 1e-4  # of the rms of all logits, in fp32

CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "window": ("mixtral", {"sliding_window": 24}, None),
    "clip": ("olmoe", {"clip_qkv": 0.4}, None),
    "dense layer, biased, tied": (
        "qwen2_moe", {"mlp_only_layers": [1], "tie_word_embeddings": True, "qkv_bias": True}, None
    ),
    "all dense": ("qwen3_moe", {"num_experts": 0, "head_dim": 12}, None),
    "int8": ("qwen3_moe", {"head_dim": 12}, "int8"),
    "int4": ("qwen3_moe", {"head_dim": 12}, "int4"),
    "long": ("mixtral", {"max_position_embeddings": 2048}, None),
}  # fmt: skip


@functools.cache
def both(case: str) -> tuple[Loaded, Loaded]:
    """One pack on the CPU and on the GPU, fp32."""
    family, changes, form = CASES[case]
    pack = pack_of(tiny(family, **changes).folder, None if form is None else ExpertFormat(form))
    gpu = load_gpu(pack, torch.float32, CUDA)
    weights = build_weights(pack.spec, pack.family.names, pack.read_dense(), torch.float32, CPU)
    experts = ResidentExperts.load(pack, torch.float32, CPU)
    return Loaded(pack.spec, Decoder(pack.spec, weights, CPU), experts, KvPool(pack.spec, torch.float32, CPU, 64)), gpu


def tokens(count: int) -> list[int]:
    """Fresh ones at every run."""
    return torch.randint(0, VOCAB, (count,)).tolist()


def drive(model: Loaded, fed: list[int], batched: int = 4) -> tuple[Tensor, Recorder]:
    """A prompt in two chunks, 12 tokens of one row, then a batch of two; at least 34 tokens."""
    sink, kv = Recorder(), model.pool.sequence()
    prompt = len(fed) - 12
    logits = [model.prefill(fed[:prompt], (21,), kv, sink=sink)]
    other = kv.fork(9)
    logits.append(model.one_row(fed[prompt:], kv, sink=sink))
    logits += [model.batch([kv, other], fed[step : step + 2], sink=sink) for step in range(batched)]
    kv.free()
    other.free()
    return torch.cat(logits).cpu(), sink


def relative(found: Tensor, want: Tensor) -> float:
    return float((found.cpu() - want.cpu()).abs().max() / want.cpu().pow(2).mean().sqrt())


@pytest.mark.parametrize("case", [case for case in CASES if case != "long"])
def test_fp32_is_within_1e_4_of_the_cpu(case: str) -> None:
    cpu, gpu = both(case)
    fed = tokens(70)
    (want, routing), (found, chosen) = drive(cpu, fed), drive(gpu, fed)
    difference = relative(found, want)
    print(f"{case}: {difference:.1e}")
    assert difference < RELATIVE
    for mine, its in zip(chosen.records, routing.records, strict=True):
        assert (mine.layer, mine.sequences, mine.positions.tolist()) == (
            its.layer,
            its.sequences,
            its.positions.tolist(),
        )
        assert (mine.experts == its.experts).mean() > 0.98, "but for near ties"


def test_a_context_that_outgrows_its_graph_goes_on_in_the_next() -> None:
    cpu, gpu = both("long")
    fed = tokens(1032)
    found = []
    for graphs in (True, False):
        gpu.decoder.graphs = graphs  # type: ignore[attr-defined]
        kv = gpu.pool.sequence()
        gpu.prefill(fed[:1016], (512,), kv)
        found.append(gpu.one_row(fed[1016:], kv))
        kv.free()
    gpu.decoder.graphs = True  # type: ignore[attr-defined]
    assert torch.equal(*found)
    assert relative(found[0], cpu.prefill(fed)[1016:]) < RELATIVE


def test_logits_stay_what_they_were_when_the_graph_runs_again() -> None:
    _, gpu = both("int4")
    kv = gpu.pool.sequence()
    first = gpu.one_row([3], kv)
    before = first.clone()
    gpu.one_row([4, 5], kv)
    assert torch.equal(first, before)
    kv.free()


def test_a_batch_of_more_than_a_cell_is_that_of_its_cells() -> None:
    _, gpu = both("int4")
    fed, count = tokens(MAX_BATCH), 19
    kvs = [gpu.pool.sequence() for _ in range(count)]
    together = gpu.batch(kvs, fed[:count])
    for row in (0, 15, 16, 18):
        alone = gpu.pool.sequence()
        assert torch.equal(gpu.batch([alone], [fed[row]])[0], together[row]), f"row {row}"
        alone.free()
    for kv in kvs:
        kv.free()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_forced_routing_is_what_a_graph_computes(share: float) -> None:
    _, gpu = both("int4")
    forced = torch.stack([torch.randperm(6)[:2] for _ in range(3)]).to(torch.int32).view(3, 1, 2)
    found = []
    with open_blocks(gpu.experts.pack, share, CUDA) as source:
        for graphs in (True, False):
            gpu.decoder.graphs, gpu.decoder.forced = graphs, forced.to(CUDA)  # type: ignore[attr-defined]
            sink = Recorder()
            found.append(replace(gpu, experts=source).one_row([7, 8], sink=sink))
            for layer in range(3):
                assert sink.experts(layer).tolist() == [forced[layer, 0].tolist()] * 2
        gpu.decoder.graphs, gpu.decoder.forced = True, None  # type: ignore[attr-defined]
        source.check_integrity()
    assert torch.equal(*found)


def test_rows_may_come_from_the_gpu_as_well() -> None:
    _, gpu = both("int4")
    kv = gpu.pool.sequence()
    rows = decode_rows([SequenceId(0)], [kv], [3], CUDA, cell=1)
    found = gpu.decoder.forward(rows, gpu.experts, [0])
    assert torch.equal(found, gpu.one_row([3]))
    kv.free()


def test_a_small_run_for_the_sanitizer() -> None:
    """compute-sanitizer ... pytest -k sanitizer: every kernel once, nothing that waits for a copy."""
    cpu, gpu = both("int4")
    fed = tokens(36)
    want, _ = drive(cpu, fed, batched=1)
    for graphs in (True, False):
        gpu.decoder.graphs = graphs  # type: ignore[attr-defined]
        assert relative(drive(gpu, fed, batched=1)[0], want) < RELATIVE
    gpu.decoder.graphs = True  # type: ignore[attr-defined]
