"""Every program in benchmarks/ says what it wants before it needs anything."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = sorted(each.name for each in BENCHMARKS.glob("*.py") if "__main__" in each.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_tells_its_usage(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: {name}")
