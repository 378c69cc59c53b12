"""One row through its experts, against torch. Legend: H hidden, I width, k experts of the row."""

import pytest
import torch
from torch import Tensor

from steerpipe.kernels import reference_experts as reference
from steerpipe.kernels.configs import Launch
from steerpipe.kernels.experts import down_row, expert_row, gate_up_row
from steerpipe.store.blocks import decode, encode
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import plan_block
from tests.kernels.expert_slots import Slots, distance, fill_slots, poisoned

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")
NEAR = {"float32": 1e-6, "bfloat16": 1e-6, "float16": 1e-6, "int8": 1e-6, "int4": 5e-5}  # of float32 arithmetic
ROUNDED = 0.02  # the interpreter truncates to bfloat16


def run(x: Tensor, experts: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    act, part = poisoned(len(experts), slots.form.width, dtype=x.dtype), poisoned(len(experts), slots.form.hidden)
    expert_row(x, experts, slots.table, slots.form, act=act, part=part)
    return act, part


def ids(*experts: int) -> Tensor:
    return torch.tensor(experts, dtype=torch.int32)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_reference_reads_a_block_as_the_store_writes_it(kind: str) -> None:
    layout = plan_block(ExpertFormat(kind), 80, 48)
    block = encode(layout, torch.randn(48, 80), torch.randn(48, 80), torch.randn(80, 48), "an expert")
    gate_up, down = reference.decode_block(block, layout.form)
    wanted = decode(layout, block, torch.float32)
    assert torch.equal(gate_up, wanted.gate_up)
    assert torch.equal(down, wanted.down)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("hidden", "width"), [(80, 48), (64, 16)])
def test_every_pair_gets_what_the_reference_gives(kind: str, hidden: int, width: int) -> None:
    slots = fill_slots(kind, hidden, width, 4)
    x, experts = torch.randn(1, hidden), ids(3, 0, 2)
    act, part = run(x, experts, slots)
    wanted_act, wanted_part = reference.expert_row(x, experts, slots.blocks, slots.form)
    assert distance(act, wanted_act) < NEAR[kind]
    assert distance(part, wanted_part) < NEAR[kind]


@pytest.mark.parametrize("kind", FORMATS)
def test_activations_are_rounded_to_the_dtype_of_the_row(kind: str) -> None:
    slots = fill_slots(kind, 80, 48, 2)
    x, experts = torch.randn(1, 80).bfloat16(), ids(1)
    act, part = run(x, experts, slots)
    wanted_act, wanted_part = reference.expert_row(x, experts, slots.blocks, slots.form)
    assert act.dtype == torch.bfloat16
    assert distance(act, wanted_act) < ROUNDED
    assert distance(part, wanted_part) < ROUNDED


@pytest.mark.parametrize(("hidden", "width", "group"), [(96, 48, 24), (40, 20, 10), (128, 64, 64), (48, 32, 2)])
def test_any_even_group_of_int4_will_do(hidden: int, width: int, group: int) -> None:
    slots = fill_slots("int4", hidden, width, 2, group=group)
    x, experts = torch.randn(1, hidden), ids(0, 1)
    _, part = run(x, experts, slots)
    assert distance(part, reference.expert_row(x, experts, slots.blocks, slots.form)[1]) < NEAR["int4"]


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("launch", [Launch(rows=16, columns=32, warps=1), Launch(rows=32, columns=64, warps=4)])
def test_the_launch_changes_no_more_than_the_order_of_sums(kind: str, launch: Launch) -> None:
    """80 and 48 inputs in steps of 32 or 64: whole steps, a rest, and rows beyond the end."""
    slots = fill_slots(kind, 80, 48, 2)
    x, experts = torch.randn(1, 80), ids(1)
    act, part = poisoned(1, 48), poisoned(1, 80)
    gate_up_row(x, experts, slots.table, slots.form, act=act, launch=launch, followed=False)
    down_row(act, experts, slots.table, slots.form, part=part, launch=launch)
    assert distance(part, reference.expert_row(x, experts, slots.blocks, slots.form)[1]) < NEAR[kind]


def test_a_pair_without_an_expert_is_not_touched() -> None:
    slots = fill_slots("bfloat16", 64, 16, 2)
    act, part = run(torch.randn(1, 64), ids(1, -1, 0), slots)
    assert act[1].isnan().all()
    assert part[1].isnan().all()
    assert not part[[0, 2]].isnan().any()


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_a_pair_has_the_same_bits_in_any_place_and_from_any_slot(kind: str) -> None:
    slots = fill_slots(kind, 64, 16, 4)
    x = torch.randn(1, 64)
    _, first = run(x, ids(2, 1, 3), slots)
    moved = slots.blocks[2].clone()
    slots.table[2] = moved.data_ptr()
    slots.blocks[2].fill_(0xFF)
    _, second = run(x, ids(-1, 2), slots)
    assert torch.equal(first[0], second[1])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # which is the point
def test_large_gates_saturate_without_a_nan() -> None:
    slots = fill_slots("float32", 64, 16, 1)
    act, _ = run(1e4 * torch.randn(1, 64), ids(0), slots)
    assert torch.isfinite(act).all()
