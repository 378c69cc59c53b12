"""The row rule: a token's bits never depend on its neighbours.

Every dense operation runs on one cell at a time: 16 rows, padded with zeros, or a single row. So each matrix
product has one of two shapes, whatever the chunk or the batch, and a library that picks its kernel by shape picks
the same one. Prefill puts position p into row p % 16 of its cell; decode takes any free row of a batched cell.
What remains to be trusted is that a row's bits do not depend on its place in the cell or on the other rows; the
tests and `steerpipe doctor` measure that on the machine at hand (ADR 0004).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from steerpipe.core.geometry import CELL_ROWS

CELL = CELL_ROWS


def padded(rows: int) -> int:
    """Rows rounded up to whole cells."""
    return -(-rows // CELL) * CELL


def by_cell(function: Callable[..., Tensor], *inputs: Tensor, cell: int) -> Tensor:
    """function(rows of one cell of each input) for every cell, put together again. Inputs: [R, ...], R = n · cell."""
    rows = inputs[0].shape[0]
    assert rows % cell == 0, f"{rows} rows are not whole cells of {cell}"
    if rows == cell:
        return function(*inputs)
    return torch.cat([function(*(x[i : i + cell] for x in inputs)) for i in range(0, rows, cell)])
