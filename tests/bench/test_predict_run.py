"""What `predict_run.py` runs, what it refuses, and which forecasts replay takes."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import predict_run
from benchmarks.in_processes import Measurement, chosen, parser_of
from benchmarks.predict_rows import FORECASTS, HISTORY_ROWS, ROWS, digest
from benchmarks.predict_run import main, missing_forecasts, plan, rows_of, too_little
from steerpipe.arena.foresight import ReuseForesight
from steerpipe.bench.forecasts import ForecastFile, made_up, write_forecasts
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.synthetic import SyntheticRouting


def test_every_row_is_measured_with_the_driver_that_has_it() -> None:
    driven: dict[str, set[str]] = {"direct": set(), "served": set()}
    for each in plan(Path("forecasts")):
        words = list(each.words)
        driver = words[words.index("--driver") + 1] if "--driver" in words else "direct"
        for flag in ("--rows", "--round-rows"):
            given = words[words.index(flag) + 1]
            driven[driver] |= {ROWS[int(number)].name for number in given.split(",") if number}
    every = {row.name for row in ROWS if row.said != "recall 0.61"}
    nobody, not_the_engines = "LFRU, served", "LFRU + ExpertTransformer, 2 ahead, served"
    assert driven["direct"] | driven["served"] == every - {nobody, not_the_engines}
    assert driven["direct"] & {row.name for row in ROWS if row.served} == set()
    by_device = {row.name for row in ROWS if row.arithmetic == "history" and not row.served}
    assert by_device and driven["served"] & by_device == set()
    assert all(each.margin_seconds for each in plan(Path("forecasts"))), "each has time for its profile"


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


def recorded(file: Path, *names: str) -> Path:
    recording = draw_recording(SyntheticRouting(tokens=3, layers=2, experts=60, top_k=4))
    said = dict.fromkeys(names, made_up("perfect", recording, 2))
    write_forecasts(file, ForecastFile(recording, said, None))
    return file


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A folder with figures and the forecasts that they were measured with."""
    own = recorded(tmp_path / "run" / FORECASTS)
    found = {"rates": {"experts": 2e-5}, "lines": [{"row": "LFRU"}], "forecasts": digest(own)}
    (own.parent / "int4.json").write_text(json.dumps(found))
    return own.parent


def status(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> object:
    monkeypatch.setattr("sys.argv", ["predict_run.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_a_run_is_compared_with_replay_of_its_own_forecasts_alone(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Path, Path]] = []
    monkeypatch.setattr(predict_run, "fill_in", lambda *files: asked.append(files))
    assert status(monkeypatch, measured, "--replay") == 0, "where none are named, its own"
    assert asked == [(measured / FORECASTS, measured / "int4.json")]
    others = recorded(measured.parent / "others.safetensors", "heads")
    assert status(monkeypatch, measured, "--replay", "--forecasts", others) == 1, "nothing could be compared"
    assert len(asked) == 1, "its figures stay as they are"
    said = capsys.readouterr().out
    assert f"other forecasts than {others}: those of its run are {FORECASTS} in the run's folder" in said


def test_where_nothing_can_be_written_replay_says_so_before_it_begins(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(predict_run, "fill_in", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    assert status(monkeypatch, measured, "--replay") == 2
    assert f"cp -r --no-preserve=mode {measured} COPY" in capsys.readouterr().err


def test_a_run_keeps_its_forecasts_beside_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, given = tmp_path / "run", recorded(tmp_path / "recorded.safetensors", "heads")
    monkeypatch.setattr(predict_run, "missing_forecasts", lambda *_: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(predict_run, "run_all", lambda *_: 0)
    assert status(monkeypatch, out, "--forecasts", given) == 0
    assert (out / FORECASTS).read_bytes() == given.read_bytes() and len(list(out.iterdir())) == 1
    for same in ((), ("--forecasts", given), ("--forecasts", out / FORECASTS)):
        assert status(monkeypatch, out, *same) == 0
    others = recorded(tmp_path / "others.safetensors")
    assert f"name another folder, or {out / FORECASTS}" in str(status(monkeypatch, out, "--forecasts", others))
    assert (out / FORECASTS).read_bytes() == given.read_bytes()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_records_no_forecasts_for_figures_that_have_theirs(measured: Path, tmp_path: Path) -> None:
    def told(out: Path) -> str:
        words = ["make", "--dry-run", "bench-predict", f"OUT={out}", "ARGS=--replay"]
        root, environment = Path(__file__).parents[2], {"PATH": os.environ["PATH"]}
        return subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout

    (own,) = told(measured).splitlines()
    assert own.endswith(f"{measured} --forecasts {measured / FORECASTS} --replay")
    assert told(tmp_path / "none").endswith("--forecasts build/forecasts.safetensors --replay\n")
