"""What `in_processes.py` keeps of processes that end badly, and that it leaves none behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.in_processes import Measurement, run, run_all
from benchmarks.predict_run import lines

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


def test_what_there_is_no_time_for_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all([Measurement("late", ("-c", "pass"), 60)], tmp_path, 1.0, lines) == 1
    assert json.loads((tmp_path / "summary.json").read_text())[0]["status"] == "no time left"
    assert "late: no time left" in capsys.readouterr().out
