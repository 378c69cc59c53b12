"""Random experts on the GPU for `expert_kernels.py`, and the kernels at work on them.

Legend: E experts, k experts per row, R rows, T tiles.
"""

from functools import cached_property

import torch
from expert_kernel_cases import Shape
from torch import Tensor
from torch.nn import functional as F

from steerpipe.core.blocks import BlockForm
from steerpipe.kernels import reference_experts as reference
from steerpipe.kernels.configs import Launch
from steerpipe.kernels.experts import down_row, down_tiles, gate_up_row, gate_up_tiles, make_tiles
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import BlockLayout, plan_block

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
FEW_ROWS, PROMPT_ROWS = (2, 4, 8), 512
TilePair = tuple[Tensor, Tensor]  # tile_expert [T], tile_pairs [T, 16]


class Experts:
    """All experts of one layer, with random weights, and the work of one pass over all of them."""

    def __init__(self, shape: Shape, kind: str) -> None:
        self.shape = shape
        self.layout: BlockLayout = plan_block(ExpertFormat(kind), shape.hidden, shape.width)
        self.form: BlockForm = self.layout.form
        self.memory = _random_blocks(self.layout, shape.experts)  # [E, block bytes]
        self.table = torch.tensor([block.data_ptr() for block in self.memory], device=CUDA)
        self.x = torch.randn(PROMPT_ROWS, shape.hidden, device=CUDA).to(BF16)
        self.act = torch.empty(PROMPT_ROWS * shape.top_k, shape.width, dtype=BF16, device=CUDA)
        self.part = torch.empty(PROMPT_ROWS * shape.top_k, shape.hidden, device=CUDA)
        whole = shape.experts // shape.top_k * shape.top_k
        chosen = torch.randperm(shape.experts)[:whole].int().view(-1, shape.top_k)
        self.layers = list(chosen.to(CUDA))  # [k] each: no expert twice

    def bytes_of(self, kernel: str) -> int:
        """Of one expert."""
        wanted = "down" if kernel.endswith("down") else "gate_up"
        return sum(part.size_bytes for part in self.layout.parts if part.name.split(".")[0] == wanted)

    def run_row(self, kernel: str, experts: Tensor, launch: Launch, followed: bool = False) -> None:
        act, part = self.act[: len(experts)], self.part[: len(experts)]
        if kernel == "row_gate_up":
            gate_up_row(self.x[:1], experts, self.table, self.form, act=act, launch=launch, followed=followed)
        else:
            down_row(act, experts, self.table, self.form, part=part, launch=launch)

    def run_tiles(self, kernel: str, tiles: TilePair, launch: Launch) -> None:
        top_k, act, part = self.shape.top_k, self.act, self.part
        if kernel == "tile_gate_up":
            gate_up_tiles(self.x, *tiles, self.table, self.form, top_k=top_k, act=act, launch=launch)
        else:
            down_tiles(act, *tiles, self.table, self.form, part=part, launch=launch)

    def draw(self, rows: int) -> Tensor:
        """[R, k] int32: random experts."""
        return torch.rand(rows, self.shape.experts).topk(self.shape.top_k).indices.int().to(CUDA)

    @cached_property
    def row_truth(self) -> tuple[Tensor, Tensor]:
        return reference.expert_row(self.x[:1], self.layers[0], self._blocks, self.form)

    @cached_property
    def tile_truth(self) -> tuple[TilePair, Tensor, Tensor]:
        """Tiles of a few rows, and what they give."""
        experts = self.draw(FEW_ROWS[0])
        act, part = reference.expert_pairs(self.x[: len(experts)], experts, self._blocks, self.form)
        return self.tiles_of(experts), act, part

    @property
    def _blocks(self) -> dict[int, Tensor]:
        return dict(enumerate(self.memory))

    def tiles_of(self, experts: Tensor) -> TilePair:
        """tile_expert [T], tile_pairs [T, 16]: by kernel for up to 16 rows, else filled tiles by expert."""
        if len(experts) <= reference.TILE_ROWS:
            count = min(self.shape.experts, experts.numel())
            tile_expert = torch.empty(count, dtype=torch.int32, device=CUDA)
            tile_pairs = torch.empty(count, reference.TILE_ROWS, dtype=torch.int32, device=CUDA)
            make_tiles(experts, tile_expert=tile_expert, tile_pairs=tile_pairs)
            return tile_expert, tile_pairs
        chosen, pairs = experts.flatten().cpu(), []
        owners: list[int] = []
        for expert in chosen.unique().tolist():
            for strip in (chosen == expert).nonzero().flatten().int().split(reference.TILE_ROWS):
                owners.append(expert)
                pairs.append(F.pad(strip, (0, reference.TILE_ROWS - len(strip)), value=-1))
        return torch.tensor(owners, dtype=torch.int32, device=CUDA), torch.stack(pairs).to(CUDA)


def _random_blocks(layout: BlockLayout, count: int) -> Tensor:
    memory = torch.zeros(count, layout.block_bytes, dtype=torch.uint8, device=CUDA)
    for part in layout.parts:
        numbers = part.rows * part.columns
        for block in memory:
            place = block[part.offset : part.offset + part.size_bytes]
            if part.dtype == "float16":  # scales
                place.copy_((0.001 + 0.004 * torch.rand(numbers, device=CUDA)).half().view(torch.uint8))
            elif part.dtype == "bfloat16":
                place.copy_((0.03 * torch.randn(numbers, device=CUDA)).to(BF16).view(torch.uint8))
            else:
                place.random_(0, 256)
    return memory
