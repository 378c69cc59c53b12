"""How much memory the experts get where there is a GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steerpipe.core.budget import ExpertFacts
from steerpipe.core.budget_cuda import plan_cuda_budget
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import CapacityError, ConfigError

MIB, GIB = 2**20, 2**30
LARGE = ExpertFacts(experts=6144, slot_bytes=9 * MIB, block_bytes=9 * MIB)  # 54 GiB: the Qwen3-30B shape in bf16
ALL = 6144 * 9 * MIB


def test_a_model_that_fits_on_the_card_lies_there_whole_and_takes_no_ram() -> None:
    budget = plan_cuda_budget(EngineConfig(), LARGE, 130 * GIB, 120 * GIB)
    assert budget.resident and budget.slots == 6144
    assert (budget.ram_bytes, budget.pinned_bytes) == (0, 0)


def test_auto_fills_the_card_with_a_margin() -> None:
    budget = plan_cuda_budget(EngineConfig(), LARGE, 24 * GIB, 120 * GIB)
    assert not budget.resident
    assert 0 <= 24 * GIB * 0.98 - GIB - (budget.slots + 1) * 9 * MIB < 9 * MIB


@pytest.mark.parametrize(("chunk", "room"), [(256, 4 * GIB + 9 * MIB + GIB), (8192, 4 * GIB + 9 * MIB + 2 * GIB)])
def test_what_is_asked_for_leaves_room_for_a_step_and_its_block_of_zeros(chunk: int, room: int) -> None:
    config = EngineConfig(fast_memory=str(4 * GIB // (9 * MIB) * 9 * MIB), prefill_chunk=chunk)
    taken = room - 4 * GIB + 4 * GIB // (9 * MIB) * 9 * MIB
    assert plan_cuda_budget(config, LARGE, taken, 0).slots == 4 * GIB // (9 * MIB)
    with pytest.raises(CapacityError, match="and a step"):
        plan_cuda_budget(config, LARGE, taken - 1, 0)


@pytest.mark.parametrize(("asked", "slots"), [("25%", 1536), ("4GiB", 4 * GIB // (9 * MIB)), ("0.05%", 3)])
def test_a_share_or_bytes_are_taken_as_given(asked: str, slots: int) -> None:
    assert plan_cuda_budget(EngineConfig(fast_memory=asked), LARGE, 24 * GIB, 120 * GIB).slots == slots


def test_slots_for_all_experts_are_resident_also_when_they_were_asked_for() -> None:
    assert plan_cuda_budget(EngineConfig(fast_memory="100%"), LARGE, 60 * GIB, 0).resident


def test_a_pace_needs_a_link_even_where_everything_fits() -> None:
    budget = plan_cuda_budget(EngineConfig(pace="3GB"), LARGE, 80 * GIB, 120 * GIB)
    assert not budget.resident and budget.slots == LARGE.experts and budget.pinned_bytes == ALL and budget.pace == 3e9


def test_without_more_words_everything_that_fits_lies_in_locked_memory() -> None:
    budget = plan_cuda_budget(EngineConfig(fast_memory="25%"), LARGE, 24 * GIB, 120 * GIB)
    assert budget.ram_bytes == budget.pinned_bytes == ALL
    assert budget.ram_reason == "all experts fit in RAM"
    tight = plan_cuda_budget(EngineConfig(fast_memory="25%"), LARGE, 24 * GIB, 32 * GIB)
    assert tight.ram_bytes == tight.pinned_bytes <= 32 * GIB * 0.85
    assert "free less 15%" in tight.ram_reason


@pytest.mark.parametrize(
    ("ram", "pin", "in_ram", "locked"),
    [
        ("9GiB", "auto", 1024, 1024),
        ("9GiB", "0", 1024, 0),
        ("9GiB", "4.5GiB", 1024, 512),
        ("10MiB", "0", 0, 0),  # one block is no tier
        (None, "9GiB", 6144, 1024),
        ("200GiB", "auto", 6144, 6144),
    ],
)
def test_ram_is_all_that_lies_behind_the_slots_and_pin_how_much_of_it_is_locked(
    ram: str | None, pin: str, in_ram: int, locked: int
) -> None:
    config = EngineConfig(fast_memory="25%", ram=ram, pin=pin)
    budget = plan_cuda_budget(config, LARGE, 24 * GIB, 120 * GIB)
    assert budget.ram_bytes == in_ram * 9 * MIB
    assert budget.pinned_bytes == locked * 9 * MIB


def test_locked_memory_that_was_asked_for_is_not_cut_by_the_margin() -> None:
    budget = plan_cuda_budget(EngineConfig(fast_memory="25%", pin="9GiB"), LARGE, 24 * GIB, 10 * GIB)
    assert budget.pinned_bytes == budget.ram_bytes == 9 * GIB


def test_errors_name_the_smallest_budget() -> None:
    with pytest.raises(ConfigError, match="holds 1 experts") as caught:
        plan_cuda_budget(EngineConfig(fast_memory="10MiB"), LARGE, 24 * GIB, 0)
    assert f"{18 * MIB:,} bytes" in caught.value.fix
    with pytest.raises(CapacityError, match="but the GPU has 1 GiB free") as full:
        plan_cuda_budget(EngineConfig(fast_memory="25%"), LARGE, GIB, 0)
    assert f"{18 * MIB:,} bytes" in full.value.fix
    with pytest.raises(CapacityError, match="two experts take 18 MiB"):
        plan_cuda_budget(EngineConfig(), LARGE, GIB, 0)


def test_more_locked_memory_than_there_is_is_an_error() -> None:
    with pytest.raises(ConfigError, match="pin is 2GiB, but ram is only 1GiB"):
        plan_cuda_budget(EngineConfig(fast_memory="25%", ram="1GiB", pin="2GiB"), LARGE, 24 * GIB, 120 * GIB)
    with pytest.raises(CapacityError, match="only 4 GiB of RAM are free"):
        plan_cuda_budget(EngineConfig(fast_memory="25%", pin="8GiB"), LARGE, 24 * GIB, 4 * GIB)


def test_a_model_without_experts_needs_no_budget() -> None:
    assert plan_cuda_budget(EngineConfig(fast_memory="25%"), ExpertFacts(0, 0, 0), 0, 0).slots == 0


@given(
    st.sampled_from(["auto", "1%", "25%", "100%", "1GiB"]),
    st.sampled_from([None, "10MiB", "4GiB", "100GiB"]),
    st.sampled_from(["auto", "0", "1GiB"]),
    st.integers(0, 140 * GIB),
    st.integers(0, 140 * GIB),
)
def test_no_budget_is_ever_exceeded(fast: str, ram: str | None, pin: str, card: int, free_ram: int) -> None:
    try:
        budget = plan_cuda_budget(EngineConfig(fast_memory=fast, ram=ram, pin=pin), LARGE, card, free_ram)
    except (ConfigError, CapacityError):
        return
    assert 2 <= budget.slots <= 6144 and budget.slots * 9 * MIB <= card
    assert 0 <= budget.pinned_bytes <= budget.ram_bytes <= ALL
    assert budget.pinned_bytes <= free_ram
    assert budget.resident == (budget.slots == 6144)
    if ram is None:
        assert budget.ram_bytes <= free_ram
    if pin != "auto":
        assert budget.pinned_bytes <= {"0": 0, "1GiB": GIB}[pin]
