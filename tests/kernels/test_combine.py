"""The sum over experts against torch."""

import pytest
import torch
from torch import Tensor

from steerpipe.kernels import reference
from steerpipe.kernels.combine import combine


def parts(rows: int, top_k: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    experts = torch.stack([torch.randperm(60)[:top_k] for _ in range(rows)]).int()
    gates = torch.rand(rows, top_k)
    return torch.randn(rows * top_k, hidden), experts, gates, torch.randn(rows, hidden).to(dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """The interpreter cuts bf16 off instead of rounding it. Where terms cancel, their own size counts: up to 4."""
    step = torch.finfo(found.dtype).eps * (4 if found.dtype == torch.bfloat16 else 2)
    torch.testing.assert_close(found, expected, rtol=step, atol=4 * step)


@pytest.mark.parametrize("shared", ["none", "plain", "switched"])
@pytest.mark.parametrize(("rows", "top_k", "hidden"), [(1, 8, 200), (3, 4, 64), (2, 1, 16), (17, 3, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_sum_is_that_of_the_reference(dtype: torch.dtype, rows: int, top_k: int, hidden: int, shared: str) -> None:
    part, experts, gates, x = parts(rows, top_k, hidden, dtype)
    extra = torch.randn(rows, hidden).to(dtype) if shared != "none" else None
    switch = torch.randn(rows, 1).to(dtype) if shared == "switched" else None
    out = torch.full_like(x, torch.nan)
    combine(part, experts, gates, x, out=out, shared=extra, shared_switch=switch)
    assert_near(out, reference.combine(part, experts, gates, x, shared=extra, shared_switch=switch))


def test_pairs_are_added_in_ascending_expert_order_whatever_their_rank() -> None:
    part = torch.tensor([[1e8], [1.0], [-1e8]])  # 1e8 + 1 is 1e8 in fp32: only one order gives 1
    experts, gates = torch.tensor([[9, 30, 11]], dtype=torch.int32), torch.ones(1, 3)
    out = torch.empty(1, 1)
    combine(part, experts, gates, torch.zeros(1, 1), out=out)
    assert out.item() == 1.0
    combine(part, experts.flip(1), gates, torch.zeros(1, 1), out=out)  # 1 is now at 30, -1e8 at 9 … the same order
    assert out.item() == 1.0
    combine(part, torch.tensor([[9, 10, 11]], dtype=torch.int32), gates, torch.zeros(1, 1), out=out)
    assert out.item() == 0.0


def test_an_unused_pair_contributes_nothing_even_if_it_holds_no_number() -> None:
    part, experts, gates, x = parts(2, 4, 32, torch.float32)
    experts[0, 1] = -1
    experts[1] = -1
    part[1], part[4:], gates[0, 1] = torch.nan, torch.inf, torch.nan
    out = torch.full_like(x, torch.nan)
    combine(part, experts, gates, x, out=out)
    assert_near(out[0], reference.combine(part, experts, gates, x)[0])
    assert torch.equal(out[1], x[1])


def test_the_residual_stream_may_be_written_in_place() -> None:
    part, experts, gates, x = parts(3, 4, 48, torch.float32)
    expected = reference.combine(part, experts, gates, x)
    combine(part, experts, gates, x, out=x)
    assert_near(x, expected)
