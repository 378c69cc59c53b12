"""Attention over addressed KV blocks against a plain softmax; stale memory is NaN and infinity everywhere."""

import pytest
import torch
from torch import Tensor

from steerpipe.kernels import attention, reference
from steerpipe.kernels.attention import AttentionScratch, decode_attention, scratch_for, splits_for
from steerpipe.kernels.attention_prefill import prefill_attention
from tests.kernels.kv import Cache, cache, forget

# fp16 takes the tensor cores' way and fp32 the other; tl.dot of bf16 is wrong in the interpreter
GROUPS = [(torch.float16, 3, 1), (torch.float16, 8, 1), (torch.float16, 2, 2), (torch.float32, 6, 2)]


def poisoned_scratch(rows: int, heads: int, head_dim: int, splits: int, device: str = "cpu") -> AttentionScratch:
    scratch = scratch_for(rows, heads, head_dim, splits, torch.device(device))
    for part in (scratch.top, scratch.mass, scratch.total):
        part.fill_(torch.nan)
    return scratch


def decoded(queries: Tensor, positions: Tensor, kv: Cache, window: int | None = None, extra_splits: int = 0) -> Tensor:
    rows, heads, head_dim = queries.shape
    out = torch.full((rows, heads * head_dim), torch.nan, dtype=queries.dtype)
    splits = splits_for(int(positions.max()) + 1) + extra_splits
    decode_attention(
        queries, positions, kv.blocks, kv_heads=kv.memory.shape[3], layer_bytes=kv.layer_bytes, window=window,
        splits=splits, scratch=poisoned_scratch(rows + 1, heads, head_dim, splits + 1), out=out,
    )  # fmt: skip
    return out


def prefilled(queries: Tensor, positions: Tensor, kv: Cache, base: int, window: int | None = None) -> Tensor:
    out = torch.full((len(queries), queries[0].numel()), torch.nan, dtype=queries.dtype)
    prefill_attention(
        queries, positions, kv.blocks, base=base, kv_heads=kv.memory.shape[3], layer_bytes=kv.layer_bytes,
        window=window, out=out,
    )  # fmt: skip
    return out


def assert_near(found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 3e-3  # fp16: probabilities are rounded before the values
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_a_decode_row_sees_its_keys_and_nothing_beyond(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    positions = torch.tensor([0, 63, 200])
    kv = cache(3, 2, kv_heads, head_dim, dtype)
    forget(kv, positions)
    queries = torch.randn(3, heads, head_dim).to(dtype)
    keys, values = kv.dense()
    assert_near(decoded(queries, positions, kv), reference.attention(queries, positions, keys, values))


@pytest.mark.parametrize("window", [1, 5, 64, 100, 500])
@pytest.mark.parametrize(("dtype", "heads"), [(torch.float16, 4), (torch.float32, 2)])
def test_a_window_hides_what_is_older(window: int, dtype: torch.dtype, heads: int) -> None:
    positions = torch.tensor([3, 190])
    kv = cache(2, 2, 2, 16, dtype)
    forget(kv, positions)
    queries = torch.randn(2, heads, 16).to(dtype)
    keys, values = kv.dense()
    found = decoded(queries, positions, kv, window)
    assert_near(found, reference.attention(queries, positions, keys, values, window))


def test_a_row_without_a_position_is_zeros_and_reads_nothing() -> None:
    positions = torch.tensor([-1, 70])
    kv = cache(2, 1, 1, 16, torch.float16)
    forget(kv, positions)
    kv.blocks[0] = 0  # an address that must not be followed
    queries = torch.randn(2, 4, 16, dtype=torch.float16)
    out = decoded(queries, positions, kv)
    assert torch.count_nonzero(out[0]) == 0
    assert not out[1].isnan().any()


def test_neighbours_and_a_larger_grid_change_no_bit_of_a_row() -> None:
    positions = torch.tensor([150, 7, 255])
    kv = cache(3, 2, 2, 16, torch.float16)
    queries = torch.randn(3, 6, 16, dtype=torch.float16)
    together = decoded(queries, positions, kv, extra_splits=9)
    for row in range(3):
        own = Cache(kv.memory, kv.order[row : row + 1], kv.blocks[row : row + 1])
        alone = decoded(queries[row : row + 1].contiguous(), positions[row : row + 1], own)
        assert torch.equal(alone[0], together[row])


def test_far_on_a_split_takes_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MOST_SPLITS", 4)  # as 128 does from position 8,192 on
    positions = torch.tensor([600, 300])  # 10 tiles in splits of 3, 5 tiles in splits of 2
    for dtype, window in ((torch.float16, None), (torch.float32, None), (torch.float16, 180)):
        kv = cache(2, 5, 1, 16, dtype)
        forget(kv, positions)
        queries = torch.randn(2, 2, 16).to(dtype)
        keys, values = kv.dense()
        found = decoded(queries, positions, kv, window)
        assert_near(found, reference.attention(queries, positions, keys, values, window))


@pytest.mark.parametrize("keys", [1, 64, 65, 8192, 8193, 32768, 131072])
def test_the_splits_cover_every_position_below(keys: int) -> None:
    for position in {keys - 1, keys // 2, keys // 3}:
        size = -(-(position // 64 + 1) // 128) * 64
        assert position // size + 1 <= splits_for(keys) <= 128


@pytest.mark.parametrize(("dtype", "heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize(("head_dim", "window"), [(16, None), (64, 20), (80, None), (16, 130)])
def test_a_prompt_in_cells_with_padding_before_and_behind(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    base, start, stop = 112, 117, 139  # rows 112 … 143 in two cells, of which 117 … 138 are real
    positions = torch.arange(base, base + 32)
    positions[(positions < start) | (positions >= stop)] = -1
    kv = cache(1, 2, kv_heads, head_dim, dtype)
    forget(kv, torch.tensor([stop - 1]))
    queries = torch.randn(32, heads, head_dim).to(dtype)
    keys, values = kv.dense()
    found = prefilled(queries, positions, kv, base, window)
    assert_near(found, reference.attention(queries, positions, keys, values, window))


def test_a_prompt_row_is_the_same_in_any_chunk() -> None:
    kv = cache(1, 2, 1, 16, torch.float16)
    queries = torch.randn(48, 4, 16, dtype=torch.float16)
    positions = torch.arange(96, 144)
    whole = prefilled(queries, positions, kv, 96)
    forget(kv, torch.tensor([121]))
    part = positions[16:32].clone()
    part[part > 121] = -1
    chunk = prefilled(queries[16:32].contiguous(), part, kv, 112)
    assert torch.equal(chunk[:10], whole[16:26])
    assert torch.count_nonzero(chunk[10:]) == 0


def test_a_cell_of_padding_alone_is_zeros() -> None:
    kv = cache(1, 1, 1, 16, torch.float16, fill=torch.nan)
    queries = torch.randn(16, 2, 16, dtype=torch.float16)
    assert torch.count_nonzero(prefilled(queries, torch.full((16,), -1), kv, 0)) == 0
