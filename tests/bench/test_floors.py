"""Floors are arithmetic: known figures give known milliseconds."""

import pytest

from steerpipe.bench.floors import active_bytes, on_demand_floor, prefill_floor, resident_floor
from steerpipe.bench.shapes import make_shape
from steerpipe.bench.timing import Times
from steerpipe.store.formats import ExpertFormat


def test_reading_the_active_weights_of_qwen3_once_takes_a_millisecond_and_a_half() -> None:
    shape = make_shape("qwen3-30b", ExpertFormat.BFLOAT16)
    active = active_bytes(shape, 2, context=128, batch=1, experts_per_layer=8)
    assert active.experts == shape.routed_bytes == 48 * 8 * 9437184
    assert resident_floor(active, 4.3e12) == pytest.approx(1.43e-3, rel=0.02)


def test_a_batch_reads_dense_weights_once_keys_once_per_row_and_experts_by_their_union() -> None:
    shape = make_shape("olmoe", ExpertFormat.INT4)
    one, four = (active_bytes(shape, 2, 1000, batch, union) for batch, union in ((1, 8.0), (4, 20.5)))
    assert four.dense == one.dense
    assert four.kv == 4 * one.kv
    assert four.experts == 16 * 20.5 * shape.layout.block_bytes


def test_experts_may_be_counted_in_another_form_than_the_packed_one() -> None:
    shape = make_shape("tiny", ExpertFormat.INT4)
    assert active_bytes(shape, 4, 0, 1, 2, expert_bytes=1000).experts == 2 * 2 * 1000


def test_the_on_demand_floor_of_qwen3_is_the_step_without_its_experts_and_the_link() -> None:
    assert on_demand_floor(2.8e-3, 1.1e-3, 3.62e9, 53.5e9) == pytest.approx(1.7e-3 + 67.66e-3, rel=1e-3)
    assert on_demand_floor(1e-3, 2e-3, 0, 1e9) == 0.0  # never below nothing


def test_a_prompt_takes_the_longer_of_copies_and_compute() -> None:
    assert prefill_floor(50e9, 50e9, 0.2) == 1.0
    assert prefill_floor(5e9, 50e9, 0.2) == 0.2


def test_times_are_over_all_steps_of_all_repeats() -> None:
    times = Times.of([[0.001, 0.002, 0.003], [0.004, 0.1, 0.005]])
    assert (times.count, times.median_ms, times.least_ms) == (6, 3.5, 1.0)
    assert times.p95_ms == 100.0
    assert times.repeat_medians_ms == (2.0, 5.0)
    assert Times.of([[0.001] * 99 + [1.0]]).p95_ms == 1.0
