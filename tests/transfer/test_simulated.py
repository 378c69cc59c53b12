"""The simulated machine: its time is the arithmetic of the links, and its guesses cost only what is idle.

Tc: compute of a layer; Tx: one block over the link; Tm: what a layer has to move.
"""

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from steerpipe.core.errors import ConfigError
from steerpipe.transfer.forecasts import PerfectPredictor, RecallPredictor
from steerpipe.transfer.machine import Decoding, Disk, Machine, slots_of_share
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.replay import Keep, replay
from steerpipe.transfer.synthetic import SyntheticRouting
from tests.transfer.simulating import BLOCK, AlwaysSeven, machine, one_text, recording, total_seconds

SMALL = draw_recording(SyntheticRouting(tokens=60, layers=6, experts=16, top_k=4, sequence_tokens=20))
STEPS = SMALL.tokens * SMALL.layers


@pytest.mark.parametrize(("tc", "tx", "latency"), [(0.5, 1.0, 0.0), (3.0, 0.1, 0.25), (0.0, 1.0, 0.5)])
def test_without_a_cache_every_layer_costs_its_compute_and_its_blocks(tc: float, tx: float, latency: float) -> None:
    report = replay(SMALL, machine(tc=tc, tx=tx, latency_seconds=latency), keep=Keep.NOTHING)
    assert report.tpot_mean_seconds == pytest.approx(SMALL.layers * (tc + 4 * (tx + latency)), rel=1e-9)
    assert report.stall_seconds_per_token == pytest.approx(SMALL.layers * 4 * (tx + latency), rel=1e-9)
    assert (report.hits, report.late, report.misses) == (0, 0, STEPS * 4)
    assert report.demand_bytes_per_token == SMALL.layers * 4 * BLOCK


def test_with_everything_resident_only_compute_is_left() -> None:
    report = replay(SMALL, machine(tc=0.5, expert_seconds=0.25), keep=Keep.ALL)
    assert report.tpot_mean_seconds == pytest.approx(SMALL.layers * (0.5 + 4 * 0.25), rel=1e-9)
    assert report.hit_rate == 1.0
    assert (report.stall_seconds_per_token, report.demand_bytes_per_token) == (pytest.approx(0.0, abs=1e-9), 0.0)


@pytest.mark.parametrize(("tc", "tx"), [(0.5, 1.0), (4.0, 1.0), (8.0, 1.0)])
def test_a_perfect_guess_hides_the_smaller_of_compute_and_link(tc: float, tx: float) -> None:
    source = one_text(SMALL)
    spent = total_seconds(
        source, machine(tc=tc, tx=tx), keep=Keep.NOTHING, predictor=PerfectPredictor(SMALL.routing, 1)
    )
    assert spent == pytest.approx(STEPS * max(tc, 4 * tx) + min(tc, 4 * tx), rel=1e-9)  # the pipeline fills once


def test_every_text_fills_the_pipeline_anew() -> None:
    spent = total_seconds(SMALL, machine(), keep=Keep.NOTHING, predictor=PerfectPredictor(SMALL.routing, 1))
    assert spent == pytest.approx(STEPS * 4.0 + 3 * 0.5, rel=1e-9)  # three texts of 20 tokens


@pytest.mark.parametrize("expert_seconds", [0.25, 1.0])
def test_an_expert_is_computed_while_the_next_one_moves(expert_seconds: float) -> None:
    source = recording([[[0, 1, 2, 3]]])
    spent = total_seconds(source, machine(expert_seconds=expert_seconds), keep=Keep.NOTHING)
    assert spent == pytest.approx(0.5 + 4 * 1.0 + expert_seconds)


def test_what_is_there_is_computed_while_the_rest_moves() -> None:
    source = recording(
        [
            [[0, 1]],
            [
                [
                    0,
                    1,
                ]
            ],
            [[0, 2]],
        ]
    )
    report = replay(source, machine(expert_seconds=1.0), "lru", warmup_tokens=2)
    assert report.tpot_mean_seconds == pytest.approx(0.5 + 1.0 + 1.0)  # 0 is computed in the shadow of 2


