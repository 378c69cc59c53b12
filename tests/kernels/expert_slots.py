"""Random experts in scattered slots, as a device holds them. Import it only where Triton may be imported."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steerpipe.core.blocks import BlockForm
from steerpipe.store.blocks import TORCH_DTYPES
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import Part, plan_block


@dataclass(frozen=True)
class Slots:
    """Every second slot is in use, in an order that is not that of the experts; the others are full of 0xFF (NaN)."""

    form: BlockForm
    blocks: dict[int, Tensor]  # expert → its block, a view of the slot
    table: Tensor  # [E] int64


def fill_slots(
    kind: str, hidden: int, width: int, experts: int, *, group: int | None = None, device: str = "cpu", seed: int = 0
) -> Slots:
    """Weights are about 1 / sqrt(inputs), whatever the format."""
    layout = plan_block(ExpertFormat(kind), hidden, width, group)
    random = torch.Generator(device).manual_seed(seed)
    memory = torch.full((2 * experts, layout.block_bytes), 0xFF, dtype=torch.uint8, device=device)
    slots = (2 * torch.randperm(experts, generator=random, device=device)).tolist()
    for slot in slots:
        for part in layout.parts:
            place = memory[slot, part.offset : part.offset + part.size_bytes]
            place.copy_(_draw(part, width if part.name.startswith("down") else hidden, kind, random))
    blocks = {expert: memory[slot] for expert, slot in enumerate(slots)}
    table = torch.tensor([block.data_ptr() for block in blocks.values()], device=device)
    return Slots(layout.form, blocks, table)


def _draw(part: Part, inputs: int, kind: str, random: torch.Generator) -> Tensor:
    """The bytes of a part."""
    shape = (part.rows * part.columns,)
    if part.dtype == "int4":
        return torch.randint(0, 256, (part.size_bytes,), generator=random, device=random.device, dtype=torch.uint8)
    if part.dtype == "int8":
        codes = torch.randint(-127, 128, shape, generator=random, device=random.device)
        return codes.to(torch.int8).view(torch.uint8)
    size = inputs**-0.5
    if part.name.endswith(".scale"):  # a random code is about 73 or 4.6
        size /= 73 if kind == "int8" else 4.6
    numbers = size * torch.randn(shape, generator=random, device=random.device)
    return numbers.to(TORCH_DTYPES[part.dtype]).view(torch.uint8)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def distance(got: Tensor, wanted: Tensor) -> float:
    """Relative norm of the difference; NaN where anything is NaN."""
    got, wanted = got.double(), wanted.double()
    return float((got - wanted).norm() / wanted.norm())
