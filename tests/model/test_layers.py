"""Norm, activation and attention against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeRMSNorm

from steerpipe.model.attention import AttentionUnit, alike, attend, rows_of, store_keys
from steerpipe.model.kv_cache import BLOCK, KvPool
from steerpipe.model.layers import MlpWeights, gated_activation, gated_mlp, rms_norm
from steerpipe.model.spec import AttentionSpec, DenseMlpSpec, LayerSpec, ModelSpec, RopeKind, RopeSpec

CPU = torch.device("cpu")
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@both_dtypes
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_a_norm_has_the_bits_of_transformers(dtype: torch.dtype, eps: float) -> None:
    norm = Qwen2MoeRMSNorm(48, eps=eps).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(48))
        x = torch.randn(16, 48).to(dtype)
        assert torch.equal(rms_norm(x, norm.weight, eps), norm(x))


def test_a_norm_of_zeros_is_zeros() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@both_dtypes
def test_the_activation_is_silu_of_the_first_half_times_the_second(dtype: torch.dtype) -> None:
    gate, up = (torch.randn(16, 24).to(dtype) * 3 for _ in range(2))
    got = gated_activation(torch.cat([gate, up], dim=1))
    assert got.dtype is dtype
    torch.testing.assert_close(got, F.silu(gate) * up, rtol=2**-8 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)


def test_the_activation_survives_large_numbers() -> None:
    gate = torch.tensor([[-1e30, -200.0, 200.0, 1e30]])
    got = gated_activation(torch.cat([gate, torch.ones(1, 4)], dim=1))
    assert torch.equal(got, torch.tensor([[0.0, 0.0, 200.0, 1e30]]))


@both_dtypes
@pytest.mark.parametrize("width", [37, 1408, 5632, 14336])
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 6])
def test_the_activation_of_a_row_does_not_depend_on_its_place(dtype: torch.dtype, width: int, threads: int) -> None:
    """From 32,768 numbers on torch gives each thread a share; where it ends, F.silu computes a little otherwise."""
    torch.set_num_threads(threads)  # conftest puts it back
    row = torch.randn(1, 2 * width).to(dtype) * 3
    got = gated_activation(row.repeat(16, 1))
    assert torch.equal(got, got[:1].expand(16, -1))


def test_a_gated_mlp_is_down_of_the_activation() -> None:
    x, gate, up, down = torch.randn(16, 8), torch.randn(12, 8), torch.randn(12, 8), torch.randn(8, 12)
    got = gated_mlp(x, MlpWeights(torch.cat([gate, up]), down))
    torch.testing.assert_close(got, F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down), rtol=1e-5, atol=1e-5)


# --- attention


def naive(spec: AttentionSpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: int) -> torch.Tensor:
    """The definition, in fp64, of one query [heads, D] at position `at`."""
    first = 0 if spec.window is None else max(0, at - spec.window + 1)
    group = spec.heads // spec.kv_heads
    k = keys[first : at + 1].double().repeat_interleave(group, dim=1)  # [n, heads, D]
    v = values[first : at + 1].double().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,nhd->hn", q.double(), k) / spec.head_dim**0.5
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), v).flatten()


@given(
    group=st.integers(1, 3), kv_heads=st.integers(1, 3), head_dim=st.sampled_from([2, 8]), length=st.integers(1, 300),
    window=st.none() | st.integers(1, 310), seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=40)
def test_attention_is_its_definition_in_cells_and_row_by_row(
    group: int, kv_heads: int, head_dim: int, length: int, window: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    spec = AttentionSpec(group * kv_heads, kv_heads, head_dim, window=window)
    kv = pool_of(spec).sequence()
    kv.append(length)
    queries = torch.randn(length, spec.heads, head_dim) * 3
    keys, values = (torch.randn(length, kv_heads, head_dim) for _ in range(2))
    for start in range(0, length, 16):
        store_keys(0, AttentionUnit(kv, start, 16, start, (0, min(16, length - start))), keys, values)
    at = length - 1
    want = naive(spec, queries[at], keys, values, at)
    row = attend(0, spec, [AttentionUnit(kv, 0, 1, at, (0, 1))], queries[at:])
    cell = at - at % 16
    padded = torch.cat([queries[cell:], torch.zeros(16 - (length - cell), spec.heads, head_dim)])
    rows = attend(0, spec, [AttentionUnit(kv, 0, 16, cell, (0, length - cell))], padded)
    torch.testing.assert_close(row[0].double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows[at - cell].double(), want, rtol=1e-5, atol=1e-5)
    assert rows.isfinite().all(), "padding is finite too"


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=6),
    st.sampled_from([None, 5, 100, 200]),
    st.sampled_from([1, 16]),
)
@settings(max_examples=30)
def test_units_that_attend_together_get_the_bits_that_each_gets_alone(
    lengths: list[int], window: int | None, rows: int
) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec(6, 3, 8, window=window)
    units = []
    for number, length in enumerate(lengths):
        kv = pool_of(spec).sequence()
        kv.append(length + 16)
        keys, values = (torch.randn(16, 3, 8) for _ in range(2))
        for start in range(0, length + 1, 16):
            store_keys(0, AttentionUnit(kv, 0, 16, start, (0, 16 if start + 16 <= kv.length else 1)), keys, values)
        position = length - length % 16 if rows == 16 else length
        units.append(AttentionUnit(kv, number * rows, rows, position, (0, 1)))
    queries = torch.randn(len(units) * rows, 6, 8)
    groups = alike(units, spec)
    assert sorted(unit.row for group in groups for unit in group) == [unit.row for unit in units]
    for group in groups:
        together = attend(0, spec, group, queries[rows_of(group)])
        alone = [attend(0, spec, [unit], queries[rows_of([unit])]) for unit in group]
        assert torch.equal(together, torch.cat(alone))


def pool_of(spec: AttentionSpec) -> KvPool:
    model = ModelSpec(
        family="mixtral", vocab=8, hidden=8, layers=(LayerSpec(spec, DenseMlpSpec(8)),), norm_eps=1e-6,
        rope=RopeSpec(RopeKind.DEFAULT, 1e4, 2), tied_embeddings=False, max_context=4096, stored_dtype="float32",
    )  # fmt: skip
    return KvPool(model, torch.float32, CPU, 8)


def test_a_window_reads_no_block_before_it() -> None:
    spec = AttentionSpec(1, 1, 2, window=10)
    kv = pool_of(spec).sequence()
    kv.append(3 * BLOCK)
    kv._blocks[0].layers[0].fill_(float("nan"))  # would spread if it were read
    kv._blocks[1].layers[0].fill_(float("nan"))
    out = attend(0, spec, [AttentionUnit(kv, 0, 1, 2 * BLOCK + 9, (0, 1))], torch.randn(1, 1, 2))
    assert out.isfinite().all()
    reaches_back = attend(0, spec, [AttentionUnit(kv, 0, 1, 2 * BLOCK + 8, (0, 1))], torch.randn(1, 1, 2))
    assert reaches_back.isnan().all()


def test_scores_of_any_size_are_finite() -> None:
    spec = AttentionSpec(1, 1, 2)
    kv = pool_of(spec).sequence()
    kv.append(2)
    keys = torch.tensor([[[1e18, 0.0]], [[-1e18, 0.0]]])
    store_keys(0, AttentionUnit(kv, 0, 1, 0, (0, 1)), keys, torch.ones(2, 1, 2))
    store_keys(0, AttentionUnit(kv, 1, 1, 1, (0, 1)), keys, torch.ones(2, 1, 2))
    out = attend(0, spec, [AttentionUnit(kv, 0, 1, 1, (0, 1))], torch.tensor([[[-1e6, 0.0]]]))
    assert torch.equal(out, torch.ones(1, 2))
