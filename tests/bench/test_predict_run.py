"""What `predict_run.py` runs, and what `in_processes.py` keeps of processes that end badly."""

import json
from pathlib import Path

import pytest

from benchmarks.in_processes import Measurement, chosen, parser_of, run_all
from benchmarks.predict_rows import ROWS
from benchmarks.predict_run import lines, plan

WRITES = """
import json, sys, time
file = sys.argv[sys.argv.index("--json") + 1]
open(file, "w").write(json.dumps({"lines": [1, 2]}))
print("begun")
"""


def script(folder: Path, then: str) -> tuple[str, ...]:
    file = folder / f"{then[:5].strip()}.py"
    file.write_text(WRITES + then)
    return (str(file),)


def test_every_row_is_measured_with_the_driver_that_has_it() -> None:
    driven: dict[str, set[str]] = {"direct": set(), "served": set()}
    for each in plan(Path("forecasts")):
        words = list(each.words)
        driver = words[words.index("--driver") + 1] if "--driver" in words else "direct"
        for flag in ("--rows", "--round-rows"):
            given = words[words.index(flag) + 1]
            driven[driver] |= {ROWS[int(number)].name for number in given.split(",") if number}
    every = {row.name for row in ROWS if row.said != "recall 0.61"}
    assert driven["direct"] | driven["served"] == every - {"LFRU, served"}, "nobody predicts in that one"
    assert driven["direct"] & {row.name for row in ROWS if row.served} == set()
    assert driven["served"] & {row.name for row in ROWS if row.arithmetic == "history"} == set()


def test_a_measurement_that_dies_or_hangs_costs_its_own_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measurements = [
        Measurement("dies", script(tmp_path, "raise SystemExit('no device')"), 60),
        Measurement("hangs", script(tmp_path, "time.sleep(600)"), 5),
        Measurement("ends", script(tmp_path, "pass"), 60),
    ]  # fmt: skip
    run_all(measurements, tmp_path / "out", 300, lines)
    done = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [each["status"] for each in done] == [1, "stopped after 5 s", 0]
    assert "no device" in (tmp_path / "out" / "dies.log").read_text()
    assert (tmp_path / "out" / "hangs.log").read_text() == "begun\n"
    assert capsys.readouterr().out.count("2 runs of rows") == 3, "what was written before stays"


def test_what_there_is_no_time_for_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_all([Measurement("late", ("-c", "pass"), 60)], tmp_path, 1.0, lines)
    assert json.loads((tmp_path / "summary.json").read_text())[0]["status"] == "no time left"
    assert "late: no time left" in capsys.readouterr().out


def test_a_name_that_is_not_there_ends_the_program_and_says_which_are(capsys: pytest.CaptureFixture[str]) -> None:
    every = plan(Path("forecasts"))
    assert [each.name for each in chosen(parser_of(""), every, "int4,bf16-served")] == ["int4", "bf16-served"]
    with pytest.raises(SystemExit):
        chosen(parser_of(""), every, "int5")
    assert "int5" in (said := capsys.readouterr().err) and "bf16-served" in said
