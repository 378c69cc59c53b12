"""What `predict_run.py` runs, and what `in_processes.py` keeps of processes that end badly."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.in_processes import Measurement, chosen, parser_of, run, run_all
from benchmarks.predict_rows import HISTORY_ROWS, ROWS, digest
from benchmarks.predict_run import lines, main, missing_forecasts, plan, rows_of, too_little
from steerpipe.arena.foresight import ReuseForesight
from steerpipe.bench.forecasts import ForecastFile, made_up, write_forecasts
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.synthetic import SyntheticRouting

WRITES = """
import json, sys, time
file = sys.argv[sys.argv.index("--json") + 1]
open(file, "w").write(json.dumps({"lines": [1, 2]}))
open(file.replace(".json", ".part"), "w").write("half")
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
    out = tmp_path / "out"
    assert run_all(measurements, out, 300, lines) == 1
    done = json.loads((out / "summary.json").read_text())
    assert [each["status"] for each in done] == [1, "stopped after 5 s", 0]
    kept = {"dies.json", "hangs.json", "ends.json", "dies.log", "hangs.log", "summary.json"}
    assert {each.name for each in out.iterdir()} == kept, "of one that ended well no log, of none half a file"
    assert (out / "hangs.log").read_text() == "begun\n"
    said = capsys.readouterr().out
    assert said.count("2 runs of rows") == 3, "what was written before stays"
    assert f"dies: status 1, {done[0]['seconds']} s; no device (see {out / 'dies.log'})" in said
    assert run_all(measurements[2:], out, 300, lines) == 0
    assert json.loads((out / "summary.json").read_text())[:2] == done[:2], "of the others it says what it said"


def test_figures_of_an_older_run_are_not_those_of_one_that_dies_at_once(tmp_path: Path) -> None:
    (tmp_path / "dies.json").write_text('{"lines": [1, 2, 3]}')
    assert run_all([Measurement("dies", ("-c", "raise SystemExit(3)"), 60)], tmp_path, 300, lines) == 1
    assert not (tmp_path / "dies.json").exists()


def test_who_is_interrupted_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    wait = subprocess.Popen.wait

    def interrupted(process: "subprocess.Popen[bytes]", timeout: float | None = None) -> int:
        if timeout is not None:
            started.append(process)
            assert os.getpgid(process.pid) == process.pid and os.getsid(process.pid) == os.getsid(0)
            raise KeyboardInterrupt
        return wait(process)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(Measurement("hangs", script(tmp_path, "time.sleep(600)"), 600), tmp_path, 600)
    assert started[0].returncode == -signal.SIGKILL


def test_who_is_told_to_end_ends_its_process_first(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    child = f"import os, time; open({str(fifo)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    program = (
        "from pathlib import Path; from benchmarks.in_processes import Measurement, run_all\n"
        f"run_all([Measurement('hangs', ('-c', {child!r}), 600)], Path({str(tmp_path)!r}), 600, lambda file: ())"
    )
    runner = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    pid = int(fifo.read_text())  # waits until the child is there
    runner.terminate()
    assert runner.wait() == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_folder_that_cannot_be_made_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="name another one"):
        run_all([], tmp_path / "file", 60, lines)


def test_who_can_end_by_itself_is_told_when_to(tmp_path: Path) -> None:
    told = "import sys; raise SystemExit(' '.join(sys.argv[3:]))"
    late = Measurement("late", ("-c", told), 60, margin_seconds=40)
    assert run(late, tmp_path, 50)["status"] == 1 and (tmp_path / "late.log").read_text() == "--seconds 10\n"
    run(late, tmp_path, 30)
    assert (tmp_path / "late.log").read_text() == "--seconds 0\n", "its rates are worth something"
    assert all(each.margin_seconds for each in plan(Path("forecasts")))


def test_what_there_is_no_time_for_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all([Measurement("late", ("-c", "pass"), 60)], tmp_path, 1.0, lines) == 1
    assert json.loads((tmp_path / "summary.json").read_text())[0]["status"] == "no time left"
    assert "late: no time left" in capsys.readouterr().out


