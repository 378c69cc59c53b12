"""What a live run pays, put on the simulated machine of its rates term by term; and the share of replay's gain."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.predict_rows import (
    ROWS,
    Rates,
    Row,
    beside,
    host_more,
    one_row,
    read_found,
    replayable,
    said_of,
    shares,
    terms,
)
from steerpipe.arena.foresight import Foresight
from steerpipe.bench.forecasts import ForecastFile, made_up
from steerpipe.transfer.machine import Machine
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.replay import Keep, replay
from steerpipe.transfer.synthetic import SyntheticRouting

RATES = Rates(74e-6, 18e-6, 0.0, 99e-6, 7e-6, end=1e-4, between=5e-4, delay=27e-6, experts=22e-6)
FOUND = {"block_bytes": 4_600_000, "driver": "direct"}
RECORDING = draw_recording(SyntheticRouting(tokens=20, layers=24, experts=60, top_k=4))


def machines(rates: Rates = RATES, **found: object) -> dict[str, Machine]:
    return dict(terms(0.25, RECORDING, rates, FOUND | found))


def test_terms_come_one_by_one_and_only_those_that_were_measured() -> None:
    assert list(machines()) == ["rates", "driver", "ends", "experts", "tap", "delay"]
    old = Rates(74e-6, 18e-6, 0.0, 99e-6, 7e-6)
    assert list(machines(old)) == ["rates", "driver", "tap"]
    assert list(machines(old, driver="served")) == ["rates", "tap"]
    assert machines(old, driver="served")["tap"].looking.stops is False


@pytest.mark.parametrize("experts", [12e-6, 22e-6, 40e-6])
def test_terms_add_nothing_to_a_step_that_hits(experts: float) -> None:
    every = machines(replace(RATES, experts=experts))
    spent = {name: replay(RECORDING, machine, keep=Keep.ALL).tpot_mean_seconds for name, machine in every.items()}
    assert all(each == pytest.approx(24 * 74e-6) for each in spent.values())


@pytest.mark.parametrize("experts", [22e-6, 40e-6])
def test_terms_add_nothing_to_misses_where_experts_take_no_less_than_goes_on_beside_them(experts: float) -> None:
    every = machines(replace(RATES, experts=experts))
    missing = [replay(RECORDING, every[name]).tpot_mean_seconds for name in ("driver", "ends", "experts", "delay")]
    assert missing == pytest.approx([missing[0]] * 4)


@pytest.mark.parametrize("tail", [3e-6, 5.5e-6, 12e-6, 22e-6, 40e-6])
def test_what_follows_a_missing_block_is_taken_from_what_comes_before_it(tail: float) -> None:
    rates = replace(RATES, beside=0.0, ask=15e-6)
    without, told = (machines(each, driver="served")["experts"] for each in (rates, replace(rates, tail=tail)))
    for keep in (Keep.ALL, Keep.CACHE):
        spent = [replay(RECORDING, machine, keep=keep).tpot_mean_seconds for machine in (without, told)]
        assert spent[0] == pytest.approx(spent[1]), "both are measured"
    most = min(max(tail, 22e-6 / 4), 22e-6)  # an expert's own time at least, all experts' at most
    moved = told.layer_seconds - without.layer_seconds
    assert told.expert_seconds + moved == pytest.approx(most)
    assert told.ask_seconds + told.expert_seconds + moved == pytest.approx(without.ask_seconds + without.expert_seconds)


def test_the_direct_driver_lends_slots_and_stops_at_routers() -> None:
    plain, direct = machines()["rates"], machines()["driver"]
    assert direct.slots == plain.slots - 8
    predicted = dict(terms(0.25, RECORDING, RATES, FOUND, predicts=True))["driver"]
    assert predicted.slots == direct.slots - 7  # one of the eight for guesses is replay's own
    small = dict(terms(0.25, RECORDING, RATES, FOUND | {"block_bytes": 1 << 20}, predicts=True))["driver"]
    assert small.slots == direct.slots - 6
    assert direct.looking.stops and direct.looking.most == 2
    assert replace(direct, slots=plain.slots, looking=plain.looking, chunk_bytes=plain.chunk_bytes) == plain


def test_a_delay_ends_where_what_was_named_is_sent_for() -> None:
    spans = pytest.importorskip("benchmarks.predict_spans")
    kernels = [
        spans.Kernel("_route", 0.0, 1.0), spans.Kernel("_fetch", 3.0, 9.0), spans.Kernel("_route", 5.0, 6.0),
        spans.Kernel("_fetch", 10.0, 11.0),
    ]  # fmt: skip
    assert spans.median_after(kernels, "_route", "_fetch", begins=True) == 3.0  # 2 and 4
    assert spans.median_after(kernels[2:], "_route", "_fetch") == 5.0


def test_a_rate_is_that_of_the_quickest_round() -> None:
    rates = pytest.importorskip("benchmarks.predict_rates")

    def round_of(tap_us: float, slow_us: float = 0.0) -> list[object]:
        times = [24 * (60 + tap_us * (missing < 2) + 90 * missing - 10 * (missing > 0)) for missing in range(5)]
        times[3] += slow_us
        return [rates.Point(missing, 1e-6 * each, 2.4e-4) for missing, each in enumerate(times)]

    found = rates.rates_of([*round_of(0), *round_of(0, 500)], [*round_of(4, 900), *round_of(4)], 24)
    assert (found.layer, found.beside, found.ask, found.block) == pytest.approx((70e-6, 10e-6, 0.0, 90e-6))
    assert (found.tap, *found.tap_more) == pytest.approx((4e-6, 0.0, -4e-6, -4e-6, -4e-6))


def line(row: str, number: int, *steps_ms: float, share: float = 0.25, graph_ms: float = 5.0) -> dict[str, object]:
    steps = [round(1e3 * each) for each in steps_ms]
    live = {"live_ms": sum(steps_ms) / len(steps_ms), "steps_us": steps, "graph_ms": graph_ms}
    return {"row": row, "share": share, "round": number} | live


def test_a_gain_is_between_the_medians_of_tokens_and_one_step_that_was_held_up_does_not_count() -> None:
    found = {
        "lines": [
            line("LFRU", 0, 8.0, 6.0), line("heads", 0, 7.5, 5.6), line("LFRU", 1, 8.2, 6.0),
            line("heads", 1, 7.5, 25.6), line("LFRU again", 1, 8.0, 16.0), line("heads", 2, 7.7, 5.6),
            line("wrong", 1, 8.0, 6.0), line("slow", 1, 9.0, 7.0),
        ],
        "replayed": [
            {"row": "LFRU", "share": 0.25, "ms": {"rates": 8.0, "tap": 8.0}},
            {"row": "heads", "share": 0.25, "ms": {"rates": 7.1, "tap": 7.5}},
            {"row": "wrong", "share": 0.25, "ms": {"rates": 8.0, "tap": 8.01}},
            {"row": "slow", "share": 0.25, "ms": {"rates": 8.0, "tap": 9.0}},
        ],
    }  # fmt: skip
    heads, wrong, slow = shares(found)
    assert heads["live_ms"] == pytest.approx(0.45)
    assert heads["of_replay"] == {"rates": pytest.approx(0.5), "tap": pytest.approx(0.9)}
    assert heads["rounds_ms"][0] == pytest.approx(0.45), "of round 0, against its own LFRU"
    assert heads["rounds_ms"][1] == pytest.approx(9.55 - 16.55)
    assert heads["rounds_ms"][2] == pytest.approx((7.0 + 7.1 + 12.0) / 3 - 6.65), "no LFRU in it: against all"
    assert wrong["of_replay"] == slow["of_replay"] == {}


def test_rounds_that_are_drawn_anew_say_how_far_a_share_may_lie_from_what_was_measured() -> None:
    def drawn(heads_ms: list[float], drift_ms: float = 0.0) -> tuple[float, list[float]]:
        lines = [
            line(row, number, ms + drift_ms * number)
            for number, heads in enumerate(heads_ms)
            for row, ms in (("LFRU", 8.0), ("LFRU again", 8.0), ("heads", heads))
        ]
        replayed = [{"row": row, "share": 0.25, "ms": {"tap": ms}} for row, ms in (("LFRU", 8.0), ("heads", 7.5))]
        (found,) = shares({"lines": lines, "replayed": replayed})
        return found["of_replay"]["tap"], found["rounds_of_replay"]

    noisy = [7.4, 7.5, 7.6, 7.7, 7.9]
    whole, (low, high) = drawn(noisy)
    assert whole == pytest.approx(0.8) and 0.1 < low < 0.6 and 1.0 <= high < 1.3
    assert drawn([7.6] * 5, drift_ms=0.3)[1] == pytest.approx([0.8, 0.8]), "rows of one round stay together"
    assert drawn(noisy[:4])[1] == [], "four rounds say nothing of it"


def test_by_the_devices_clock_nobody_is_charged_for_the_host() -> None:
    heads = "LFRU + heads, 1 ahead"
    rows = {"LFRU": (8.0, 7.5), heads: (7.9, 7.1), "Belady": (6.0, 5.5)}  # ms of replay, and of the device
    found = {
        "rates": {"host": 1e-4},
        "lines": [line(row, 0, 8.0, graph_ms=graph) for row, (_, graph) in rows.items()],
        "replayed": [{"row": row, "share": 0.25, "ms": {"tap": ms}} for row, (ms, _) in rows.items()],
    }
    predicted, evicted = shares(found)
    assert predicted["device_of_replay"] == pytest.approx(0.4 / (0.1 + 0.1))
    assert evicted["device_of_replay"] == pytest.approx(1.0), "who names nobody costs the host nothing more"
    assert host_more(found) == pytest.approx(0.9 - 0.5)
    assert predicted["steady_of_replay"] == pytest.approx((0.4 - 0.4) / 0.1)
    assert evicted["steady_of_replay"] == evicted["device_of_replay"]


def test_a_predictor_that_rests_says_nothing_of_what_predicting_costs_the_host() -> None:
    heads, plain = (line(row, 0, 8.0, graph_ms=7.0) for row in ("LFRU + heads, 1 ahead", "LFRU"))
    assert host_more({"lines": [plain, heads | {"graph_ms": 6.5}, heads | {"throttled": 1.0}]}) == pytest.approx(0.5)
    assert host_more({"lines": [plain, heads | {"throttled": 1.0}]}) == 0.0
    served = heads | {"row": "LFRU + heads, 1 and 2 ahead, served", "graph_ms": 6.7}
    assert host_more({"driver": "direct", "lines": [plain, served]}) == 0.0
    assert host_more({"driver": "served", "lines": [plain, served]}) == pytest.approx(0.3)


def test_who_predicts_pays_for_a_longer_host_and_who_does_not_pays_nothing() -> None:
    rates = replace(RATES, host=1e-4)
    plain, spoken = (dict(terms(0.25, RECORDING, rates, FOUND, predicts=each)) for each in (False, True))
    assert spoken["delay"].between_seconds == pytest.approx(plain["delay"].between_seconds + 1e-4)
    assert plain["delay"] == machines()["delay"]
    assert replace(spoken["experts"], slots=plain["experts"].slots) == plain["experts"]


def test_who_looks_at_history_pays_what_questions_cost_and_speaks_when_they_are_answered() -> None:
    cost = asdict(replace(RATES, tap=5e-6, tap_more=(1e-6, 2e-6), host=3e-5))
    rates = beside(RATES, FOUND | {"beside": cost, "beside_delay": 57e-6})
    assert rates == replace(RATES, tap=5e-6, tap_more=(1e-6, 2e-6), host=3e-5, delay=57e-6)


def test_what_a_history_s_host_costs_is_its_own() -> None:
    plain, heads, history = "LFRU", "LFRU + heads, 1 ahead", "LFRU + ExpertTransformer, 2 ahead"
    lines = [line(plain, 0, 8.0, graph_ms=7.5), line(heads, 0, 7.7, graph_ms=7.1), line(history, 0, 7.9, graph_ms=7.2)]
    found = {
        "rates": {"host": 1e-4}, "beside": {"host": 2e-4}, "lines": lines,
        "replayed": [{"row": row, "share": 0.25, "ms": {"tap": ms}} for row, ms in ((plain, 8.0), (history, 7.9))],
    }  # fmt: skip
    (own,) = shares(found)
    assert own["of_replay"] == {} and own["live_ms"] == pytest.approx(0.1)  # below what is compared
    assert (own["device_of_replay"], own["steady_of_replay"]) == pytest.approx((1.0, 1.0))
    assert (host_more(found), host_more(found, history=True)) == pytest.approx((0.1, 0.2))


def test_a_row_is_replayed_on_rates_of_its_driver_that_tell_what_it_costs() -> None:
    def rows(**found: object) -> set[str]:
        return {row.arithmetic + " served" * row.served for row in ROWS if row.said and replayable(row, found)}

    costs = {"beside": {}, "beside_delay": 0.0}
    assert rows(driver="direct", **costs) == {"heads", "lookahead", "history"}
    served = {"heads", "heads served", "lookahead", "lookahead served"}
    assert rows(driver="served", **costs) == served | {"transformers served"}
    assert rows(driver="served") == served and rows(driver="direct") == {"heads", "lookahead"}
    assert replayable(Row("LFRU"), {})


def test_what_is_said_two_layers_ahead_holds_until_the_layer_comes() -> None:
    row = next(row for row in ROWS if row.arithmetic == "transformers")
    perfect = made_up("perfect", RECORDING, 2)
    far = Foresight(perfect.ranked, perfect.probability * np.array([0, 1])[:, None, None, None])
    file, found = ForecastFile(RECORDING, {row.said: far}, None), FOUND | {"warmup": 4, "driver": "served"}
    machine = Machine(slots=200, block_bytes=4_600_000, link_bytes_per_second=5e10, layer_seconds=5e-5)
    held = one_row(row, machine, RECORDING, file, found, 0.0)
    near = replace(file, said={row.said: perfect})
    assert held.tpot_mean_seconds == one_row(row, machine, RECORDING, near, found, 0.0).tpot_mean_seconds
    assert held.tpot_mean_seconds < replay(RECORDING, machine, predictor=far, warmup_tokens=4).tpot_mean_seconds


def test_inside_the_graph_the_tap_before_a_layer_says_what_was_said_two_layers_before() -> None:
    row = next(row for row in ROWS if row.arithmetic == "history")
    far = made_up("chance", RECORDING, 2)
    file = ForecastFile(RECORDING, {row.said: far}, None)
    said = said_of(row, file)
    assert said is not None and said.horizon == 1 and (said.ranked[0] == far.ranked[1]).all()
    assert said.predict(3, 5, 1) == far.predict(3, 5, 2)
    assert said_of(next(row for row in ROWS if row.name == "LFRU"), file) is None


def test_a_note_can_be_read_again() -> None:
    note = Path(__file__).parents[2] / "benchmarks" / "notes" / "2026-11-16-prediction-direct.json"
    assert {line["row"] for line in read_found(note)["lines"]} <= {row.name for row in ROWS}
