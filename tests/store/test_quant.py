"""The arithmetic of int8 and int4: bounds, exact values, edges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from steerpipe.core.errors import PackError
from steerpipe.store.quant import dequantise_int4, dequantise_int8, quantise_int4, quantise_int8

GROUPS = (2, 8, 16, 32)
FAST = settings(deadline=None, max_examples=40)


def random_matrix(seed: int, rows: int = 6, columns: int = 64, exponent: int = 0, outliers: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 2.0**exponent
    if outliers:
        weight[:, 3] *= 30
    return weight


def round_trip_int4(weight: Tensor, group: int) -> Tensor:
    return dequantise_int4(*quantise_int4(weight, group, "w"), torch.float32)


def round_trip_int8(weight: Tensor) -> Tensor:
    return dequantise_int8(*quantise_int8(weight, "w"), torch.float32)


def plain_int4(weight: Tensor, group: int) -> Tensor:
    """The usual way: the largest weight becomes 7."""
    grouped = weight.view(len(weight), -1, group)
    scale = grouped.abs().amax(2, keepdim=True) / 7
    return ((grouped / scale).round() * scale).view_as(weight)


@FAST
@given(seed=st.integers(0, 10**6), exponent=st.integers(-22, 12), outliers=st.booleans())
def test_int8_is_never_off_by_more_than_half_a_step(seed: int, exponent: int, outliers: bool) -> None:
    weight = random_matrix(seed, exponent=exponent, outliers=outliers)
    codes, scales = quantise_int8(weight, "w")
    error = (dequantise_int8(codes, scales, torch.float32) - weight).abs()
    assert codes.dtype == torch.int8
    assert int(codes.min()) >= -127
    assert scales.shape == (6, 1)
    assert bool((error <= scales.float() * 0.5001).all())
    assert bool((scales.float() <= weight.abs().amax(1, keepdim=True) / 127 * 1.001 + 2.0**-24).all())


@FAST
@given(seed=st.integers(0, 10**6), group=st.sampled_from(GROUPS), exponent=st.integers(-8, 12), outliers=st.booleans())
def test_int4_is_at_least_as_good_as_min_max_in_every_group(
    seed: int, group: int, exponent: int, outliers: bool
) -> None:
    weight = random_matrix(seed, exponent=exponent, outliers=outliers)
    ours = (round_trip_int4(weight, group) - weight).view(6, -1, group).square().sum(2)
    plain = (plain_int4(weight, group) - weight).view(6, -1, group).square().sum(2)
    floor = (
        weight.view(6, -1, group).square().sum(2) * 1e-5
    )  # our scales are rounded to float16, the plain ones are not
    assert bool((ours <= plain + floor).all())


@pytest.mark.parametrize(("group", "at_most", "plain_at_least"), [(32, 0.0815, 0.095), (16, 0.0705, 0.083)])
def test_int4_loses_a_sixth_less_than_min_max_on_gaussian_weights(
    group: int, at_most: float, plain_at_least: float
) -> None:
    weight = random_matrix(0, rows=512, columns=192)
    ours = (round_trip_int4(weight, group) - weight).norm() / weight.norm()
    plain = (plain_int4(weight, group) - weight).norm() / weight.norm()
    assert float(ours) <= at_most
    assert float(plain) >= plain_at_least


@FAST
@given(
    seed=st.integers(0, 10**6), group=st.sampled_from((8, 16, 32)), exponent=st.integers(-14, 8),
    negative=st.booleans(), extreme=st.sampled_from((-8, 7)),
)  # fmt: skip
def test_int4_gives_back_what_it_can_represent(
    seed: int, group: int, exponent: int, negative: bool, extreme: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8 if extreme == -8 else -7, 8, (4, 64), generator=generator).float()
    codes.view(4, -1, group)[..., group // 3] = extreme
    weight = codes * (2.0**exponent) * (-1 if negative else 1)
    assert torch.equal(round_trip_int4(weight, group), weight)


@FAST
@given(seed=st.integers(0, 10**6), exponent=st.integers(-14, 8))
def test_int8_gives_back_what_it_can_represent(seed: int, exponent: int) -> None:
    codes = torch.randint(-127, 128, (5, 32), generator=torch.Generator().manual_seed(seed)).float()
    codes[:, 7] = 127
    weight = codes * 2.0**exponent
    assert torch.equal(round_trip_int8(weight), weight)


@FAST
@given(
    seed=st.integers(0, 10**6), group=st.sampled_from(GROUPS), dtype=st.sampled_from((torch.bfloat16, torch.float16))
)
def test_narrow_dtypes_are_the_exact_product_rounded_once(seed: int, group: int, dtype: torch.dtype) -> None:
    codes, scales = quantise_int4(random_matrix(seed), group, "w")
    exact = dequantise_int4(codes, scales, torch.float64)
    assert torch.equal(dequantise_int4(codes, scales, torch.float32).double(), exact)
    assert torch.equal(dequantise_int4(codes, scales, dtype), exact.float().to(dtype))
    codes, scales = quantise_int8(random_matrix(seed), "w")
    exact = codes.double() * scales.double()
    assert torch.equal(dequantise_int8(codes, scales, torch.float32).double(), exact)
    assert torch.equal(dequantise_int8(codes, scales, dtype), exact.float().to(dtype))


def test_a_byte_holds_two_columns_half_a_group_apart_low_one_first() -> None:
    codes = torch.tensor([[0x1F, 0x80, 0xC4, 0x00]], dtype=torch.uint8)  # two groups of four
    scales = torch.tensor([[1.0, -0.5]], dtype=torch.float16)
    assert dequantise_int4(codes, scales, torch.float32).tolist() == [[7, -8, -7, 0, 2.0, 4.0, -2.0, 4.0]]


def test_rows_of_zeros_stay_zeros() -> None:
    weight = random_matrix(1)
    weight[2] = 0
    assert not round_trip_int4(weight, 16)[2].any()
    assert not round_trip_int8(weight)[2].any()
    assert not round_trip_int4(torch.zeros(3, 16), 8).any()


@pytest.mark.parametrize("exponent", [-140, -60, -26, -24, -20, -16])
def test_tiny_weights_never_come_back_larger_in_error_than_themselves(exponent: int) -> None:
    weight = random_matrix(2).double().mul(2.0**exponent).float()  # float16 scales have no more steps down there
    for back in (round_trip_int4(weight, 16), round_trip_int8(weight)):
        assert bool(torch.isfinite(back).all())
        assert bool(((back - weight).abs() <= weight.abs().clamp(min=2.0**-25) * 1.0001).all())


def test_large_weights_are_held_and_larger_ones_refused() -> None:
    weight = random_matrix(3)
    weight[0, 0] = 390_000.0
    assert float((round_trip_int4(weight, 16) - weight)[0, 0].abs()) < 390_000 / 6
    weight[0, 0] = 400_000.0
    with pytest.raises(PackError, match=r"w has a weight of 4e\+05, beyond the 3.93e\+05"):
        quantise_int4(weight, 16, "w")
    assert float(round_trip_int8(weight)[0, 0]) == pytest.approx(400_000, rel=1e-3)
    weight[0, 0] = 1e9
    with pytest.raises(PackError, match="beyond"):
        quantise_int8(weight, "w")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_are_refused_by_name(bad: float) -> None:
    weight = random_matrix(4)
    weight[1, 5] = bad
    with pytest.raises(PackError, match="gate of it has 1 of 384 values") as caught:
        quantise_int4(weight, 16, "gate of it")
    assert "native" in caught.value.fix
    with pytest.raises(PackError, match="gate of it has 1 of 384 values"):
        quantise_int8(weight, "gate of it")


def test_quantising_again_what_was_dequantised_changes_nothing() -> None:
    once = round_trip_int8(random_matrix(5))
    assert torch.equal(round_trip_int8(once), once)


def test_out_is_filled_and_returned() -> None:
    codes, scales = quantise_int4(random_matrix(6), 16, "w")
    out = torch.empty(6, 64, dtype=torch.bfloat16)
    assert dequantise_int4(codes, scales, torch.float32, out) is out
    assert torch.equal(out, dequantise_int4(codes, scales, torch.bfloat16))
