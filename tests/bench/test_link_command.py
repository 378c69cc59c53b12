"""`bench link` from the command line; copies are in memory where there is no GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import steerpipe.bench.link as links
from steerpipe.bench.command import main
from steerpipe.cli import app


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same measurement with little memory and few rounds."""
    real = links.measure_links

    def measure(device: Any, **named: Any) -> links.LinkReport:
        return real(device, sizes=(1 << 18, 1 << 20), arena_bytes=8 << 20, rounds=2, **named)

    monkeypatch.setattr(links, "measure_links", measure)


@pytest.mark.usefixtures("small")
def test_rates_are_shown_and_written(tmp_path: Path) -> None:
    file = tmp_path / "link.json"
    result = CliRunner().invoke(app, ["bench", "link", "--json", str(file), "--disk", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "scattered" in result.stdout and "256 KiB" in result.stdout
    told = json.loads(result.stdout.splitlines()[-1])
    assert told == json.loads(file.read_text())
    assert told["benchmark"] == "link" and told["machine"]["torch"]
    assert [each["block_bytes"] for each in told["pinned"]] == [1 << 18, 1 << 20]
    assert told["best"] > 0 and told["disk"] > 0


@pytest.mark.usefixtures("small")
def test_the_module_measures_links_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["link", "--json", str(tmp_path / "link.json")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["disk"] is None
    assert main(["link", "--disk", str(tmp_path / "absent")]) == 2
    assert "is no folder" in capsys.readouterr().err
