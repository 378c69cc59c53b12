"""`steerpipe report` from the command line."""

import json
import zipfile
from pathlib import Path

from typer.testing import CliRunner

from steerpipe.cli import app


def test_a_report_is_one_file_whose_trace_can_be_replayed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.zip"
    words = ["report", str(model), "-o", str(out), "-p", "what nobody may see", "--max-tokens", "12"]
    result = CliRunner().invoke(app, [*words, "--fast-memory", "50%", "--cache-dir", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["error"] is None and told["file"] == str(out)
    with zipfile.ZipFile(out) as archive:
        assert archive.namelist() == told["parts"]
        archive.extractall(tmp_path)
        assert json.loads(archive.read("report.json"))["doctor"]["sections"]
        assert not any(b"nobody may see" in archive.read(name) for name in archive.namelist())
    replayed = CliRunner().invoke(app, ["replay", str(tmp_path / "routing.safetensors"), "--warmup", "2", "--json"])
    assert replayed.exit_code == 0, replayed.output


def test_a_run_that_fails_is_a_report_all_the_same(tmp_path: Path) -> None:
    out = tmp_path / "report.zip"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere"), "-o", str(out)])
    assert result.exit_code == 0 and "the run failed" in result.stdout and out.is_file()
