"""How much memory the experts get."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steerpipe.core.budget import ExpertFacts, plan_budget
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import CapacityError, ConfigError
from steerpipe.core.geometry import SMALLEST_SLOTS

MIB = 2**20
NANO = ExpertFacts(experts=1440, slot_bytes=110_592, block_bytes=16_384)
LARGE = ExpertFacts(experts=6144, slot_bytes=9 * MIB, block_bytes=9 * MIB)


def test_a_model_that_fits_is_held_whole() -> None:
    budget = plan_budget(EngineConfig(), NANO, free_bytes=1000 * MIB)
    assert budget.resident and budget.slots == 1440


def test_a_model_that_does_not_fit_gets_what_is_free_less_a_margin() -> None:
    budget = plan_budget(EngineConfig(), LARGE, free_bytes=10_000 * MIB)
    assert not budget.resident
    assert budget.slots == 1000


def test_a_share_is_a_share_of_all_experts() -> None:
    budget = plan_budget(EngineConfig(fast_memory="25%"), NANO, free_bytes=1000 * MIB)
    assert (budget.slots, budget.resident, budget.ram_bytes) == (360, False, 0)


def test_bytes_are_bytes_of_slots() -> None:
    assert plan_budget(EngineConfig(fast_memory="100MiB"), NANO, free_bytes=1000 * MIB).slots == 100 * MIB // 110_592


def test_a_share_below_two_experts_is_an_error_that_names_the_smallest() -> None:
    assert plan_budget(EngineConfig(fast_memory="0.14%"), NANO, free_bytes=1000 * MIB).slots == SMALLEST_SLOTS
    with pytest.raises(ConfigError, match="holds 1 experts") as caught:
        plan_budget(EngineConfig(fast_memory="0.1%"), NANO, free_bytes=1000 * MIB)
    assert "221,184 bytes" in caught.value.fix


def test_what_was_asked_for_and_is_not_free_is_an_error_before_anything_is_taken() -> None:
    with pytest.raises(CapacityError, match=r"1440 experts take 152 MiB, but 100 MiB of memory are free"):
        plan_budget(EngineConfig(fast_memory="100%"), NANO, free_bytes=100 * MIB)
    with pytest.raises(CapacityError, match=r"and 22.5 MiB of raw blocks behind them"):
        plan_budget(EngineConfig(fast_memory="25%", ram="1GiB"), NANO, free_bytes=50 * MIB)
    with pytest.raises(CapacityError, match="lower fast_memory or ram"):
        plan_budget(EngineConfig(ram="64GiB"), LARGE, free_bytes=8192 * MIB)


def test_a_budget_below_two_experts_is_an_error_that_names_the_smallest() -> None:
    with pytest.raises(ConfigError, match="holds 1 experts") as caught:
        plan_budget(EngineConfig(fast_memory="150kB"), NANO, free_bytes=1000 * MIB)
    assert "221,184 bytes" in caught.value.fix
    with pytest.raises(ConfigError, match="holds 0 experts"):
        plan_budget(EngineConfig(ram="1MiB"), LARGE, free_bytes=1000 * MIB)


def test_no_memory_at_all_is_an_error_that_says_how_much_is_needed() -> None:
    with pytest.raises(CapacityError, match="two experts take 18 MiB"):
        plan_budget(EngineConfig(), LARGE, free_bytes=9 * MIB)


def test_ram_alone_is_all_slots_and_ram_beyond_the_slots_holds_blocks() -> None:
    assert plan_budget(EngineConfig(ram="512MiB"), LARGE, free_bytes=1000 * MIB).slots == 512 // 9
    both = plan_budget(EngineConfig(fast_memory="25%", ram="60MiB"), NANO, free_bytes=1000 * MIB)
    assert both.slots == 360
    assert both.ram_bytes == (60 * MIB - 360 * 110_592) // 16_384 * 16_384
    plenty = plan_budget(EngineConfig(fast_memory="25%", ram="1GiB"), NANO, free_bytes=1000 * MIB)
    assert plenty.ram_bytes == 1440 * 16_384


def test_a_rest_of_the_ram_that_holds_one_block_is_left_free() -> None:
    slots = 360 * 110_592
    assert (
        plan_budget(EngineConfig(fast_memory="25%", ram=f"{slots + 16_384}"), NANO, free_bytes=1000 * MIB).ram_bytes
        == 0
    )
    assert (
        plan_budget(EngineConfig(fast_memory="25%", ram=f"{slots + 32_768}"), NANO, free_bytes=1000 * MIB).ram_bytes
        == 32_768
    )


def test_slots_that_do_not_fit_the_ram_are_an_error() -> None:
    with pytest.raises(ConfigError, match="but ram is only 16 MiB"):
        plan_budget(EngineConfig(fast_memory="25%", ram="16MiB"), NANO, free_bytes=1000 * MIB)


def test_a_pace_needs_a_ladder_even_where_everything_fits() -> None:
    budget = plan_budget(EngineConfig(pace="2GB"), NANO, free_bytes=1000 * MIB)
    assert not budget.resident and budget.slots == 1440 and budget.pace == 2e9


def test_a_model_without_experts_needs_no_budget() -> None:
    assert plan_budget(EngineConfig(fast_memory="25%"), ExpertFacts(0, 0, 0), free_bytes=0).slots == 0


@given(
    st.sampled_from(["auto", "1%", "12.5%", "25%", "100%", "1MiB", "2GiB"]),
    st.sampled_from([None, "1MiB", "300MiB", "4GiB"]),
    st.integers(0, 64 * 2**30),
    st.sampled_from([NANO, LARGE]),
)
def test_a_budget_is_never_exceeded(fast: str, ram: str | None, free: int, facts: ExpertFacts) -> None:
    try:
        budget = plan_budget(EngineConfig(fast_memory=fast, ram=ram), facts, free)
    except (ConfigError, CapacityError):
        return
    assert SMALLEST_SLOTS <= budget.slots <= facts.experts
    assert budget.slots * facts.slot_bytes + budget.ram_bytes <= free
    if ram is not None:
        allowed = {"1MiB": MIB, "300MiB": 300 * MIB, "4GiB": 4096 * MIB}[ram]
        assert budget.slots * facts.slot_bytes + budget.ram_bytes <= allowed