@pytest.mark.parametrize("policy", ["lru", "lfru", "forecast", "belady"])
def test_two_slots_are_enough_for_any_layer(policy: str) -> None:
    source = recording([[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3)
    report = replay(source, machine(slots=2), policy)
    assert report.hits + report.misses == 3 * 2 * 4
    assert report.tpot_mean_seconds <= 2 * (0.5 + 4 * 1.0) + 1e-9


def test_a_cache_saves_the_blocks_that_it_hits() -> None:
    report = replay(SMALL, machine(), "lfru")
    assert report.hits > 0
    assert report.hits + report.misses == STEPS * 4
    assert report.demand_bytes_per_token * SMALL.tokens == pytest.approx(report.misses * BLOCK)
    assert report.tpot_mean_seconds * SMALL.tokens == pytest.approx(STEPS * 0.5 + report.misses * 1.0)
    assert report.evictions == report.misses - 24
    assert report.link_utilisation == pytest.approx(report.misses / (STEPS * 0.5 + report.misses))


def test_a_late_guess_is_continued_and_no_byte_moves_twice() -> None:
    source = recording([[[0], [1]]])
    report = replay(source, machine(tc=0.5, tx=1.0), "lru", predictor=PerfectPredictor(source.routing, 1))
    assert (report.misses, report.late, report.hits) == (1, 1, 0)
    assert (report.demand_bytes_per_token, report.guess_bytes_per_token) == (BLOCK + BLOCK // 2, BLOCK // 2)
    assert report.tpot_mean_seconds == pytest.approx(0.5 + 1.0 + 1.0)  # the second block began when the first was there


def test_a_continued_guess_pays_the_latency_once() -> None:
    source = recording([[[0], [1]]])
    figures = machine(tc=0.5, tx=1.0, latency_seconds=0.25)
    report = replay(source, figures, "lru", predictor=PerfectPredictor(source.routing, 1))
    assert report.tpot_mean_seconds == pytest.approx(0.5 + 1.25 + 1.25)


def test_guesses_of_layers_further_ahead_use_the_time_that_is_left() -> None:
    source = recording([[[0], [1], [2], [3]]])
    times = {
        horizon: replay(source, machine(tc=2.0), "lru", predictor=PerfectPredictor(source.routing, horizon))
        for horizon in (1, 3)
    }
    assert times[1].link_utilisation == pytest.approx(times[3].link_utilisation) == 4 / 9
    assert times[3].guesses_used == times[1].guesses_used == 3
    assert times[3].tpot_mean_seconds == pytest.approx(4 * 2.0 + 1.0)


def test_a_wrong_guess_is_cut_at_the_next_chunk() -> None:
    source = recording([[[0], [1]], [[2], [3]]])
    without = replay(source, machine(tc=0.25), "lru")
    report = replay(source, machine(tc=0.25), "lru", predictor=AlwaysSeven())
    assert report.guesses_used == 0
    assert report.guesses_sent == 3
    assert report.guess_bytes_per_token * 2 == 3 * 300  # .25 s of a link that moves 100 bytes in .1 s
    assert report.tpot_mean_seconds - without.tpot_mean_seconds == pytest.approx(3 * 0.05 / 2)  # the rest of a chunk


@pytest.mark.parametrize("slots", [24, 48])
@pytest.mark.parametrize("tc", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("policy", ["lru", "lfru"])
def test_a_predictor_that_is_always_wrong_costs_no_more_than_a_chunk_per_layer(
    policy: str, tc: float, slots: int
) -> None:
    figures = machine(slots=slots, tc=tc, chunk_bytes=BLOCK // 50)
    wrong = RecallPredictor(SMALL.routing, SMALL.experts, [0.0, 0.0], seed=1)
    without, report = replay(SMALL, figures, policy), replay(SMALL, figures, policy, predictor=wrong)
    # wrong guesses hold up to six slots: beside the chunks they may cost what a cache of so much less would
    smaller = replay(SMALL, machine(slots=slots - 6, tc=tc), policy)
    worst = max(without.tpot_mean_seconds, smaller.tpot_mean_seconds) + SMALL.layers / 50
    assert report.tpot_mean_seconds <= worst


def test_a_wrong_guess_without_a_cache_costs_at_most_a_chunk_per_layer() -> None:
    wrong = RecallPredictor(SMALL.routing, SMALL.experts, [0.0], seed=1)
    without = replay(SMALL, machine(), keep=Keep.NOTHING)
    report = replay(SMALL, machine(), keep=Keep.NOTHING, predictor=wrong)
    assert report.tpot_mean_seconds <= without.tpot_mean_seconds + SMALL.layers * 0.1


def test_better_recall_is_never_slower_by_more_than_a_percent() -> None:
    spent = [
        replay(SMALL, machine(), "lfru", predictor=RecallPredictor(SMALL.routing, 16, [recall])).tpot_mean_seconds
        for recall in (0.0, 0.5, 0.8, 1.0)
    ]
    assert all(later <= earlier * 1.01 for earlier, later in pairwise(spent))
    assert spent[-1] < replay(SMALL, machine(), "lfru").tpot_mean_seconds


def test_guesses_stop_at_the_end_of_a_text() -> None:
    rows = [[[0]], [[1]]]
    joined, apart = recording(rows), recording(rows, sequence=[0, 1])
    sent = [replay(r, machine(), predictor=PerfectPredictor(r.routing, 1)).guesses_sent for r in (joined, apart)]
    assert sent == [1, 0]


def test_what_is_expected_soon_is_not_evicted() -> None:
    source = recording([[[0]], [[1]], [[2]], [[0]]])
    report = replay(source, machine(slots=2, tc=0.0), "lru", predictor=PerfectPredictor(source.routing, 3))
    assert report.hits == 1  # 0 stays, though LRU alone would have evicted it for 2


def test_a_forecast_aware_cache_hears_of_the_forecast() -> None:
    source = one_text(draw_recording(SyntheticRouting(tokens=150, layers=4, experts=16, top_k=2)))
    far = PerfectPredictor(source.routing, 24)  # six tokens ahead
    figures = machine(slots=16, tc=0.0)
    told, untold = (replay(source, figures, name, predictor=far) for name in ("forecast", "lfru"))
    assert told.hit_rate > untold.hit_rate


def test_a_block_that_is_on_disk_only_goes_through_ram() -> None:
    source = recording([[[0, 1, 2]]])
    report = replay(source, machine(disk=Disk(BLOCK / 2.0, ram_slots=8, latency_seconds=0.5)), "lru")
    assert report.tpot_mean_seconds == pytest.approx(0.5 + 3 * 2.5 + 1.0)  # the link works behind the disk
    assert report.disk_bytes_per_token == report.demand_bytes_per_token == 3 * BLOCK


def test_what_lies_in_ram_is_not_read_again() -> None:
    source = recording([[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]]])
    report = replay(source, machine(slots=2, disk=Disk(BLOCK / 2.0, ram_slots=4)), "lru")
    assert report.misses == 8
    assert report.disk_bytes_per_token * 4 == 4 * BLOCK
    assert report.tpot_p95_seconds > 0.5 + 2 * 2.0 > report.tpot_median_seconds >= 0.5 + 2 * 1.0


def test_the_warm_up_is_left_out_of_every_figure() -> None:
    source = recording([[[0, 1]], [[0, 1]], [[0, 1]]])
    report = replay(source, machine(), warmup_tokens=1)
    assert (report.tokens, report.hits, report.misses, report.evictions) == (2, 4, 0, 0)
    assert (report.tpot_mean_seconds, report.demand_bytes_per_token, report.link_utilisation) == (0.5, 0.0, 0.0)
    assert replay(source, machine(), warmup_tokens=99).tokens == 1


def test_the_same_run_gives_the_same_report() -> None:
    first, second = (
        replay(SMALL, machine(), predictor=RecallPredictor(SMALL.routing, 16, [0.7, 0.6], seed=3)) for _ in range(2)
    )
    assert first == second


@settings(max_examples=60)
@given(st.data())
def test_any_machine_finishes_any_recording_and_its_counts_add_up(data: st.DataObject) -> None:
    plan = SyntheticRouting(
        tokens=data.draw(st.integers(1, 8)), layers=data.draw(st.integers(1, 3)), experts=6,
        top_k=data.draw(st.integers(1, 5)), sequence_tokens=5, seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    source = draw_recording(plan)
    times = st.sampled_from([0.0, 0.05, 1.0, 3.0])
    below = Disk(BLOCK / data.draw(st.sampled_from([0.5, 2.0])), data.draw(st.integers(2, 9)), data.draw(times))
    decoding = Decoding(data.draw(times), readers=data.draw(st.integers(1, 3)))
    figures = machine(
        slots=data.draw(st.integers(2, 12)), tc=data.draw(times), expert_seconds=data.draw(times),
        latency_seconds=data.draw(times), chunk_bytes=data.draw(st.sampled_from([70, 500, 4000])),
        ask_seconds=data.draw(times), decoding=data.draw(st.sampled_from([None, decoding])),
        disk=data.draw(st.sampled_from([None, below])),
    )  # fmt: skip
    recalls = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=3))
    predictor = RecallPredictor(source.routing, 6, recalls) if recalls else None
    keep, policy = data.draw(st.sampled_from(Keep)), data.draw(st.sampled_from(["lru", "lfru", "forecast", "belady"]))
    report = replay(source, figures, policy, keep=keep, predictor=predictor)  # checks integrity at its end
    uses = plan.tokens * plan.layers * plan.top_k
    assert report.hits + report.late + report.misses == uses
    assert report.guesses_used <= min(report.guesses_sent, report.hits + report.late)
    compute = plan.tokens * plan.layers * (figures.layer_seconds + plan.top_k * figures.expert_seconds)
    spent = report.tpot_mean_seconds * plan.tokens
    assert spent == pytest.approx(compute + report.stall_seconds_per_token * plan.tokens)
    assert report.stall_seconds_per_token >= -1e-9
    if predictor is None:
        assert report.demand_bytes_per_token * plan.tokens == pytest.approx(report.misses * BLOCK)
    else:
        moved = (report.demand_bytes_per_token + report.guess_bytes_per_token) * plan.tokens
        assert report.misses * BLOCK - 1e-6 <= moved <= (report.misses + report.guesses_sent) * BLOCK + 1e-6


@pytest.mark.parametrize("recall", [0.0, 0.7, 1.0])
def test_a_predictor_is_right_as_often_as_asked(recall: float) -> None:
    routing = draw_recording(SyntheticRouting(tokens=100)).routing
    predictor = RecallPredictor(routing, 60, [1.0, recall])
    right, said = [], []
    for token, rows in enumerate(routing.tolist()):
        for layer, true in enumerate(rows):
            named = predictor.predict(token, layer, 2)
            right.append(len(set(named) & set(true)))
            said.append(len(set(named)))
    assert np.mean(right) / 4 == pytest.approx(recall, abs=0.02)
    assert set(said) == {4}


def test_a_share_of_the_experts_is_a_number_of_slots() -> None:
    assert [slots_of_share(share, 1440) for share in (0.125, 0.4, 1.0)] == [180, 576, 1440]
    assert slots_of_share(0.001, 100) == 2
    for wrong in (0.0, 1.5):
        with pytest.raises(ConfigError, match="residency"):
            slots_of_share(wrong, 100)


@pytest.mark.parametrize(("figures", "name"), [
    ({"slots": 1}, "slots"), ({"link_bytes_per_second": 0.0}, "link_bytes_per_second"),
    ({"layer_seconds": -1.0}, "layer_seconds"), ({"chunk_bytes": 0}, "chunk_bytes"),
    ({"disk": Disk(1e9, 1)}, "ram_slots"), ({"disk": Disk(0.0, 4)}, "disk rate"),
])  # fmt: skip
def test_a_machine_that_cannot_be_is_refused(figures: dict[str, float], name: str) -> None:
    right = {"slots": 4, "block_bytes": 10, "link_bytes_per_second": 1.0, "layer_seconds": 0.0}
    with pytest.raises(ConfigError) as caught:
        Machine(**(right | figures))  # type: ignore[arg-type]
    assert name in caught.value.fix
