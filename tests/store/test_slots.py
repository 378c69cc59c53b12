"""The slot arena: one allocation, aligned, and every slot fits every layout."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from steerpipe.core.errors import CapacityError
from steerpipe.core.protocols import ExpertWeights
from steerpipe.store import blocks
from steerpipe.store import slots as slots_module
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.layout import plan_block
from steerpipe.store.quant import dequantise_int4_small
from steerpipe.store.resident import ALIGNMENT_BYTES
from steerpipe.store.slots import SlotArena, slot_bytes

CPU = torch.device("cpu")
SMALL, LARGE = plan_block(ExpertFormat.INT8, 48, 24), plan_block(ExpertFormat.INT8, 50, 34)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_lie_side_by_side_in_one_allocation_on_cache_lines(dtype: torch.dtype) -> None:
    arena = SlotArena([SMALL, LARGE], 5, dtype, CPU)
    assert arena.total_bytes == 5 * slot_bytes([SMALL, LARGE], dtype)
    storages = set()
    for layout in (SMALL, LARGE):
        for slot in range(5):
            weights = arena.weights(slot, layout)
            assert weights.gate_up.shape == (2 * layout.width, layout.hidden)
            assert weights.down.shape == (layout.hidden, layout.width)
            for matrix in (weights.gate_up, weights.down):
                assert matrix.dtype == dtype
                assert matrix.is_contiguous()
                assert matrix.data_ptr() % ALIGNMENT_BYTES == 0
                assert matrix.untyped_storage().nbytes() == arena.total_bytes
                storages.add(matrix.untyped_storage().data_ptr())
    assert len(storages) == 1


def test_views_are_made_once() -> None:
    arena = SlotArena([SMALL], 3, torch.float32, CPU)
    assert arena.weights(1, SMALL) is arena.weights(1, SMALL)


def test_slots_do_not_overlap() -> None:
    arena = SlotArena([SMALL, LARGE], 3, torch.bfloat16, CPU)
    for slot, layout in itertools.product(range(3), (SMALL, LARGE)):
        for other in range(3):
            arena.weights(other, LARGE).gate_up.fill_(other)
            arena.weights(other, LARGE).down.fill_(other)
        arena.weights(slot, layout).gate_up.fill_(9)
        arena.weights(slot, layout).down.fill_(9)
        for other in set(range(3)) - {slot}:
            weights = arena.weights(other, LARGE)
            assert bool((weights.gate_up == other).all() and (weights.down == other).all())


def test_a_slot_is_as_large_as_the_largest_expert_and_no_larger() -> None:
    assert slot_bytes([SMALL], torch.float32) == 3 * 48 * 24 * 4
    assert slot_bytes([SMALL, LARGE], torch.bfloat16) == 2 * 50 * 34 * 2 + 48 + 50 * 34 * 2 + 56  # to cache lines


def test_memory_that_cannot_be_had_is_a_capacity_error_with_the_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(slots_module.torch, "empty", refuse)
    with pytest.raises(CapacityError, match="27 KiB of expert slots on cpu"):
        SlotArena([SMALL], 2, torch.float32, CPU)


@pytest.mark.parametrize("form", [ExpertFormat.INT8, ExpertFormat.INT4])
@pytest.mark.parametrize("strip_weights", [1, 48, 500])
def test_decoding_into_a_slot_by_strips_gives_the_same_bits(
    form: ExpertFormat, strip_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = plan_block(form, 48, 24)
    generator = torch.Generator().manual_seed(1)
    gate, up, down = (torch.randn(shape, generator=generator) for shape in ((24, 48), (24, 48), (48, 24)))
    block = blocks.encode(layout, gate, up, down, name="an expert")
    whole = blocks.decode(layout, block, torch.bfloat16)
    monkeypatch.setattr(blocks, "STRIP_WEIGHTS", strip_weights)
    slot = SlotArena([layout], 1, torch.bfloat16, CPU).weights(0, layout)
    assert blocks.decode(layout, block, torch.bfloat16, slot) is slot
    assert torch.equal(slot.gate_up, whole.gate_up)
    assert torch.equal(slot.down, whole.down)


@pytest.mark.parametrize(("hidden", "width", "group"), [(48, 24, None), (192, 48, None), (64, 32, 8), (30, 14, 2)])
def test_small_blocks_are_decoded_by_numpy_to_the_bits_that_torch_gives(
    hidden: int, width: int, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = plan_block(ExpertFormat.INT4, hidden, width, group)
    generator = torch.Generator().manual_seed(2)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    gate, up, down = (torch.randn(shape, generator=generator) for shape in shapes)
    block = blocks.encode(layout, gate, up, down, name="an expert")
    slot = SlotArena([layout], 1, torch.float32, CPU).weights(0, layout)
    with monkeypatch.context() as patch:
        patch.delattr(blocks, "_decode_matrix")  # torch has no part in it
        blocks.decode(layout, block, torch.float32, slot)
    wanted = blocks.decode(layout, block, torch.float32)
    assert torch.equal(slot.gate_up, wanted.gate_up)
    assert torch.equal(slot.down, wanted.down)


@pytest.mark.parametrize(
    "other", [torch.empty(1, dtype=torch.bfloat16), torch.empty(1, device="meta")], ids=["bf16", "elsewhere"]
)
@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_numpy_decodes_only_what_is_float32_on_the_cpu_in_both_parts(other: torch.Tensor, part: str) -> None:
    layout = plan_block(ExpertFormat.INT4, 64, 48)
    block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
    slot = ExpertWeights(torch.empty(96, 64), torch.empty(64, 48))
    assert blocks._is_small(layout, block, slot)
    assert not blocks._is_small(layout, block, replace(slot, **{part: other}))


def test_small_weights_are_not_decoded_into_a_view_with_gaps() -> None:
    codes, scales = np.full((4, 16), 0x99, np.uint8), np.ones((4, 2), np.float16)
    whole = np.zeros((4, 64), np.float32)
    with pytest.raises(AssertionError, match="a copy"):
        dequantise_int4_small(codes, scales, whole[:, :32])
    dequantise_int4_small(codes, scales, whole[:2])
    assert (whole[:2] == 1).all()
