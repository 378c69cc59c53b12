"""The arithmetic of covering transfers, against figures worked out by hand."""

import pytest

from steerpipe.runtime.planner import (
    Geometry,
    Link,
    block_seconds,
    cover,
    distinct_experts,
    expected_hits,
    prompt_floor,
    shared_seconds,
    token_floors,
)

QWEN15 = Geometry(
    layers=24, experts=60, top_k=4, block_bytes=17_301_504, slot_bytes=17_301_504, dense_bytes=2_000_000_000
)


@pytest.mark.parametrize(
    ("block_bytes", "gb_per_second", "tokens_per_second", "milliseconds", "tokens", "least", "most"),
    [
        (2 * 10**9, 31.5, 30.0, "63.5", "1.9", 2, 3),  # the first seed's three tiers
        (2 * 10**9, 28.6, 30.0, "69.9", "2.1", 2, 3),
        (2 * 10**9, 7.0, 30.0, "285.7", "8.6", 9, 10),
        (17_301_504, 55.0, 1.5, "0.3", "0.0", 0, 1),  # one bf16 expert of Qwen1.5-MoE over PCIe 5, real typing
        (24_914_165_760, 2.8, 1.5, "8897.9", "13.3", 13, 14),  # all 1,440 of them from a disk
    ],
)
def test_a_block_takes_its_bytes_over_the_rate_and_so_many_tokens(
    block_bytes: int,
    gb_per_second: float,
    tokens_per_second: float,
    milliseconds: str,
    tokens: str,
    least: int,
    most: int,
) -> None:
    found = cover(block_bytes, Link("link", gb_per_second * 1e9), tokens_per_second)
    assert (f"{found.seconds * 1e3:.1f}", f"{found.tokens:.1f}") == (milliseconds, tokens)
    assert (found.least, found.most) == (least, most)


def test_expected_hits_go_through_the_recorded_points_and_never_fall() -> None:
    assert [expected_hits(share) for share in (0.0, 0.125, 0.25, 0.5, 1.0)] == [0.0, 0.339, 0.527, 0.782, 1.0]
    assert expected_hits(0.1875) == pytest.approx((0.339 + 0.527) / 2)
    curve = [expected_hits(percent / 100) for percent in range(101)]
    assert curve == sorted(curve)


def test_a_missing_block_comes_from_where_it_may_lie() -> None:
    links = [Link("RAM", 10e9, 0.75), Link("disk", 2e9, 0.25)]
    assert block_seconds(10**9, links) == pytest.approx(0.75 * 0.1 + 0.25 * 0.5)
    assert block_seconds(10**9, []) == 0.0


def test_floors_of_a_token_add_up_on_demand_and_overlap_at_best() -> None:
    link = [Link("page-locked RAM", 25e9)]
    floors = token_floors(QWEN15, 0.25, 1000e9, link)
    resident, recorded, chance, none = floors
    compute = (2e9 + 96 * 17_301_504) / 1000e9
    copies = 96 * 17_301_504 / 25e9
    assert resident.demand_seconds == resident.hidden_seconds == pytest.approx(compute)
    assert none.demand_seconds == pytest.approx(compute + copies) and none.hidden_seconds == pytest.approx(copies)
    assert chance.demand_seconds == pytest.approx(compute + 0.75 * copies)
    assert recorded.hit_rate == 0.527 and recorded.demand_seconds == pytest.approx(compute + (1 - 0.527) * copies)
    slow = token_floors(QWEN15, 0.25, 1e9, link)[1]
    assert slow.hidden_seconds == pytest.approx(1000 * compute)  # compute is the longer of the two there


def test_a_cpu_takes_what_lies_in_ram_off_the_link_until_both_end_at_once() -> None:
    ram, disk = Link("RAM", 10e9, 0.5), Link("disk", 2e9, 0.5)
    quick = Link("RAM", 30e9)
    assert shared_seconds(10**9, [Link("RAM", 10e9)], Link("RAM", 10e9)) == pytest.approx(0.1 / 2)
    assert shared_seconds(10**9, [Link("RAM", 10e9)], quick) == pytest.approx(0.1 / 4)
    assert shared_seconds(10**9, [disk], quick) == block_seconds(10**9, [disk])
    assert shared_seconds(10**9, [ram, disk], Link("RAM", 1e15)) == pytest.approx(0.5 * 0.5)  # the disk's is left
    assert shared_seconds(10**9, [], quick) == 0.0
    assert shared_seconds(10**9, [ram], Link("page-locked RAM", 1e15)) == block_seconds(10**9, [ram])


def test_floors_with_a_cpu_lie_between_waiting_and_computing() -> None:
    link = [Link("page-locked RAM", 25e9)]
    assert all(floor.shared_seconds is None for floor in token_floors(QWEN15, 0.25, 1000e9, link))
    for floor in token_floors(QWEN15, 0.25, 1000e9, link, *link):
        compute = (2e9 + 96 * 17_301_504) / 1000e9
        assert floor.shared_seconds == pytest.approx((floor.demand_seconds + compute) / 2)


def test_a_resident_model_has_one_floor() -> None:
    assert [floor.hit_rate for floor in token_floors(QWEN15, 1.0, 1e12, [])] == [1.0]


def test_a_prompt_touches_nearly_every_expert_once() -> None:
    assert distinct_experts(QWEN15, 1) == pytest.approx(4.0)
    assert distinct_experts(QWEN15, 2) == pytest.approx(4 + 4 * 56 / 60)
    assert 59 < distinct_experts(QWEN15, 64) < 60
    floor = prompt_floor(QWEN15, 1, 0.5, 1000e9, [Link("disk", 2e9)])
    compute, copies = (2e9 + 96 * 17_301_504) / 1000e9, 96 * 0.5 * 17_301_504 / 2e9
    assert floor.demand_seconds == pytest.approx(compute + copies) and floor.hidden_seconds == pytest.approx(copies)
