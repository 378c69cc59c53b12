"""How each kernel is launched, by (kernel, format): chosen by measurement, never at run time.

Measure again with `benchmarks/expert_kernels.py`.
"""

from dataclasses import dataclass

from steerpipe.core.blocks import BlockForm


@dataclass(frozen=True, slots=True)
class Launch:
    """The work of one program. All counts are powers of two; a kernel takes less where the matrix is smaller."""

    rows: int  # rows of the weight (outputs) that one program computes
    columns: int  # columns of the weight (inputs) in one step
    warps: int
    stages: int = 1  # steps in flight, where the loop is pipelined
    hint: str = ""  # how weights are loaded: "", ".cg" (past the L1) or "evict_first"; never both
    overlap: bool = False  # starts while the kernel before it ends; down asks for weights before it waits; rows only
    missing_first: bool = False  # of a row: programs of experts in pinned memory come first; where not all fit at once


# Measured on one H200 at H 2048 with I 768 and I 1408, weights beyond the L2 cache, in a CUDA graph
# (benchmarks/notes/2026-11-15-cuda-kernels.md); float32 and float16 follow bfloat16 by their bytes.
LAUNCHES: dict[tuple[str, str], Launch] = {
    ("row_gate_up", "float32"): Launch(rows=1, columns=2048, warps=2, overlap=True, missing_first=True),
    ("row_gate_up", "float16"): Launch(rows=2, columns=2048, warps=2, overlap=True, missing_first=True),
    ("row_gate_up", "bfloat16"): Launch(rows=2, columns=2048, warps=2, overlap=True, missing_first=True),
    ("row_gate_up", "int8"): Launch(rows=4, columns=2048, warps=1, overlap=True),
    ("row_gate_up", "int4"): Launch(rows=8, columns=2048, warps=2, overlap=True),
    ("row_down", "float32"): Launch(rows=16, columns=256, warps=4, overlap=True, missing_first=True),
    ("row_down", "float16"): Launch(rows=16, columns=256, warps=2, overlap=True, missing_first=True),
    ("row_down", "bfloat16"): Launch(rows=16, columns=256, warps=2, overlap=True, missing_first=True),
    ("row_down", "int8"): Launch(rows=8, columns=1024, warps=2, overlap=True),
    ("row_down", "int4"): Launch(rows=16, columns=1024, warps=1, overlap=True),
    ("tile_gate_up", "float32"): Launch(rows=32, columns=32, warps=4, stages=3),
    ("tile_gate_up", "float16"): Launch(rows=64, columns=64, warps=4, stages=4),
    ("tile_gate_up", "bfloat16"): Launch(rows=64, columns=64, warps=4, stages=4),
    ("tile_gate_up", "int8"): Launch(rows=64, columns=128, warps=4, stages=3),
    ("tile_gate_up", "int4"): Launch(rows=64, columns=128, warps=4, stages=3),
    ("tile_down", "float32"): Launch(rows=32, columns=32, warps=4, stages=3),
    ("tile_down", "float16"): Launch(rows=64, columns=64, warps=4, stages=4),
    ("tile_down", "bfloat16"): Launch(rows=64, columns=64, warps=4, stages=4),
    ("tile_down", "int8"): Launch(rows=64, columns=128, warps=4, stages=3),
    ("tile_down", "int4"): Launch(rows=64, columns=128, warps=4, stages=3),
}

# (kernel, format, hidden, width): where another is faster for these experts.
BY_SHAPE: dict[tuple[str, str, int, int], Launch] = {
    ("row_gate_up", "bfloat16", 2048, 1408): Launch(rows=1, columns=2048, warps=2, overlap=True, missing_first=True),
    ("row_down", "bfloat16", 2048, 1408): Launch(rows=8, columns=256, warps=2, overlap=True, missing_first=True),
    ("row_down", "bfloat16", 2048, 768): Launch(rows=32, columns=256, warps=4, overlap=True, missing_first=True),
    ("row_down", "int8", 2048, 1408): Launch(rows=8, columns=1024, warps=1, overlap=True),
    ("row_down", "int8", 2048, 768): Launch(rows=16, columns=256, warps=4, overlap=True),
    # 12.2 us with gate/up, 8x1024 by one warp 13.7; a missing expert 89.5 us instead of 91.2: all of a row is asked for
    # before anything waits, so that the link does not pause between the two kernels.
    ("row_down", "int4", 2048, 1408): Launch(rows=16, columns=2048, warps=4, overlap=True),
}


def launch_for(kernel: str, form: BlockForm) -> Launch:
    """`kernel`: "row_gate_up", "row_down", "tile_gate_up" or "tile_down". The same for any number of tiles: bits."""
    return BY_SHAPE.get((kernel, form.format, form.hidden, form.width)) or LAUNCHES[kernel, form.format]
