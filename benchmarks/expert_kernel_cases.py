"""What `expert_kernels.py` tries: shapes, formats and launch configurations, the most promising first."""

from dataclasses import dataclass

import torch

from steerpipe.kernels.configs import LAUNCHES, Launch
from steerpipe.kernels.experts import down_row, down_tiles, gate_up_row, gate_up_tiles
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import plan_block


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    width: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Case:
    """One kernel on one format and shape, with one launch configuration."""

    kernel: str  # "row_gate_up", "row_down", "tile_gate_up" or "tile_down"
    format: str
    shape: Shape
    launch: Launch


SHAPES = (Shape("qwen3-30b", 2048, 768, 128, 8), Shape("qwen1.5-moe", 2048, 1408, 60, 4))
ROW_KERNELS, TILE_KERNELS = ("row_gate_up", "row_down"), ("tile_gate_up", "tile_down")
FORMATS = ("bfloat16", "int8", "int4")

# rows, columns, warps and perhaps a hint
_ROW: dict[tuple[str, str], list[tuple[int, int, int] | tuple[int, int, int, str]]] = {
    ("row_gate_up", "bfloat16"): [
        (4, 2048, 2), (4, 2048, 4), (2, 2048, 2), (2, 2048, 4), (8, 2048, 4), (1, 2048, 2), (4, 1024, 2), (8, 512, 4),
        (16, 256, 4), (8, 256, 4), (4, 2048, 2, ".cg"), (4, 2048, 4, "evict_first"),
    ],
    ("row_down", "bfloat16"): [
        (16, 256, 4), (32, 256, 4), (8, 256, 2), (16, 256, 2), (8, 256, 4), (16, 1024, 4), (8, 1024, 4), (8, 1024, 2),
        (16, 512, 4), (8, 2048, 4), (4, 1024, 2), (16, 256, 4, ".cg"),
    ],
    ("row_gate_up", "int8"): [
        (4, 2048, 2), (8, 2048, 4), (8, 2048, 2), (4, 2048, 4), (2, 2048, 2), (16, 2048, 4), (4, 2048, 1),
        (16, 512, 4), (8, 2048, 4, ".cg"),
    ],
    ("row_down", "int8"): [
        (16, 1024, 2), (16, 1024, 4), (8, 1024, 2), (32, 1024, 4), (8, 1024, 1), (16, 256, 4), (32, 256, 4),
        (32, 512, 4), (16, 512, 2), (16, 2048, 4),
    ],
    ("row_gate_up", "int4"): [
        (8, 2048, 2), (4, 2048, 2), (16, 2048, 2), (8, 2048, 4), (16, 2048, 4), (8, 2048, 1), (4, 2048, 1),
        (4, 2048, 4), (16, 1024, 2), (8, 2048, 2, ".cg"),
    ],
    ("row_down", "int4"): [
        (16, 1024, 2), (8, 1024, 2), (16, 1024, 1), (8, 1024, 1), (32, 1024, 4), (16, 2048, 2),
        (8, 2048, 2), (32, 512, 4), (32, 256, 4),
    ],
}  # fmt: skip

# rows, columns, warps, stages
_TILE: dict[tuple[str, str], list[tuple[int, int, int, int]]] = {
    ("tile_gate_up", "bfloat16"): [
        (32, 128, 4, 3), (64, 128, 4, 3), (64, 64, 4, 4), (32, 256, 4, 3), (16, 256, 4, 3), (128, 64, 8, 4)
    ],
    ("tile_down", "bfloat16"): [
        (64, 128, 4, 3), (32, 128, 4, 3), (64, 64, 4, 4), (64, 256, 4, 3), (32, 256, 4, 3), (128, 64, 8, 4)
    ],
    ("tile_gate_up", "int8"): [(32, 128, 4, 3), (32, 256, 4, 3), (64, 128, 4, 3), (16, 256, 4, 4)],
    ("tile_down", "int8"): [(64, 128, 4, 3), (32, 128, 4, 4), (32, 256, 4, 3), (64, 256, 4, 3)],
    ("tile_gate_up", "int4"): [(32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 3), (16, 256, 4, 4)],
    ("tile_down", "int4"): [(32, 128, 4, 4), (64, 128, 4, 3), (32, 256, 4, 3), (64, 256, 4, 3)],
}  # fmt: skip


def row_cases(kernel: str, kind: str, shape: Shape) -> list[Case]:
    """The configured launch first."""
    tried = (Launch(rows, columns, warps, 1, *hint) for rows, columns, warps, *hint in _ROW[kernel, kind])
    return _cases(kernel, kind, shape, list(tried))


def tile_cases(kernel: str, kind: str, shape: Shape) -> list[Case]:
    return _cases(kernel, kind, shape, [Launch(*numbers) for numbers in _TILE[kernel, kind]])


def _cases(kernel: str, kind: str, shape: Shape, launches: list[Launch]) -> list[Case]:
    return [Case(kernel, kind, shape, launch) for launch in dict.fromkeys([LAUNCHES[kernel, kind], *launches])]


def compile_case(case: Case) -> None:
    """Into Triton's cache on disk: a launch whose pairs are all skipped, in a process of its own."""
    shape, launch = case.shape, case.launch
    form = plan_block(ExpertFormat(case.format), shape.hidden, shape.width).form
    x = torch.empty(1, shape.hidden, dtype=torch.bfloat16, device="cuda")
    none = torch.full((16,), -1, dtype=torch.int32, device="cuda")
    table = torch.zeros(shape.experts, dtype=torch.int64, device="cuda")
    act = torch.empty(16, shape.width, dtype=torch.bfloat16, device="cuda")
    part = torch.empty(16, shape.hidden, device="cuda")
    tiles = none[:1], none.view(1, 16)
    if case.kernel == "row_gate_up":
        gate_up_row(x, none, table, form, act=act, launch=launch, followed=False)
    elif case.kernel == "row_down":
        down_row(act, none, table, form, part=part, launch=launch)
    elif case.kernel == "tile_gate_up":
        gate_up_tiles(x, *tiles, table, form, top_k=shape.top_k, act=act, launch=launch)
    else:
        down_tiles(act, *tiles, table, form, part=part, launch=launch)
    torch.cuda.synchronize()
