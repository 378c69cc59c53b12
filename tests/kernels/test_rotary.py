"""Norm, clip, rotation and the write into KV blocks against torch."""

import pytest
import torch
from torch import Tensor

from steerpipe.kernels import reference
from steerpipe.kernels.rotary import rotate_and_store
from tests.kernels.kv import BLOCK, LAYER, Cache, cache

EPS = 1e-6
HEADS, KV_HEADS = 6, 2


def turns(rows: int, head_dim: int) -> Tensor:
    angle = torch.rand(rows, head_dim // 2) * 6
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def norms(kind: str, head_dim: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    if kind == "none":
        return None, None
    many = (HEADS, KV_HEADS) if kind == "all heads" else (1, 1)
    return (torch.randn(many[0] * head_dim).to(dtype), torch.randn(many[1] * head_dim).to(dtype))


def run(
    qkv: Tensor, turn: Tensor, positions: Tensor, kv: Cache, head_dim: int,
    norm: tuple[Tensor | None, Tensor | None] = (None, None), clip: float | None = None,
) -> Tensor:  # fmt: skip
    queries = torch.full((len(qkv), HEADS, head_dim), torch.nan, dtype=qkv.dtype)
    rotate_and_store(
        qkv, turn, positions, kv.blocks, heads=HEADS, kv_heads=KV_HEADS, layer_bytes=kv.layer_bytes, queries=queries,
        query_norm=norm[0], key_norm=norm[1], eps=EPS, clip=clip,
    )  # fmt: skip
    return queries


def stored(kv: Cache, row: int, position: int) -> tuple[Tensor, Tensor]:
    """Key and value, [kv_heads, D] each."""
    own = kv.memory[kv.order[min(row, len(kv.order) - 1), position // BLOCK], LAYER]
    return own[0, :, position % BLOCK], own[1, :, position % BLOCK]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", ["none", "head", "all heads"])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_queries_keys_and_values_arrive_where_they_belong(
    dtype: torch.dtype, head_dim: int, kind: str, clip: float | None
) -> None:
    positions = torch.tensor([0, 130, 255])
    kv = cache(3, 2, KV_HEADS, head_dim, dtype, fill=7.0)
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * head_dim).to(dtype)
    turn, norm = turns(3, head_dim), norms(kind, head_dim, dtype)
    queries = run(qkv, turn, positions, kv, head_dim, norm, clip)
    expected = reference.rotated_heads(
        qkv, turn, heads=HEADS, kv_heads=KV_HEADS, query_norm=norm[0], key_norm=norm[1], eps=EPS, clip=clip
    )
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(queries, expected[0], **near)
    for row, position in enumerate(positions.tolist()):
        key, value = stored(kv, row, position)
        torch.testing.assert_close(key, expected[1][row], **near)
        torch.testing.assert_close(value, expected[2][row], **near)
        key.fill_(7.0)
        value.fill_(7.0)
    assert bool((kv.memory == 7.0).all()), "something was written elsewhere"


def test_a_row_without_a_position_stores_nothing_and_its_queries_are_zeros() -> None:
    kv = cache(2, 1, KV_HEADS, 16, torch.float32, fill=7.0)
    kv.blocks[0] = 0  # an address that must not be followed
    qkv = torch.randn(2, (HEADS + 2 * KV_HEADS) * 16)
    queries = run(qkv, turns(2, 16), torch.tensor([-1, 5]), kv, 16)
    assert torch.count_nonzero(queries[0]) == 0
    assert bool((queries[1] != 0).all())
    for part in stored(kv, 1, 5):
        part.fill_(7.0)
    assert bool((kv.memory == 7.0).all())


def test_rows_of_a_prompt_share_one_line_of_blocks() -> None:
    kv = cache(1, 2, KV_HEADS, 16, torch.float32, fill=7.0)
    qkv, turn = torch.randn(16, (HEADS + 2 * KV_HEADS) * 16), turns(16, 16)
    positions = torch.arange(120, 136)
    positions[:3] = -1
    run(qkv, turn, positions, kv, 16)
    _, keys, values = reference.rotated_heads(qkv, turn, heads=HEADS, kv_heads=KV_HEADS)
    for row in range(3, 16):
        key, value = stored(kv, row, 120 + row)
        torch.testing.assert_close(key, keys[row])
        torch.testing.assert_close(value, values[row])
    assert bool((stored(kv, 0, 120)[0] == 7.0).all())


def test_bf16_is_stored_as_bf16() -> None:
    kv = cache(1, 1, KV_HEADS, 16, torch.bfloat16, fill=7.0)
    qkv, turn = torch.randn(1, (HEADS + 2 * KV_HEADS) * 16).bfloat16(), turns(1, 16)
    queries = run(qkv, turn, torch.tensor([9]), kv, 16)
    expected = reference.rotated_heads(qkv, turn, heads=HEADS, kv_heads=KV_HEADS)
    near = {"rtol": 2e-2, "atol": 2e-2}  # the interpreter cuts bf16 off instead of rounding
    torch.testing.assert_close(queries, expected[0], **near)
    torch.testing.assert_close(stored(kv, 0, 9)[0], expected[1][0], **near)
    assert torch.equal(stored(kv, 0, 9)[1], expected[2][0])
