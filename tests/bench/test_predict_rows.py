"""What a live run pays, put on the simulated machine of its rates term by term."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.predict_rows import (
    ROWS,
    Rates,
    Row,
    asked_history,
    beside,
    one_row,
    read_found,
    replayable,
    said_of,
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


def test_a_guess_of_the_host_moves_in_the_chunks_that_it_has_live() -> None:
    plain, served = (machines(driver="served", **more) for more in ({}, {"chunk_kib": 4608}))
    assert "driver" not in plain and served["driver"] == replace(plain["rates"], chunk_bytes=4608 << 10)
    assert {each.chunk_bytes for name, each in served.items() if name != "rates"} == {4608 << 10}
    assert machines(driver="served", chunk_kib=2304, window=2)["driver"] == served["driver"], "a demand waits for both"


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
    note = Path(__file__).parents[2] / "benchmarks" / "notes" / "2026-11-20-prediction-direct.json"
    assert {line["row"] for line in read_found(note)["lines"]} <= {row.name for row in ROWS}


def test_a_run_measures_the_questions_of_one_arithmetic_and_only_its_rows_are_replayed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = {row.name: row for row in ROWS}
    inside, served, apart = (
        named[f"LFRU + ExpertTransformer{how}"] for how in (", 2 ahead", ", 2 ahead, served", " apart, 2 ahead, served")
    )
    assert asked_history([served, apart, inside], "served") == "transformers"
    assert asked_history([served, inside], "served") == asked_history([inside], "direct") == "history"
    assert asked_history([apart, served], "direct") is None
    measured = {"driver": "served", "beside": asdict(RATES), "beside_delay": 3e-5, "beside_of": "history"}
    assert replayable(served, measured) and not replayable(inside, measured)
    assert not replayable(apart, measured) and apart.name in capsys.readouterr().out
    assert replayable(apart, measured | {"beside_of": "transformers"})
    old = {key: value for key, value in measured.items() if key != "beside_of"}  # nobody had noted whose they are
    assert replayable(apart, old) and replayable(inside, old | {"driver": "direct"})
    assert not replayable(served, old)
