"""What forms and launch configurations come to."""

from itertools import product

import pytest

from steerpipe.kernels import configs
from steerpipe.kernels.configs import LAUNCHES, Launch, launch_for
from steerpipe.kernels.experts_launch import row_constants, tile_constants
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import plan_block

KERNELS = ("row_gate_up", "row_down", "tile_gate_up", "tile_down")


def test_every_kernel_has_a_launch_for_every_format() -> None:
    assert set(product(KERNELS, [kind.value for kind in ExpertFormat])) <= set(LAUNCHES)
    for launch in LAUNCHES.values():
        for count in (launch.rows, launch.columns, launch.warps):
            assert count & (count - 1) == 0, f"{launch}: {count} is no power of two"
        assert launch.hint in ("", ".cg", "evict_first")


def test_a_shape_may_have_a_launch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    form, own = plan_block(ExpertFormat.INT8, 64, 32).form, Launch(rows=2, columns=64, warps=1)
    monkeypatch.setitem(configs.BY_SHAPE, ("row_down", "int8", 64, 32), own)
    assert launch_for("row_down", form) is own
    assert launch_for("row_gate_up", form) is LAUNCHES["row_gate_up", "int8"]
    assert launch_for("row_down", plan_block(ExpertFormat.INT8, 64, 16).form) is LAUNCHES["row_down", "int8"]


@pytest.mark.parametrize(("width", "masked"), [(768, False), (1408, True)])
def test_loads_are_masked_only_where_steps_do_not_divide(width: int, masked: bool) -> None:
    form, launch = plan_block(ExpertFormat.INT4, 2048, width).form, Launch(rows=16, columns=256, warps=4)
    assert row_constants(form, launch, down=False, native=True)["MASKED"] is False
    assert row_constants(form, launch, down=True, native=True)["MASKED"] is masked


@pytest.mark.parametrize(("group", "row_sum", "tile_sum"), [(64, 16, 32), (16, 8, 8), (24, 4, 4), (10, 1, 1)])
def test_sums_of_int4_stay_within_a_group(group: int, row_sum: int, tile_sum: int) -> None:
    form = plan_block(ExpertFormat.INT4, 2 * group, group, group).form
    launch = Launch(rows=16, columns=128, warps=4)
    assert row_constants(form, launch, down=False, native=True)["SUB"] == row_sum
    assert tile_constants(form, launch, down=False, native=True, wide=False)["SUB"] == tile_sum


def test_small_experts_take_small_steps_and_tiles_never_fewer_than_16() -> None:
    form, launch = plan_block(ExpertFormat.BFLOAT16, 40, 8).form, Launch(rows=64, columns=2048, warps=4)
    row = row_constants(form, launch, down=False, native=False)
    assert (row["ROWS"], row["BLOCK"]) == (8, 64)
    tile = tile_constants(form, launch, down=True, native=False, wide=False)
    assert (tile["ROWS"], tile["BLOCK"]) == (64, 16)


def test_only_a_gpu_overlaps_launches() -> None:
    form, launch = plan_block(ExpertFormat.BFLOAT16, 64, 32).form, Launch(rows=4, columns=64, warps=1, overlap=True)
    assert row_constants(form, launch, down=True, native=True)["launch_pdl"] is True
    assert "launch_pdl" not in row_constants(form, launch, down=True, native=False)
