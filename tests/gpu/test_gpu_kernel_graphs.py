"""A chain of dense kernels in a CUDA graph, with and without overlapped launches: the same bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.kv import cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

if torch.cuda.is_available():  # importing kernels needs triton
    from steerpipe.kernels import dense_configs
    from steerpipe.kernels.attention import decode_attention, scratch_for
    from steerpipe.kernels.combine import combine
    from steerpipe.kernels.linear import row_linear
    from steerpipe.kernels.rotary import rotate_and_store
    from steerpipe.kernels.router import route

BF16, EPS = torch.bfloat16, 1e-6


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def chain() -> tuple[Callable[[], None], Tensor]:
    """A few small layers that feed each other, and the row that comes out."""
    hidden, heads, kv_heads, head_dim, count, top_k = 512, 8, 2, 64, 32, 4
    start, x = random(1, hidden, dtype=BF16), torch.empty(1, hidden, dtype=BF16, device="cuda")
    norm = torch.ones(hidden, dtype=BF16, device="cuda")
    width = (heads + 2 * kv_heads) * head_dim
    qkv_weight, out_weight = (random(n, hidden, dtype=BF16, scale=0.04) for n in (width, hidden))
    router, positions = random(count, hidden, scale=0.04), torch.tensor([100], device="cuda")
    kv, turn = cache(1, 1, kv_heads, head_dim, BF16, "cuda"), torch.ones(1, 2, head_dim // 2, device="cuda")
    qkv, queries = (torch.empty(1, n, dtype=BF16, device="cuda") for n in (width, hidden))
    mixed, normed, scores = torch.empty_like(queries), torch.empty_like(x), torch.empty(1, count, device="cuda")
    experts, gates = torch.empty(1, top_k, dtype=torch.int32, device="cuda"), torch.empty(1, top_k, device="cuda")
    parts, scratch = random(count, top_k, hidden, scale=0.3), scratch_for(1, heads, head_dim, 2, x.device)
    shape = {"kv_heads": kv_heads, "layer_bytes": kv.layer_bytes}

    def run() -> None:
        torch.mul(start, 1, out=x)  # a kernel: every launch below follows one
        for layer in range(20):
            row_linear(x, qkv_weight, out=qkv, norm=norm, eps=EPS)
            q = queries.view(1, heads, head_dim)
            rotate_and_store(qkv, turn, positions, kv.blocks, heads=heads, queries=q, **shape)
            decode_attention(q, positions, kv.blocks, splits=2, scratch=scratch, out=mixed, **shape)
            row_linear(mixed, out_weight, out=x, residual=x)
            row_linear(x, router, out=scores, norm=norm, eps=EPS, normed=normed)
            route(scores, top_k=top_k, renormalise=True, experts=experts, gates=gates, positions=positions)
            combine(parts[layer], experts, gates, x, out=x, shared=normed)

    return run, x


def test_a_graph_and_overlapped_launches_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    run, x = chain()
    monkeypatch.setattr(dense_configs, "OVERLAP", False)
    run()
    expected = x.clone()
    assert bool(expected.isfinite().all())
    for overlap in (False, True):
        monkeypatch.setattr(dense_configs, "OVERLAP", overlap)
        run()
        assert torch.equal(x, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(50):
            x.fill_(torch.nan)
            graph.replay()
            assert torch.equal(x, expected), f"overlap {overlap}"
