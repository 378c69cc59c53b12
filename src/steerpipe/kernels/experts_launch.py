"""The constants that the expert kernels are compiled with: what a form and a launch configuration come to.

Legend: H hidden, I width.
"""

from dataclasses import replace
from functools import lru_cache

import triton
import triton.language as tl

from steerpipe.core.blocks import BlockForm
from steerpipe.kernels.configs import Launch
from steerpipe.kernels.dense_configs import can_overlap
from steerpipe.kernels.fetch import PROGRAMS, chunk_for

_ELEMENTS = {
    "float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16, "int8": tl.int8, "int4": tl.uint8,
}  # fmt: skip
_SMALLEST_DOT = 16  # tl.dot takes no shorter sides
_WIDE_COLUMNS = 32  # a float32 step of more spills its registers
_LARGEST_SUM = 16  # bytes of int4 that a thread loads at once, and sums before the scale comes: no shuffles


@lru_cache(maxsize=256)
def row_constants(form: BlockForm, launch: Launch, *, down: bool, native: bool) -> dict[str, object]:
    """For a matrix times one row: gate and up (I rows of each, H inputs), or down (H rows, I inputs).

    `native`: on a GPU, not in Triton's interpreter.
    """
    common = _constants(form, launch, down=down, native=native, smallest=1)
    overlap = launch.overlap and native and can_overlap()
    rows, step = common["ROWS"], common["BLOCK"]
    assert isinstance(rows, int) and isinstance(step, int), "sizes are integers"
    outputs, inputs, group = _shape(form, down)
    width, chunk = _width(form, inputs), chunk_for(form)
    return (
        common
        | {
            "SUB": _power_of_two_in(group // 2, _LARGEST_SUM) if form.format == "int4" else 0,
            "MASKED": outputs % rows != 0 or width % step != 0,
            "CACHE": launch.hint if launch.hint.startswith(".") else "",
            "OVERLAP": overlap,
            "CHUNK": chunk,
            "SPAN": triton.next_power_of_2(triton.cdiv(rows * _row_bytes(form, inputs), chunk) + 1),
            "PROGRAMS": PROGRAMS,
            "MISSING_FIRST": launch.missing_first,
            "WHOLE": form.format == "int4" and step % (group // 2) == 0,
        }
        | ({"launch_pdl": True} if overlap else {})
    )


@lru_cache(maxsize=256)
def tile_constants(form: BlockForm, launch: Launch, *, down: bool, native: bool, wide: bool) -> dict[str, object]:
    """For a matrix times a tile of rows. `wide`: rows of float32, which the matrix units do not take."""
    if wide:
        launch = replace(launch, columns=min(launch.columns, _WIDE_COLUMNS))
    common = _constants(form, launch, down=down, native=native, smallest=_SMALLEST_DOT)
    step, group = common["BLOCK"], _shape(form, down)[2]
    assert isinstance(step, int), "sizes are integers"
    return common | {"SUB": _power_of_two_in(group // 2, step) if form.format == "int4" else 0}


def _constants(form: BlockForm, launch: Launch, *, down: bool, native: bool, smallest: int) -> dict[str, object]:
    outputs, inputs, group = _shape(form, down)
    return {
        "H": form.hidden,
        "I": form.width,
        "START": form.down if down else form.gate_up,
        "SCALE": form.down_scale if down else form.gate_up_scale,
        "GROUP": group,
        "ELEMENT": _ELEMENTS[form.format],
        "ROWS": _clip(launch.rows, outputs, smallest),
        "BLOCK": _clip(_width(form, launch.columns), _width(form, inputs), smallest),
        "EVICT": "" if launch.hint.startswith(".") else launch.hint,
        "NATIVE": native,
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


def _shape(form: BlockForm, down: bool) -> tuple[int, int, int]:
    """Outputs, inputs and group of the matrix; gate and up count as one output."""
    return (form.hidden, form.width, form.down_group) if down else (form.width, form.hidden, form.gate_up_group)


def _width(form: BlockForm, columns: int) -> int:
    """Elements that hold so many columns: an int4 byte holds two."""
    return columns // 2 if form.format == "int4" else columns


def _row_bytes(form: BlockForm, inputs: int) -> int:
    """Of a row of weights: no fewer than of its scales."""
    return _width(form, inputs) * _ELEMENTS[form.format].primitive_bitwidth // 8


def _clip(count: int, available: int, smallest: int) -> int:
    """No more than it takes to cover what there is; a power of two."""
    return max(smallest, min(count, triton.next_power_of_2(available)))


def _power_of_two_in(count: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides `count`."""
    return min(count & -count, largest)
