"""`steerpipe replay` from the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from steerpipe.cli import app


def test_a_recorded_run_is_placed_between_on_demand_and_resident(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    routing = np.stack([[draw.permutation(8)[:2] for _ in range(3)] for _ in range(120)]).astype(np.int16)
    save_file({"routing": routing}, tmp_path / "trace.safetensors")
    words = ["replay", str(tmp_path / "trace.safetensors"), "--block", "1MB", "--link", "1GB", "--layer-ms", "0.5"]
    result = CliRunner().invoke(app, [*words, "--residency", "0.5", "--warmup", "20", "--recall", "0.9", "--json"])
    assert result.exit_code == 0, result.output
    runs = {run["name"]: run for run in json.loads(result.stdout)["runs"]}
    tpot = {name: run["tpot_mean_seconds"] for name, run in runs.items()}
    assert tpot["all resident"] == pytest.approx(3 * 0.5e-3)
    assert tpot["on demand"] == pytest.approx(3 * (0.5e-3 + 2 * 1e-3))
    assert tpot["all resident"] < tpot["belady"] <= tpot["lfru"] < tpot["on demand"]
    slower = CliRunner().invoke(app, [*words, "--warmup", "20", "--ask-us", "250", "--decode-us", "500", "--json"])
    spent = {run["name"]: run["tpot_mean_seconds"] for run in json.loads(slower.stdout)["runs"]}
    assert spent["on demand"] == pytest.approx(3 * (0.5e-3 + 0.25e-3 + 2 * (1e-3 + 0.5e-3)))
    assert spent["all resident"] == pytest.approx(3 * 0.5e-3)
    perfect = [*words, "--warmup", "20", "--perfect", "1", "--json"]
    ends = ["--end-us", "200", "--between-us", "300", "--beside-us", "100"]
    costs = ["--tap-us", "50", "--delay-us", "900", "--guess-link", "0.5GB", "--guesses", "1", "--stops"]
    free, apart, costly = (
        {run["name"]: run["tpot_mean_seconds"] for run in json.loads(CliRunner().invoke(app, each).stdout)["runs"]}
        for each in (perfect, [*perfect, *ends], [*perfect, *costs])
    )
    assert apart["all resident"] == pytest.approx(free["all resident"] + 0.5e-3 + 3 * 0.1e-3)
    assert costly["lfru"] == free["lfru"] and free["lfru + perfect"] < costly["lfru + perfect"]
    said = json.loads(CliRunner().invoke(app, [*perfect, *costs]).stdout)["machine"]["looking"]
    assert said == {
        "tap_seconds": 50 / 1e6, "delay_seconds": 900 / 1e6, "most": 1, "bytes_per_second": 5e8, "stops": True,
        "tap_more": [],
    }  # fmt: skip
    shown = CliRunner().invoke(app, [*words, "--tokens", "40", "--warmup", "0"])
    assert shown.exit_code == 0 and "TPOT" in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.safetensors"], "does not exist"),
        (["--recall", "often"], "often"),
        (["--recall", "1.5"], "1.5"),
        (["--residency", "0"], "residency"),
        (["--link", "fast"], "fast"),
        (["--layer-ms", "-1"], "--layer-ms is -1"),
        (["--decode-us", "-1"], "--decode-us is -1"),
        (["--layer-ms", "inf"], "--layer-ms is inf"),
        (["--tap-us", "-1"], "--tap-us is -1"),
        (["--guesses", "0"], "--guesses is 0"),
        (["--chunk", "0"], "--chunk is 0"),
        (["--guess-link", "fast"], "fast"),
        (["--guess-link", "0"], "--guess-link is 0"),
        (["--tap-us", "5", "--delay-us", "9", "--stops"], "--tap-us, --delay-us, --stops without a predictor"),
        (["--guess-link", "1GB", "--guesses", "1"], "--guess-link, --guesses without a predictor"),
        (["--between-us", "nan"], "--between-us is nan"),
        (["--layer-ms", "nan"], "--layer-ms is nan"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--experts", "60"], "--experts without a trace"),
        (["--seed", "-1"], "--seed is -1"),
        (["--perfect", "-3"], "--perfect is -3"),
        (["--warmup", "-5"], "--warmup is -5"),
        (["--warmup", "10"], "--warmup is 10, and of 10 tokens none is left to measure"),
        (["--block", "9" * 400], "is not an amount of bytes"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_with_a_fix(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["replay", "--tokens", "10", "--warmup", "0", *words])
    assert result.exit_code == 2, result.output
    assert said in result.stderr and "fix:" in result.stderr and result.stdout == ""


@pytest.mark.parametrize(
    ("words", "warmup", "measured"),
    [
        (["--tokens", "20"], 10, 10),
        (["--tokens", "402"], 200, 202),
        (["--tokens", "20", "--warmup", "19"], 19, 1),
    ],
)
def test_what_is_measured_is_said_and_a_warm_up_leaves_half(words: list[str], warmup: int, measured: int) -> None:
    told = json.loads(CliRunner().invoke(app, ["replay", *words, "--json"]).stdout)
    assert told["warmup_tokens"] == warmup and {run["tokens"] for run in told["runs"]} == {measured}
    shown = " ".join(CliRunner().invoke(app, ["replay", *words]).stdout.split())
    assert f"measured: {measured} tokens after {warmup} of warm-up" in shown
