"""The share of replay's gain that was measured, and how far it moves from round to round."""

import errno
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.predict_rows import Rates, read_found
from benchmarks.predict_shares import fill_in, host_more, said_of_share, said_of_useless, shares, speakers, useless
from steerpipe.bench.forecasts import ForecastFile, write_forecasts
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.synthetic import SyntheticRouting


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


def test_the_last_term_decides_whether_there_is_a_share() -> None:
    rows, live = {"heads": (7.0, 7.5), "little": (7.0, 7.95), "slow": (7.0, 8.2)}, (7.6, 7.5, 8.3)
    replayed = [
        {"row": row, "share": 0.25, "ms": dict(zip(("rates", "tap"), ms, strict=True))}
        for row, ms in ({"LFRU": (8.0, 8.0)} | rows).items()
    ]  # fmt: skip
    measured = [line("LFRU", 0, 8.0), *(line(row, 0, ms) for row, ms in zip(rows, live, strict=True))]
    found = shares({"lines": measured, "replayed": replayed})
    assert [each["promised_ms"] for each in found] == pytest.approx([0.5, 0.05, -0.2])
    assert [each["of_replay"] for each in found] == [{"rates": pytest.approx(0.4), "tap": pytest.approx(0.8)}, {}, {}]
    heads, little, slow = map(said_of_share, found)
    assert "0.400 ms gained, replay promises 0.500 ms, of which 80%; rounds drawn anew: too few rounds" in heads
    assert little.endswith("0.500 ms gained, replay promises 0.050 ms: too little to compare")
    assert slow.endswith("0.300 ms lost, replay says 0.200 ms lost: no share")


def test_who_is_no_use_is_compared_with_lfru_of_the_same_round() -> None:
    name, note = "LFRU + always wrong", "2026-11-20-prediction-direct.json"
    plain, wrong = (
        [line(row, each, 8 + more * each) for each in (1, 2, 3)] for row, more in (("LFRU", 0), (name, 0.08))
    )
    others = [line("LFRU again", 3, 8.48), line(name, 4, 9.0), line("heads", 1, 7.0)]
    (found,) = useless({"lines": [*plain, *wrong, *others]})
    assert found == {"row": name, "share": 0.25, "over_lfru": 1.01, "rounds": [1.01, 1.02, 1.0]}, "4 has no LFRU"
    assert said_of_useless(found).endswith("1.010 x LFRU's time, the median of 3 rounds, 1.000 to 1.020")
    noted = useless(read_found(Path(__file__).parents[2] / "benchmarks" / "notes" / note))
    assert sorted(round(each["over_lfru"], 3) for each in noted) == [0.998, 1.0, 1.001, 1.001, 1.003, 1.009]


def test_a_file_that_cannot_be_written_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forecasts, file = tmp_path / "forecasts", tmp_path / "int4.json"
    recording = draw_recording(SyntheticRouting(tokens=6, layers=2, experts=60, top_k=4))
    write_forecasts(forecasts, ForecastFile(recording, {}, None))
    rates = Rates(74e-6, 18e-6, 0.0, 99e-6, end=1e-5, between=1e-5, delay=27e-6, experts=22e-6)
    measured = {"warmup": 2, "tokens": 4, "driver": "served", "block_bytes": 1 << 20, "rates": asdict(rates)}
    file.write_text(whole := json.dumps(measured | {"lines": [line("LFRU", 0, 1.0, 1.0)]}))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space left"):
            fill_in(forecasts, file)
    assert file.read_text() == whole and len(list(tmp_path.iterdir())) == 2
    fill_in(forecasts, file)
    (replayed,) = json.loads(file.read_text())["replayed"]
    assert (replayed["row"], replayed["chunk_bytes"]) == ("LFRU", 1 << 20)


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


def test_rounds_that_were_cut_off_are_compared_as_far_as_they_go() -> None:
    rows, replayed = ["LFRU", "heads", "LFRU again"], [("LFRU", 8.0), ("heads", 7.5), ("LFRU again", 8.0)]
    whole = [
        line(row, number, 7.6 if row == "heads" else 8.0, share=share)
        for number in range(1, 6)
        for share in (0.5, 0.25)
        for row in rows[number % 3 :] + rows[: number % 3]
    ]
    for cut in range(1, len(whole)):
        there = {(each["row"], each["share"]) for each in whole[:cut]}
        promised = [
            {"row": row, "share": share, "ms": {"tap": ms}}
            for row, ms in replayed for share in (0.5, 0.25) if (row, share) in there
        ]  # fmt: skip
        found = shares({"lines": whole[:cut], "replayed": promised})
        both = [share for share in (0.5, 0.25) if {("LFRU", share), ("heads", share)} <= there]
        assert [(each["share"], each["live_ms"]) for each in found] == [(share, pytest.approx(0.4)) for share in both]
        five = [share == 0.5 and cut >= 27 for share in both]
        assert [each["rounds_of_replay"] for each in found] == [[pytest.approx(0.8)] * 2 * each for each in five]


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
    assert host_more(found, speakers(found)) == pytest.approx(0.9 - 0.5)
    assert predicted["steady_of_replay"] == pytest.approx((0.4 - 0.4) / 0.1)
    assert evicted["steady_of_replay"] == evicted["device_of_replay"]


def test_a_predictor_that_rests_says_nothing_of_what_predicting_costs_the_host() -> None:
    def more(found: dict[str, Any]) -> float:
        return host_more(found, speakers(found))

    heads, plain = (line(row, 0, 8.0, graph_ms=7.0) for row in ("LFRU + heads, 1 ahead", "LFRU"))
    assert more({"lines": [plain, heads | {"graph_ms": 6.5}, heads | {"throttled": 1.0}]}) == pytest.approx(0.5)
    assert more({"lines": [plain, heads | {"throttled": 1.0}]}) == 0.0
    served = heads | {"row": "LFRU + heads, 1 and 2 ahead, served", "graph_ms": 6.7}
    assert more({"driver": "direct", "lines": [plain, served]}) == 0.0
    assert more({"driver": "served", "lines": [plain, served]}) == pytest.approx(0.3)


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
    apart = "LFRU + ExpertTransformer, 2 ahead, served"
    found["lines"].append(line(apart, 0, 7.9, graph_ms=7.3))
    found["replayed"] += [{"row": row, "share": 0.25, "ms": {"tap": 7.9}} for row in (heads, apart)]
    found["driver"] = "served"
    of_history, of_heads, of_other = shares(found)
    assert of_history == own, "another network's host is another work"
    assert of_heads["steady_of_replay"] == pytest.approx((0.4 - 0.1) / 0.1)
    assert of_other["steady_of_replay"] == pytest.approx((0.2 - 0.1) / 0.1)
