"""Pages that hold KV blocks or experts: their size, how many there are, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steerpipe.core.budget import ExpertFacts
from steerpipe.core.budget_shared import plan_shared_budget, plan_shared_cuda_budget
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import CapacityError, ConfigError
from steerpipe.core.pages import PageShape, page_shape, plan_pages
from steerpipe.core.resolve import resolve
from tests.core.test_resolve import LAPTOP, WORKSTATION

MIB = 2**20
FACTS = ExpertFacts(experts=100, slot_bytes=MIB, block_bytes=MIB // 2)


@pytest.mark.parametrize(
    ("block", "slot", "blocks", "slots"),
    [
        (2_359_296, 55_296, 1, 42),  # nano in bf16
        (25_165_824, 17_301_504, 2, 3),  # Qwen1.5-MoE-A2.7B
        (12_582_912, 9_437_184, 3, 4),  # Qwen3-30B-A3B
        (16_777_216, 352_321_536, 21, 1),  # Mixtral 8x7B
    ],
)
def test_a_page_holds_whole_blocks_and_whole_experts(block: int, slot: int, blocks: int, slots: int) -> None:
    assert page_shape(block, slot) == PageShape(blocks, slots, block, slot)


@given(st.integers(64, 10**9), st.integers(64, 10**9))
def test_whatever_a_page_holds_little_is_wasted(block: int, slot: int) -> None:
    shape = page_shape(block, slot)
    held = (shape.blocks * block, shape.slots * slot)
    assert max(held) == shape.page_bytes
    assert min(held) >= 0.95 * shape.page_bytes


def test_as_many_pages_as_fit_and_as_many_for_keys_and_values_as_their_blocks_need() -> None:
    plan = plan_pages(10 * 12 * MIB + 5, PageShape(3, 4, 4 * MIB, 3 * MIB), kv_blocks=7, experts=100)
    assert (plan.pages, plan.kv_pages, plan.slots, plan.total_bytes) == (10, 3, 40, 120 * MIB)


def test_keys_and_values_leave_enough_to_compute_a_layer_with() -> None:
    one_each = PageShape(1, 1, MIB, MIB)
    assert plan_pages(5 * MIB, one_each, kv_blocks=3, experts=100).pages == 5
    with pytest.raises(CapacityError, match="holds 4 pages of 1 MiB; keys and values may take 3, and experts need 2"):
        plan_pages(4 * MIB, one_each, kv_blocks=3, experts=100)


def test_there_are_no_more_pages_than_the_model_and_its_keys_and_values_fill() -> None:
    shape = PageShape(3, 4, 4 * MIB, 3 * MIB)
    assert plan_pages(10**6 * MIB, shape, kv_blocks=7, experts=41).pages == 3 + 11
    assert plan_pages(14 * 12 * MIB - 1, shape, kv_blocks=7, experts=41).pages == 13


@pytest.mark.parametrize("asked", [{"pace": "1GB"}, {"ram": "900MiB"}, {"fast_memory": "900MiB"}], ids=str)
def test_memory_that_nothing_can_fill_is_not_taken(asked: dict[str, str]) -> None:
    config = EngineConfig(kv_memory="shared", **asked)
    budget = plan_shared_budget(config, FACTS, kv_blocks=5, kv_block_bytes=MIB, free_bytes=1000 * MIB)
    assert budget.pages is not None and budget.pages.total_bytes == 105 * MIB


@pytest.mark.parametrize(("fast", "pages"), [("20MiB", 20), ("30%", 30)])
def test_the_fast_memory_is_for_both(fast: str, pages: int) -> None:
    config = EngineConfig(fast_memory=fast, kv_memory="shared")
    budget = plan_shared_budget(config, FACTS, kv_blocks=5, kv_block_bytes=MIB, free_bytes=1000 * MIB)
    assert budget.pages is not None and (budget.pages.pages, budget.slots) == (pages, pages)
    assert not budget.resident and budget.ram_bytes == 0


def test_where_everything_fits_nothing_is_shared() -> None:
    config = EngineConfig(kv_memory="shared")
    assert plan_shared_budget(config, FACTS, 8, MIB, free_bytes=121 * MIB).resident
    tight = plan_shared_budget(config, FACTS, 8, MIB, free_bytes=119 * MIB)
    assert tight.pages is not None and tight.pages.pages == 107  # a tenth is left free


def test_ram_holds_the_pages_and_what_lies_behind_them() -> None:
    config = EngineConfig(fast_memory="20MiB", ram="30MiB", kv_memory="shared")
    assert plan_shared_budget(config, FACTS, 5, MIB, free_bytes=1000 * MIB).ram_bytes == 10 * MIB
    alone = EngineConfig(ram="30MiB", kv_memory="shared")
    assert plan_shared_budget(alone, FACTS, 5, MIB, free_bytes=1000 * MIB).slots == 30
    with pytest.raises(ConfigError, match="ram is only 10MiB"):
        plan_shared_budget(EngineConfig(fast_memory="20MiB", ram="10MiB"), FACTS, 5, MIB, free_bytes=1000 * MIB)
    with pytest.raises(CapacityError, match="20 pages take 20 MiB"):
        plan_shared_budget(EngineConfig(fast_memory="20MiB"), FACTS, 5, MIB, free_bytes=19 * MIB)


def test_keys_and_values_may_take_half_of_the_fast_memory() -> None:
    shared = resolve(EngineConfig(fast_memory="200MiB", kv_memory="shared", max_context=1024), LAPTOP)
    assert shared.kv_memory_bytes <= 100 * MIB < shared.kv_memory_bytes + 128 * 40_000
    ample = resolve(EngineConfig(fast_memory="8GiB", kv_memory="shared", max_context=1024), LAPTOP)
    assert ample.kv_blocks == 8 * 8  # what eight sequences need


def test_on_a_gpu_the_card_holds_the_pages_and_ram_lies_behind_them() -> None:
    config = EngineConfig(fast_memory="20MiB", ram="30MiB", kv_memory="shared")
    budget = plan_shared_cuda_budget(config, FACTS, 5, MIB, free_bytes=2000 * MIB, free_ram_bytes=4000 * MIB)
    assert budget.pages is not None and (budget.pages.pages, budget.slots) == (20, 20)
    assert (budget.ram_bytes, budget.pinned_bytes, budget.resident) == (30 * MIB, 30 * MIB, False)
    with pytest.raises(CapacityError, match="20 pages take 20 MiB"):  # a step takes 1 GiB beside them
        plan_shared_cuda_budget(config, FACTS, 5, MIB, free_bytes=1044 * MIB, free_ram_bytes=4000 * MIB)
    least = EngineConfig(fast_memory="6MiB", kv_memory="shared")
    with pytest.raises(CapacityError, match="experts need 2"):
        plan_shared_cuda_budget(least, FACTS, 5, MIB, free_bytes=2000 * MIB, free_ram_bytes=4000 * MIB)


def test_where_everything_fits_on_the_card_nothing_is_shared() -> None:
    config = EngineConfig(kv_memory="shared")
    roomy = plan_shared_cuda_budget(config, FACTS, 8, MIB, free_bytes=1200 * MIB, free_ram_bytes=4000 * MIB)
    assert roomy.resident and roomy.pages is None
    tight = plan_shared_cuda_budget(config, FACTS, 8, MIB, free_bytes=1100 * MIB, free_ram_bytes=4000 * MIB)
    assert tight.pages is not None and tight.pages.pages == 1100 * 0.98 - 1025 and tight.pinned_bytes == 50 * MIB
    with pytest.raises(CapacityError, match="holds 0 pages"):
        plan_shared_cuda_budget(config, FACTS, 8, MIB, free_bytes=1000 * MIB, free_ram_bytes=4000 * MIB)


@pytest.mark.parametrize("kv_blocks", [8, 64])
def test_on_a_card_of_any_size_the_experts_are_resident_or_share(kv_blocks: int) -> None:
    config, resident = EngineConfig(kv_memory="shared"), []
    for free in range(1120 * MIB, 1320 * MIB, MIB):
        budget = plan_shared_cuda_budget(config, FACTS, kv_blocks, MIB, free_bytes=free, free_ram_bytes=4000 * MIB)
        assert budget.resident != (budget.pages is not None), f"{free // MIB} MiB free"
        resident.append(budget.resident)
    assert resident == sorted(resident) and {*resident} == {False, True}


def test_on_a_gpu_keys_and_values_take_half_of_the_packed_share() -> None:
    facts = replace(WORKSTATION, expert_block_bytes=4 << 30)
    shared = resolve(EngineConfig(fast_memory="10%", kv_memory="shared"), facts)
    assert shared.device == "cuda" and shared.kv_memory_bytes <= (4 << 30) // 20
