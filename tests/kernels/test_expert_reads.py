"""One row whose blocks are read where its router found them, and kept on the way: the same bits, the same bytes."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from steerpipe.kernels.experts import Reads, expert_row
from steerpipe.kernels.experts_blocks import count_missing, pair_of
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import BlockLayout, plan_block
from tests.kernels.expert_slots import Slots, fill_slots, poisoned

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")
PINNED = -(1 << 63)


def run(x: Tensor, experts: Tensor, slots: Slots, reads: Reads | None = None) -> tuple[Tensor, Tensor]:
    act, part = poisoned(len(experts), slots.form.width, dtype=x.dtype), poisoned(len(experts), slots.form.hidden)
    expert_row(x, experts, slots.table, slots.form, act=act, part=part, reads=reads)
    return act, part


def read_all(slots: Slots, experts: Tensor, x: Tensor, kept: Tensor) -> None:
    """Pair 0 is read and kept, pair 1 read and not kept, pair 2 is resident; the table is of no use."""
    wanted = run(x, experts, slots)
    entries = slots.table[experts.long()]
    origin = torch.where(torch.tensor([True, True, False]), entries | PINNED, entries)
    slots.table.fill_(1 << 40)
    found = run(x, experts, slots, Reads(origin, torch.tensor([kept.data_ptr(), 0, 0])))
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def assert_kept(kept: Tensor, block: Tensor, layout: BlockLayout) -> Tensor:
    """All parts of the block. Which bytes they are."""
    written = torch.zeros_like(kept, dtype=torch.bool)
    for part in layout.parts:
        own = slice(part.offset, part.offset + part.size_bytes)
        written[own] = True
        assert torch.equal(kept[own], block[own]), part.name
    return written


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("hidden", "width"), [(80, 48), (64, 16), pytest.param(256, 192, marks=pytest.mark.slow)]
)  # fmt: skip
def test_bits_do_not_depend_on_where_a_block_is_read_and_it_is_kept_whole(kind: str, hidden: int, width: int) -> None:
    slots = fill_slots(kind, hidden, width, 4)
    layout = plan_block(ExpertFormat(kind), hidden, width)
    kept = torch.full((layout.block_bytes + 64,), 0x55, dtype=torch.uint8)
    read_all(slots, torch.tensor([3, 0, 2], dtype=torch.int32), torch.randn(1, hidden), kept)
    written = assert_kept(kept, slots.blocks[3], layout)
    assert (kept[~written] == 0x55).all(), "something else was written"


@triton.jit
def _turns(origin, out, pairs: tl.constexpr):
    tl.store(out + tl.program_id(0), pair_of(tl.program_id(0), origin, count_missing(origin, pairs), pairs))


@pytest.mark.parametrize("pairs", [1, 4, 5, 33])
def test_missing_experts_come_first_and_every_one_has_a_turn(pairs: int) -> None:
    for bits in range(1 << pairs) if pairs < 33 else (5 << 30, 1 << 32):
        absent = [bool(bits >> pair & 1) for pair in range(pairs)]
        origin = torch.tensor([PINNED | 4096 if each else 4096 for each in absent])
        turns = torch.full((pairs,), -1, dtype=torch.int32)
        _turns[(pairs,)](origin, turns, pairs=pairs)
        assert turns.tolist() == sorted(range(pairs), key=lambda pair: not absent[pair]), absent


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
@pytest.mark.parametrize("missing", [(0,), (2,), (1, 2), (0, 2)])
def test_bits_do_not_depend_on_which_of_the_experts_are_missing(kind: str, missing: tuple[int, ...]) -> None:
    slots, experts, x = fill_slots(kind, 64, 16, 4), torch.tensor([3, 0, 2], dtype=torch.int32), torch.randn(1, 64)
    wanted = run(x, experts, slots)
    origin = slots.table[experts.long()].clone()
    origin[list(missing)] |= PINNED
    kept = [torch.zeros_like(slots.blocks[0]) for _ in experts]
    target = torch.tensor([each.data_ptr() if pair in missing else 0 for pair, each in enumerate(kept)])
    found = run(x, experts, slots, Reads(origin, target))
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    for pair in missing:
        assert_kept(kept[pair], slots.blocks[int(experts[pair])], plan_block(ExpertFormat(kind), 64, 16))


@pytest.mark.parametrize(("hidden", "width", "group"), [(96, 48, 24), (40, 20, 10), (48, 32, 2)])
def test_odd_groups_are_kept_too(hidden: int, width: int, group: int) -> None:
    slots = fill_slots("int4", hidden, width, 4, group=group)
    layout = plan_block(ExpertFormat.INT4, hidden, width, group)
    kept = torch.zeros(layout.block_bytes, dtype=torch.uint8)
    read_all(slots, torch.tensor([1, 0, 2], dtype=torch.int32), torch.randn(1, hidden), kept)
    assert_kept(kept, slots.blocks[1], layout)


def test_a_pair_without_an_expert_reads_and_keeps_nothing() -> None:
    slots = fill_slots("bfloat16", 64, 16, 2)
    kept = torch.full((slots.blocks[0].numel(),), 0x55, dtype=torch.uint8)
    reads = Reads(torch.tensor([0, int(slots.table[1])]), torch.tensor([kept.data_ptr(), 0]))
    act, part = run(torch.randn(1, 64), torch.tensor([-1, 1], dtype=torch.int32), slots, reads)
    assert act[0].isnan().all() and part[0].isnan().all() and not part[1].isnan().any()
    assert (kept == 0x55).all()
