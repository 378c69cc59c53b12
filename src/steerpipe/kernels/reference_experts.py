"""What the expert kernels compute, in torch: every kernel is tested against it.

Blocks come as tensors instead of addresses. Legend: R rows, k experts per row, P = R · k pairs (pair p is of row
p // k), H hidden, I width, T tiles.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from steerpipe.core.blocks import BlockForm

TILE_ROWS = 16
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def decode_block(block: Tensor, form: BlockForm) -> tuple[Tensor, Tensor]:
    """uint8 [bytes] → gate_up [2I, H] and down [H, I], float32."""
    gate_up = _matrix(block, form, form.gate_up, form.gate_up_scale, 2 * form.width, form.hidden, form.gate_up_group)
    down = _matrix(block, form, form.down, form.down_scale, form.hidden, form.width, form.down_group)
    return gate_up, down


def _matrix(block: Tensor, form: BlockForm, start: int, scale: int, rows: int, columns: int, group: int) -> Tensor:
    if form.format in _DTYPES:
        dtype = _DTYPES[form.format]
        return block[start : start + rows * columns * dtype.itemsize].view(dtype).view(rows, columns).float()
    scales = block[scale : scale + 2 * rows * columns // group].view(torch.float16).view(rows, columns // group, 1)
    if form.format == "int8":
        codes = block[start : start + rows * columns].view(torch.int8).view(rows, columns // group, group)
    else:
        packed = block[start : start + rows * columns // 2].view(rows, columns // group, group // 2)
        codes = torch.cat((packed & 15, packed >> 4), 2).to(torch.int8) - 8  # [rows, groups, group]
    return (codes.float() * scales.float()).view(rows, columns)


def activation(x: Tensor, gate_up: Tensor) -> Tensor:
    """x [R, H] → silu(gate) · up, [R, I]: in gate_up's dtype, rounded once to that of x."""
    gate, up = (x.to(gate_up.dtype) @ gate_up.T).chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


def expert_row(x: Tensor, experts: Tensor, blocks: Mapping[int, Tensor], form: BlockForm) -> tuple[Tensor, Tensor]:
    """x [1, H], experts [k] → act [k, I] in x's dtype, part [k, H]; NaN where a pair is skipped."""
    return expert_pairs(x, experts.view(1, -1), blocks, form)


def expert_pairs(
    x: Tensor, experts: Tensor, blocks: Mapping[int, Tensor], form: BlockForm, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """x [R, H], experts [R, k] → act [P, I] in x's dtype, part [P, H] in `dtype`, as all sums; NaN if it is -1."""
    row_of = torch.arange(experts.numel(), device=x.device) // experts.shape[1]  # [P]
    act = torch.full((experts.numel(), form.width), torch.nan, dtype=x.dtype, device=x.device)
    part = torch.full((experts.numel(), form.hidden), torch.nan, dtype=dtype, device=x.device)
    for expert in sorted({expert for expert in experts.flatten().tolist() if expert >= 0}):
        gate_up, down = decode_block(blocks[expert], form)
        pairs = (experts.flatten() == expert).nonzero().flatten()
        act[pairs] = activation(x[row_of[pairs]], gate_up.to(dtype))
        part[pairs] = act[pairs].to(dtype) @ down.to(dtype).T
    return act, part


def make_tiles(experts: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """experts [R <= 16, k] → tile_expert [T], tile_pairs [T, 16]: the used experts in ascending order, then -1."""
    top_k = experts.shape[1]
    tile_expert = torch.full((tiles,), -1, dtype=torch.int32)
    tile_pairs = torch.full((tiles, TILE_ROWS), -1, dtype=torch.int32)
    used = sorted({expert for expert in experts.flatten().tolist() if expert >= 0})
    for tile, expert in enumerate(used):
        tile_expert[tile] = expert
        for pair, other in enumerate(experts.flatten().tolist()):
            if other == expert:
                tile_pairs[tile, pair // top_k] = pair
    return tile_expert, tile_pairs
