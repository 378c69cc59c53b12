"""What looking ahead costs a simulated machine: each figure by itself, by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.core.errors import ConfigError
from steerpipe.transfer.forecasts import PerfectPredictor, RecallPredictor
from steerpipe.transfer.machine import Decoding, Disk, Looking, Machine
from steerpipe.transfer.recorded import Recording, draw_recording
from steerpipe.transfer.replay import Keep, replay
from steerpipe.transfer.replay_report import ReplayReport
from steerpipe.transfer.synthetic import SyntheticRouting
from steerpipe.transfer.throttle import FIRST_REST, MOST_SILENT
from tests.transfer.simulating import AlwaysSeven, machine, recording, total_seconds

ALL_NEW = recording([[[0], [1]], [[2], [3]]])  # tc 0.5, tx 1: a miss takes 1.5, one that was guessed in time 1.0
HITS = recording([[[0], [1]]] * 6)
SECONDS = st.floats(0.0, 1.5)

FINE = 0.01  # chunks that were under way, of a thousandth of a block each


def finely(**rest: float | Looking | Disk | None) -> Machine:
    return machine(chunk_bytes=1, **rest)


class SixAndSeven(AlwaysSeven):
    def predict(self, token: int, layer: int, ahead: int) -> list[int]:
        return [6, 7]


def misled(looking: Looking, disk: Disk | None = None) -> ReplayReport:
    return replay(HITS, finely(looking=looking, disk=disk), "lru", predictor=SixAndSeven(), warmup_tokens=3)


def spent(source: Recording, figures: Machine, horizon: int = 1) -> float:
    return total_seconds(source, figures, "lru", predictor=PerfectPredictor(source.routing, horizon))


def test_what_costs_nothing_is_as_it_was() -> None:
    """Figures of the simulator before it knew any of these costs."""
    source = draw_recording(SyntheticRouting(tokens=50, layers=6, experts=16, top_k=3, sequence_tokens=20, seed=3))
    seen = RecallPredictor(source.routing, 16, [0.7, 0.5, 0.4], 1)
    figures = Machine(24, 1000, 1e6, 5e-4, chunk_bytes=100)
    asks = replace(figures, expert_seconds=1e-4, ask_seconds=2e-4, beside_seconds=3e-4, latency_seconds=1e-5)
    decodes = replace(figures, slots=30, decoding=Decoding(2e-4, 2), chunk_bytes=300)
    disk = replace(figures, disk=Disk(5e5, 40), chunk_bytes=200)
    runs = [replay(source, each, predictor=seen, warmup_tokens=5) for each in (figures, asks, decodes, disk)]
    assert [(run.tpot_mean_seconds, run.guesses_sent, run.guesses_used) for run in runs] == [
        (0.012835555555555225, 267, 171), (0.013463999999999586, 274, 176),
        (0.01226444444444444, 266, 170), (0.019371111111110565, 945, 374),
    ]  # fmt: skip


def test_guesses_move_while_the_logits_are_computed() -> None:
    assert spent(ALL_NEW, machine(end_seconds=0.3)) == pytest.approx(1.5 + 1.0 + 0.3 + (1.0 - 0.3) + 1.0 + 0.3)


def test_a_host_between_two_tokens_leaves_guesses_moving() -> None:
    assert spent(ALL_NEW, machine(between_seconds=0.3)) == pytest.approx(1.5 + 1.0 + 0.3 + (1.0 - 0.3) + 1.0 + 0.3)


def test_where_a_step_stops_them_its_end_is_the_last_that_moves() -> None:
    figures = finely(between_seconds=0.4, looking=Looking(stops=True))
    assert spent(ALL_NEW, figures) == pytest.approx(1.5 + 1.0 + 0.4 + 1.5 + 1.0 + 0.4, abs=FINE)
    with_logits = replace(figures, end_seconds=0.3)
    assert spent(ALL_NEW, with_logits) == pytest.approx(1.5 + 1.0 + 0.7 + (1.5 - 0.3) + 1.0 + 0.7, abs=FINE)


def test_without_a_predictor_only_the_ends_cost_anything() -> None:
    looking = Looking(tap_seconds=0.3, delay_seconds=0.2, most=1, bytes_per_second=10.0, stops=True)
    plain = total_seconds(ALL_NEW, machine(), "lru")
    assert total_seconds(ALL_NEW, machine(looking=looking), "lru") == plain
    ends = machine(looking=looking, end_seconds=0.3, between_seconds=0.4)
    assert total_seconds(ALL_NEW, ends, "lru") == pytest.approx(plain + 2 * 0.7)


def test_a_tap_is_paid_in_every_layer_and_no_guess_moves_in_it() -> None:
    tapped = finely(looking=Looking(tap_seconds=0.2))
    assert spent(ALL_NEW, tapped) == pytest.approx(1.5 + 3 * 1.0 + 4 * 0.2, abs=FINE)
    seen = PerfectPredictor(ALL_NEW.routing, 1)
    resident = total_seconds(ALL_NEW, tapped, "lru", keep=Keep.ALL, predictor=seen)
    assert resident == pytest.approx(4 * (0.5 + 0.2))


def test_a_tap_takes_longer_where_experts_are_missing() -> None:
    looking = Looking(tap_seconds=0.2, tap_more=(0.1, 0.5))
    assert [looking.tap(missing) for missing in range(4)] == pytest.approx([0.2, 0.3, 0.7, 0.7])
    assert replace(looking, tap_more=(-0.3,)).tap(1) == 0.0
    tapped = finely(looking=looking)
    seen = PerfectPredictor(ALL_NEW.routing, 1)
    assert total_seconds(ALL_NEW, tapped, "lru", keep=Keep.ALL, predictor=seen) == pytest.approx(4 * (0.5 + 0.2))
    stopping, alike = (replace(each, stops=True) for each in (looking, Looking(tap_seconds=0.3)))
    assert spent(ALL_NEW, finely(looking=stopping)) == spent(ALL_NEW, finely(looking=alike)), "a rest is missing"


def test_a_tap_is_no_stall() -> None:
    tapped = finely(looking=Looking(tap_seconds=0.2))
    report = replay(ALL_NEW, tapped, "lru", predictor=PerfectPredictor(ALL_NEW.routing, 1))
    assert report.stall_seconds_per_token * 2 == pytest.approx(1.0 + 3 * 0.5, abs=FINE)


def test_a_forecast_is_late_where_its_layer_hits_and_in_time_where_it_waits_anyway() -> None:
    source = recording([[[0], [1]], [[0], [2]]])  # the third layer hits
    delayed = machine(looking=Looking(delay_seconds=0.3))
    assert spent(source, machine()) == pytest.approx(1.5 + 1.0 + 0.5 + 1.0)
    assert spent(source, delayed) == pytest.approx(1.5 + 1.0 + 0.5 + 1.0 + 0.3)


def test_a_forecast_that_comes_late_sends_for_no_layer_that_has_come() -> None:
    assert misled(Looking(delay_seconds=0.4)).guesses_sent > 0
    assert misled(Looking(delay_seconds=0.6)).guesses_sent == 0


def test_a_guess_is_cut_when_its_layer_comes_though_the_next_forecast_is_late() -> None:
    assert misled(Looking(delay_seconds=0.3)).guess_bytes_per_token == pytest.approx(2 * 200, abs=4)


def test_a_delay_counts_from_the_router_and_not_from_the_end_of_its_tap() -> None:
    assert misled(Looking(0.2, 0.3)).guess_bytes_per_token == pytest.approx(2 * 400, abs=4)


def test_no_guess_is_read_from_the_disk_while_a_tap_is_computed() -> None:
    free, tapped = (misled(Looking(tap), Disk(100.0, 24)).disk_bytes_per_token for tap in (0.0, 0.5))
    assert free > 0 and tapped == pytest.approx(free, abs=4)


def test_a_forecast_that_is_under_way_when_a_step_stops_is_dropped() -> None:
    figures = finely(between_seconds=1.0, looking=Looking(delay_seconds=1.2, stops=True))
    assert spent(ALL_NEW, figures) == pytest.approx(1.5 + 1.2 + 1.0 + 1.5 + 1.2 + 1.0, abs=FINE)


def test_farther_guesses_move_on_until_the_next_forecast_is_there() -> None:
    source = recording([[[0], [1], [2], [3]], [[0], [1], [4], [5]]])
    figures = machine(tc=0.5, tx=2.0, looking=Looking(delay_seconds=0.4))
    one, two = (spent(source, figures, horizon) for horizon in (1, 2))
    # Two ahead the fifth layer's tap speaks at 0.4 and its guess for the seventh moves on through the sixth's delay.
    assert two == pytest.approx(one - 0.5)
    stops = replace(figures, looking=replace(figures.looking, stops=True))
    assert spent(source, stops, 2) == pytest.approx(one - 0.2)  # a chunk under way


def test_no_more_is_sent_for_than_a_forecast_may() -> None:
    source = recording([[[0, 1], [2, 3]]])
    figures = machine(tc=0.5, tx=0.2)
    both, one = (figures, replace(figures, looking=Looking(most=1)))
    assert spent(source, both) == pytest.approx(0.9 + 0.5)
    assert spent(source, one) == pytest.approx(0.9 + 0.5 + 0.2)


def test_guesses_have_their_own_rate_and_demands_go_on_at_the_links() -> None:
    slow = finely(looking=Looking(bytes_per_second=500.0))
    assert spent(ALL_NEW, slow) == pytest.approx(1.5 + 3 * (0.5 + 0.75), abs=FINE)


def test_where_a_router_stops_them_no_guess_moves_while_a_layer_asks() -> None:
    source = recording([[[0, 1], [2, 3]]])
    seen = RecallPredictor(source.routing, source.experts, [1.0])
    moves = machine(ask_seconds=0.4)
    stops = replace(moves, looking=Looking(stops=True))
    first = 0.5 + 0.4 + 2.0
    assert total_seconds(source, moves, "lru", predictor=seen) == pytest.approx(first + 0.5 + 0.4 + (2.0 - 0.9))
    assert total_seconds(source, stops, "lru", predictor=seen) == pytest.approx(first + 0.5 + 0.4 + (2.0 - 0.5))


def test_what_is_left_of_a_guess_that_a_router_stops_is_asked_for_and_what_has_come_is_not() -> None:
    """The first layer of a token is new: its end stops guesses as well."""
    moves = finely(ask_seconds=0.4)
    stops = replace(moves, looking=Looking(stops=True))
    new = 0.5 + 0.4 + 1.0
    assert spent(ALL_NEW, moves) == pytest.approx(new + 3 * (0.5 + 0.5), abs=FINE)
    assert spent(ALL_NEW, stops) == pytest.approx(2 * (new + 0.5 + 0.4 + 0.5), abs=FINE)
    early = replace(stops, layer_seconds=1.1)
    assert spent(ALL_NEW, early) == pytest.approx(2 * (1.1 + 0.4 + 1.0 + 1.1), abs=FINE)
    decoded = replace(early, decoding=Decoding(0.3))  # all of it has moved, and it is not compute-ready yet
    assert spent(ALL_NEW, decoded) == pytest.approx(2 * (1.1 + 0.4 + 1.3 + 1.3), abs=FINE)


def test_who_sends_for_nobody_rests_and_then_costs_nothing() -> None:
    """Everything that is named is there after the first token."""
    tokens = (MOST_SILENT + FIRST_REST) // 2
    source = recording([[[0], [1]]] * tokens)
    tapped = machine(looking=Looking(tap_seconds=0.2))
    seen = PerfectPredictor(source.routing, 1)
    silent = total_seconds(source, tapped, "lru", predictor=seen, throttled=True)
    plain = total_seconds(source, machine(), "lru", predictor=seen, throttled=True)
    assert silent - plain == pytest.approx((MOST_SILENT + 2) * 0.2, abs=0.2 + 1e-6)
    free = machine(looking=Looking(delay_seconds=0.1))
    report = replay(source, free, "lru", predictor=AlwaysSeven(), throttled=True)
    assert report.guesses_sent > 0


@settings(deadline=None, max_examples=60)
@given(delay=SECONDS, more=SECONDS, tap=SECONDS, between=SECONDS, seed=st.integers(0, 20), stops=st.booleans())
def test_more_of_a_cost_is_never_quicker(
    delay: float, more: float, tap: float, between: float, seed: int, stops: bool
) -> None:
    """Nothing is kept and every forecast is right: a layer waits for what its guess left over.

    A chunk that is under way at the router goes on in the tap: so much a layer may gain by chance, and no more.
    """
    source = draw_recording(SyntheticRouting(tokens=4, layers=3, experts=12, top_k=2, seed=seed))
    seen = PerfectPredictor(source.routing, 1)
    figures = machine(
        between_seconds=between, looking=Looking(tap_seconds=tap, delay_seconds=delay, stops=stops)
    )  # fmt: skip

    def total(each: Machine) -> float:
        return total_seconds(source, each, "lru", keep=Keep.NOTHING, predictor=seen)

    base, chance = total(figures), 4 * 3 * 0.1 + 1e-6
    assert total(replace(figures, looking=replace(figures.looking, delay_seconds=delay + more))) >= base - chance
    assert total(replace(figures, looking=replace(figures.looking, tap_seconds=tap + more))) >= base - chance
    assert total(replace(figures, looking=replace(figures.looking, stops=True))) >= base - chance
    assert total(replace(figures, between_seconds=between + more)) >= base - chance


@pytest.mark.parametrize(("looking", "said"), [
    (Looking(tap_seconds=-1.0), "tap_seconds"), (Looking(tap_more=(0.1, float("inf"))), "tap_more"),
    (Looking(delay_seconds=float("nan")), "delay_seconds"),
    (Looking(most=0), "most guesses"), (Looking(bytes_per_second=0.0), "rate of guesses"),
])  # fmt: skip
def test_costs_that_cannot_be_are_refused(looking: Looking, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        machine(looking=looking)
    for name in ("end_seconds", "between_seconds"):
        with pytest.raises(ConfigError, match=name):
            machine(**{name: -1.0})


@settings(deadline=None, max_examples=60)
@given(
    looking=st.builds(
        Looking, tap_seconds=SECONDS, delay_seconds=st.floats(0.0, 5.0), most=st.none() | st.integers(1, 3),
        bytes_per_second=st.none() | st.floats(100.0, 5000.0), stops=st.booleans(),
    ),
    ends=st.tuples(SECONDS, SECONDS, SECONDS), slots=st.integers(8, 24), horizon=st.integers(1, 4),
    decoding=st.none() | st.builds(Decoding, SECONDS, st.integers(1, 2)),
    disk=st.none() | st.builds(Disk, st.floats(300.0, 3000.0), st.integers(8, 20)), throttled=st.booleans(),
    by_cpu=st.booleans(), keep=st.sampled_from([Keep.CACHE, Keep.NOTHING]),
)  # fmt: skip
def test_every_machine_runs_every_recording_to_its_end(
    looking: Looking, ends: tuple[float, float, float], slots: int, horizon: int, decoding: Decoding | None,
    disk: Disk | None, throttled: bool, by_cpu: bool, keep: Keep,
) -> None:  # fmt: skip
    source = draw_recording(SyntheticRouting(tokens=6, layers=3, experts=10, top_k=2, sequence_tokens=3))
    figures = machine(
        slots, looking=looking, end_seconds=ends[0], between_seconds=ends[1], ask_seconds=ends[2], decoding=decoding,
        disk=disk, cpu_seconds=0.4,
    )  # fmt: skip
    seen = RecallPredictor(source.routing, source.experts, [0.7] * horizon)
    report = replay(source, figures, predictor=seen, throttled=throttled, by_cpu=by_cpu, keep=keep)
    assert report.hits + report.late + report.misses == 6 * 3 * 2
    assert report.tpot_mean_seconds >= 3 * 0.5 + ends[0] + ends[1] - 1e-9
    assert 0 <= report.computed <= report.misses and report.stall_seconds_per_token >= -1e-9
