"""One-row products with every prologue and epilogue against torch."""

import pytest
import torch
from torch import Tensor

from steerpipe.kernels import reference
from steerpipe.kernels.dense_configs import RowTile, row_tile
from steerpipe.kernels.linear import gated, row_gated_linear, row_linear

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Equal up to the order of additions, which may tip a rounding. The interpreter cuts bf16 off."""
    assert found.dtype == expected.dtype
    step = torch.finfo(found.dtype).eps * (4 if found.dtype == torch.bfloat16 else 1)
    torch.testing.assert_close(found, expected, rtol=max(2 * step, 1e-5), atol=max(step, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 64), (7, 192), (1, 48), (530, 32), (9, 80)])
def test_a_plain_product(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = random(1, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    out = poisoned(1, outputs, dtype=dtype)
    row_linear(x, weight, out=out)
    assert_near(out, reference.row_linear(x, weight, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_comes_before_the_product_and_is_handed_out(dtype: torch.dtype) -> None:
    x, weight, norm = random(1, 96, dtype=dtype), random(10, 96, dtype=dtype, scale=0.1), random(96, dtype=dtype)
    out, normed = poisoned(1, 10, dtype=dtype), poisoned(1, 96, dtype=dtype)
    row_linear(x, weight, out=out, norm=norm, eps=EPS, normed=normed)
    expected = reference.rms_norm(x, norm, EPS)
    assert_near(normed, expected)
    assert_near(out, reference.row_linear(normed, weight, dtype))


def test_a_norm_over_several_chunks_is_the_same() -> None:
    x, weight, norm = random(1, 200), random(5, 200, scale=0.1), random(200)
    expected = reference.row_linear(reference.rms_norm(x, norm, EPS), weight, torch.float32)
    for tile in (RowTile(1, 256, 4), RowTile(2, 64, 4), RowTile(4, 32, 4)):
        out, normed = poisoned(1, 5), poisoned(1, 200)
        row_linear(x, weight, out=out, norm=norm, eps=EPS, normed=normed, tile=tile)
        assert_near(out, expected)
        assert_near(normed, reference.rms_norm(x, norm, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_comes_before_the_rounding_and_the_residual_after_it(dtype: torch.dtype) -> None:
    x, weight = random(1, 64, dtype=dtype), random(11, 64, dtype=dtype, scale=0.1)
    bias, residual = random(11, dtype=dtype), random(1, 11, dtype=dtype, scale=100)
    out = residual.clone()  # in place, as a residual stream is
    row_linear(x, weight, out=out, bias=bias, residual=out)
    assert_near(out, reference.row_linear(x, weight, dtype, bias=bias, residual=residual))


def test_a_router_in_fp32_takes_a_row_in_bf16() -> None:
    x, weight, norm = random(1, 64, dtype=torch.bfloat16), random(12, 64), random(64, dtype=torch.bfloat16)
    out, normed = poisoned(1, 12), poisoned(1, 64, dtype=torch.bfloat16)
    row_linear(x, weight, out=out, norm=norm, eps=EPS, normed=normed)
    assert_near(out, reference.row_linear(normed, weight, torch.float32))


def test_logits_in_fp32_are_not_rounded_to_the_dtype_of_the_head() -> None:
    x, weight = random(1, 64, dtype=torch.bfloat16), random(12, 64, dtype=torch.bfloat16)
    out = poisoned(1, 12)
    row_linear(x, weight, out=out)
    assert_near(out, reference.row_linear(x, weight, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("width", "inputs"), [(13, 64), (8, 80), (1, 32)])
def test_a_gated_product(width: int, inputs: int, dtype: torch.dtype, *, normalised: bool) -> None:
    x, weight = random(1, inputs, dtype=dtype), random(2 * width, inputs, dtype=dtype, scale=inputs**-0.5)
    norm = random(inputs, dtype=dtype) if normalised else None
    out = poisoned(1, width, dtype=dtype)
    row_gated_linear(x, weight, out=out, norm=norm, eps=EPS)
    row = x if norm is None else reference.rms_norm(x, norm, EPS)
    assert_near(out, reference.row_gated_linear(row, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation_of_several_rows(dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * 24, dtype=dtype, scale=3)
    out = poisoned(3, 24, dtype=dtype)
    gated(gate_up, out=out)
    assert_near(out, reference.gated(gate_up))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("outputs", [1, 128, 2048, 5120, 151936])
@pytest.mark.parametrize("inputs", [1, 48, 192, 2048, 4096, 5632, 8192])
def test_every_shape_has_a_tile_of_powers_of_two(outputs: int, inputs: int, itemsize: int) -> None:
    tile = row_tile(outputs, inputs, itemsize)
    for count in (tile.rows, tile.columns, tile.warps):
        assert count & (count - 1) == 0
    assert tile.rows * tile.columns >= min(inputs, 32)
    assert tile.rows * tile.columns * itemsize <= 16384 * 4