def test_a_name_that_is_not_there_ends_the_program_and_says_which_are(capsys: pytest.CaptureFixture[str]) -> None:
    every = plan(Path("forecasts"))
    assert [each.name for each in chosen(parser_of(""), every, "int4, bf16-served")] == ["int4", "bf16-served"]
    with pytest.raises(SystemExit):
        chosen(parser_of(""), every, "int5")
    assert "int5" in (said := capsys.readouterr().err) and "bf16-served" in said


def test_forecasts_that_a_row_lacks_are_missed_before_anything_runs() -> None:
    every = plan(Path("forecasts"))
    scores = ReuseForesight({}, 64.0)

    def lacks(measurements: list[Measurement], reuse: ReuseForesight | None, *names: str, tokens: int = 88) -> str:
        recording = draw_recording(SyntheticRouting(tokens=tokens, layers=2, experts=60, top_k=4))
        said = dict.fromkeys(names, made_up("perfect", recording, 2))
        return missing_forecasts(ForecastFile(recording, said, reuse), measurements) or ""

    assert "transformers" in lacks(every, scores, "heads", "lookahead", "previous")
    assert "reuse" in lacks(every, None, "heads", "lookahead", "previous", "transformers")
    assert "87 tokens, and 88" in lacks(every, scores, "heads", "lookahead", "previous", "transformers", tokens=87)
    assert lacks(every, scores, "heads", "lookahead", "previous", "transformers") == ""
    assert lacks(plan(Path("forecasts"), history=False), scores, "heads", "lookahead", "previous") == ""


def test_without_forecasts_of_an_expert_transformer_everything_else_is_measured() -> None:
    every, others = plan(Path("forecasts")), plan(Path("forecasts"), history=False)
    assert [each.name for each in others] == ["int4", "bf16-served"]
    for own, whole in zip(others, every, strict=False):
        left_out = [row.name for row in rows_of(whole) if row not in rows_of(own)]
        assert all(name in HISTORY_ROWS for name in left_out)
    assert not any(row.name in HISTORY_ROWS for each in others for row in rows_of(each))


@pytest.mark.parametrize("damage", ["absent", "empty"])
def test_a_file_that_holds_no_forecasts_ends_the_program_and_is_named(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "forecasts.safetensors"
    if damage == "empty":
        file.write_bytes(b"")
    monkeypatch.setattr("sys.argv", ["predict_run.py", str(tmp_path / "out"), "--forecasts", str(file)])
    with pytest.raises(SystemExit):
        main()
    assert str(file) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_that_was_cut_off_says_what_it_lacks(tmp_path: Path) -> None:
    rates, lfru, file = {"layer": 1e-4, "experts": 2e-5}, {"row": "LFRU"}, tmp_path / "int4.json"

    forecasts = tmp_path / "forecasts"
    forecasts.write_bytes(b"those of the run")

    def lacks(found: object) -> str | None:
        file.write_text(json.dumps(found))
        return too_little(file, forecasts)

    assert lacks({"rates": rates, "lines": [lfru]}) is None
    assert lacks({"rates": rates}) == lacks({}) == "no row was measured"
    assert "rates" in (lacks({"lines": [lfru]}) or "")
    assert "profiled" in (lacks({"rates": {"layer": 1e-4, "experts": None}, "lines": [lfru]}) or "")
    assert "LFRU" in (lacks({"rates": rates, "lines": [{"row": "LFRU again"}]}) or "")
    file.write_text('{"rates": ')
    assert too_little(file, forecasts) == "no row was measured"


def test_a_run_is_compared_with_replay_of_its_own_forecasts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forecasts, found = tmp_path / "forecasts.safetensors", {"rates": {"experts": 2e-5}, "lines": [{"row": "LFRU"}]}
    recording = draw_recording(SyntheticRouting(tokens=3, layers=2, experts=60, top_k=4))
    write_forecasts(forecasts, ForecastFile(recording, {}, None))
    (tmp_path / "int4.json").write_text(measured := json.dumps(found | {"forecasts": digest(forecasts)}))
    assert too_little(tmp_path / "int4.json", forecasts) is None
    write_forecasts(forecasts, ForecastFile(recording, {"heads": made_up("perfect", recording, 2)}, None))
    words = ["predict_run.py", str(tmp_path), "--forecasts", str(forecasts), "--replay"]
    monkeypatch.setattr("sys.argv", words)
    main()
    assert "other forecasts" in capsys.readouterr().out
    assert (tmp_path / "int4.json").read_text() == measured, "its figures stay as they are"
