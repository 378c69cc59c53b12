"""The dense kernels on a CUDA device, at the shapes they are made for and at odd ones, against torch in fp64.

Inputs are fresh, outputs poisoned, stale KV is NaN and infinity; errors are |found - expected| / |expected|.
"""

import pytest
import torch
from torch import Tensor

from tests.kernels.kv import Cache, cache, forget

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

if torch.cuda.is_available():  # importing kernels needs triton
    from steerpipe.kernels import reference
    from steerpipe.kernels.attention import decode_attention, scratch_for, splits_for
    from steerpipe.kernels.attention_prefill import prefill_attention
    from steerpipe.kernels.combine import combine
    from steerpipe.kernels.history import TransformerKernels
    from steerpipe.kernels.linear import gated, row_gated_linear, row_linear
    from steerpipe.kernels.norm import rms_norm
    from steerpipe.kernels.rotary import rotate_and_store
    from steerpipe.kernels.router import route
    from steerpipe.model.gpu.apart import shown
    from steerpipe.predict.trajectory_networks import ExpertTransformer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 6e-3, FP16: 8e-4, FP32: 1e-5}
EPS = 1e-6
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)


def random(*shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def assert_near(found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error.item() < (tolerance or TOLERANCE[found.dtype]), f"relative error {error.item():.2e}"  # NaN fails


@every_dtype
@pytest.mark.parametrize("hidden", [2048, 4096, 192, 1000])
def test_norm(hidden: int, dtype: torch.dtype) -> None:
    x, weight, out = random(9, hidden, dtype=dtype), random(hidden, dtype=dtype), poisoned(9, hidden, dtype=dtype)
    rms_norm(x, weight, EPS, out=out)
    assert_near(out, reference.rms_norm(x, weight, EPS))


@every_dtype
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(5120, 2048), (2048, 4096), (15_199, 2048), (2048, 5632), (577, 192), (1, 2048), (31, 80), (100, 8192)],
)
def test_row_linear_with_and_without_what_comes_before_and_after(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = random(1, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    out = poisoned(1, outputs, dtype=dtype)
    row_linear(x, weight, out=out)
    assert_near(out, reference.row_linear(x, weight, dtype))
    norm, bias, residual = random(inputs, dtype=dtype), random(outputs, dtype=dtype), random(1, outputs, dtype=dtype)
    normed, stream = poisoned(1, inputs, dtype=dtype), residual.clone()
    row_linear(x, weight, out=stream, bias=bias, norm=norm, eps=EPS, normed=normed, residual=stream)
    assert_near(normed, reference.rms_norm(x, norm, EPS))
    assert_near(stream, reference.row_linear(normed, weight, dtype, bias=bias, residual=residual))


def test_a_router_in_fp32_and_logits_in_fp32() -> None:
    x, norm = random(1, 2048, dtype=BF16), random(2048, dtype=BF16)
    router, head = random(128, 2048), random(4099, 2048, dtype=BF16)
    scores, logits, normed = poisoned(1, 128), poisoned(1, 4099), poisoned(1, 2048, dtype=BF16)
    row_linear(x, router, out=scores, norm=norm, eps=EPS, normed=normed)
    assert_near(scores, reference.row_linear(normed, router, FP32))
    row_linear(normed, head, out=logits)
    assert_near(logits, reference.row_linear(normed, head, FP32))


@every_dtype
@pytest.mark.parametrize(("width", "inputs"), [(5632, 2048), (77, 192), (1408, 80)])
def test_gated_products(width: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = random(1, inputs, dtype=dtype), random(2 * width, inputs, dtype=dtype, scale=inputs**-0.5)
    norm, out = random(inputs, dtype=dtype), poisoned(1, width, dtype=dtype)
    row_gated_linear(x, weight, out=out, norm=norm, eps=EPS)
    assert_near(out, reference.row_gated_linear(reference.rms_norm(x, norm, EPS), weight))
    many, several = random(5, 2 * width, dtype=dtype), poisoned(5, width, dtype=dtype)
    gated(many, out=several)
    assert_near(several, reference.gated(many))


@pytest.mark.parametrize("kind", ["none", "head", "all heads"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"), [(32, 4, 128, BF16), (16, 16, 128, BF16), (6, 2, 80, FP32)]
)
def test_rotate_and_store(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kind: str) -> None:
    positions = torch.tensor([0, 129, -1, 300], device="cuda")
    kv = cache(4, 3, kv_heads, head_dim, dtype, "cuda", fill=7.0)
    qkv, angle = random(4, (heads + 2 * kv_heads) * head_dim, dtype=dtype), random(4, head_dim // 2)
    turn, queries = torch.stack([angle.cos(), angle.sin()], 1), poisoned(4, heads, head_dim, dtype=dtype)
    many = {"none": (0, 0), "head": (1, 1), "all heads": (heads, kv_heads)}[kind]
    query_norm, key_norm = (random(n * head_dim, dtype=dtype) if n else None for n in many)
    options = {"query_norm": query_norm, "key_norm": key_norm, "eps": EPS, "clip": 1.5}
    rotate_and_store(
        qkv, turn, positions, kv.blocks, heads=heads, kv_heads=kv_heads, layer_bytes=kv.layer_bytes, queries=queries,
        **options,
    )  # fmt: skip
    q, k, v = reference.rotated_heads(qkv, turn, heads=heads, kv_heads=kv_heads, **options)
    q[2] = 0
    assert_near(queries, q)
    keys, values = kv.dense()
    for row, position in ((0, 0), (1, 129), (3, 300)):
        assert_near(keys[row, :, position], k[row])
        assert_near(values[row, :, position], v[row])
        kv.memory[kv.order[row, position // 128], 1, :, :, position % 128] = 7.0
    assert bool((kv.memory == 7.0).all()), "something was written elsewhere"


SHAPES = [(32, 4, 128, BF16, None), (16, 16, 128, BF16, None), (32, 8, 128, BF16, 1000), (6, 2, 80, FP16, None),
          (6, 2, 64, FP32, None), (16, 2, 256, BF16, 64), (3, 1, 16, BF16, None)]  # fmt: skip
every_shape = pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype", "window"), SHAPES)


def decoded(queries: Tensor, positions: Tensor, kv: Cache, window: int | None, splits: int) -> Tensor:
    rows, heads, head_dim = queries.shape
    out = poisoned(rows, heads * head_dim, dtype=queries.dtype)
    scratch = scratch_for(rows, heads, head_dim, 128, queries.device)
    for part in (scratch.top, scratch.mass, scratch.total):
        part.fill_(torch.nan)
    decode_attention(
        queries, positions, kv.blocks, kv_heads=kv.memory.shape[3], layer_bytes=kv.layer_bytes, window=window,
        splits=splits, scratch=scratch, out=out,
    )  # fmt: skip
    return out


@every_shape
def test_decode_attention_alone_and_among_neighbours(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> None:
    positions = torch.tensor([0, 63, 64, 129, -1, 2047, 8191, 8192, 12_345], device="cuda")
    kv = cache(len(positions), 97, kv_heads, head_dim, dtype, "cuda")
    forget(kv, positions)
    queries = random(len(positions), heads, head_dim, dtype=dtype)
    found = decoded(queries, positions, kv, window, splits_for(12_346))
    assert_near(found, reference.attention(queries, positions, *kv.dense(), window))
    assert torch.count_nonzero(found[4]) == 0
    for row in (1, 6, 8):
        own = Cache(kv.memory, kv.order[row : row + 1], kv.blocks[row : row + 1])
        splits = splits_for(int(positions[row]) + 1)
        alone = decoded(queries[row : row + 1].contiguous(), positions[row : row + 1], own, window, splits)
        assert torch.equal(alone[0], found[row]), f"neighbours changed bits at position {int(positions[row])}"


@every_shape
def test_prefill_attention_whole_and_in_chunks(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> None:
    base, rows = 2000, 48
    positions = torch.arange(base, base + rows, device="cuda")
    positions[:5] = -1
    positions[-9:] = -1
    kv = cache(1, 17, kv_heads, head_dim, dtype, "cuda")
    forget(kv, torch.tensor([base + rows - 10]))
    queries = random(rows, heads, head_dim, dtype=dtype)

    def run(start: int, stop: int) -> Tensor:
        out = poisoned(stop - start, heads * head_dim, dtype=dtype)
        prefill_attention(
            queries[start:stop], positions[start:stop], kv.blocks, base=base + start, kv_heads=kv_heads,
            layer_bytes=kv.layer_bytes, window=window, out=out,
        )  # fmt: skip
        return out

    whole = run(0, rows)
    assert_near(whole, reference.attention(queries, positions, *kv.dense(), window))
    assert torch.equal(whole[16:32], run(16, 32))


@pytest.mark.parametrize(("count", "top_k", "renormalise"), [(128, 8, True), (60, 4, False), (8, 2, True)])
def test_route_and_its_mailbox(count: int, top_k: int, *, renormalise: bool) -> None:
    rows = 13
    logits, positions = random(rows, count), torch.arange(rows, device="cuda")
    logits[3] = 0.0  # all tied
    positions[5] = -1
    forced = torch.full((rows, top_k), -1, dtype=torch.int32, device="cuda")
    forced[7] = torch.randperm(count, device="cuda")[:top_k].int()
    experts, gates = torch.full_like(forced, -9), poisoned(rows, top_k)
    mailbox = torch.full((rows * top_k,), -1).pin_memory()
    stamp = torch.tensor([987_654_321], device="cuda")
    route(
        logits, top_k=top_k, renormalise=renormalise, experts=experts, gates=gates, positions=positions,
        mailbox=mailbox, stamp=stamp, forced=forced,
    )  # fmt: skip
    torch.cuda.synchronize()
    expected = reference.route(logits, positions, top_k=top_k, renormalise=renormalise, forced=forced)
    assert torch.equal(experts, expected[0])
    assert_near(gates, expected[1])
    assert torch.equal(mailbox, reference.mailbox_words(experts.cpu(), 987_654_321))


@every_dtype
@pytest.mark.parametrize(("rows", "top_k", "hidden"), [(1, 8, 2048), (16, 4, 2048), (37, 2, 200)])
def test_combine(rows: int, top_k: int, hidden: int, dtype: torch.dtype) -> None:
    experts = torch.stack([torch.randperm(60)[:top_k] for _ in range(rows)]).int().cuda()
    part, gates = random(rows * top_k, hidden), torch.rand(rows, top_k, device="cuda")
    x = random(rows, hidden).to(dtype)
    shared, switch, out = random(rows, hidden).to(dtype), random(rows, 1).to(dtype), torch.full_like(x, torch.nan)
    experts[0, 1] = -1
    part[1] = torch.nan
    combine(part, experts, gates, x, out=out, shared=shared, shared_switch=switch)
    assert_near(out, reference.combine(part, experts, gates, x, shared=shared, shared_switch=switch))


@every_dtype
@pytest.mark.parametrize(("steps", "experts", "top_k"), [(10, 60, 4), (16, 128, 8), (20, 33, 2)])
def test_the_expert_transformer(steps: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    network = ExpertTransformer(experts).to("cuda", dtype).eval().requires_grad_(False)
    kernels = TransformerKernels(network.state_dict(), steps, top_k)
    routed = torch.stack([torch.randperm(experts, device="cuda")[:top_k] for _ in range(24)])
    whole = network.double()
    for order in (0, 5, 23):
        expected = whole(shown(routed, order, steps, experts, torch.float64))
        assert_near(kernels.answer(routed, order), expected, {BF16: 1e-2, FP16: 2e-3, FP32: 2e-3}[dtype])  # TF32
