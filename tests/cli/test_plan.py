"""`steerpipe plan`: the seed's arithmetic, and a model's budget without loading it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steerpipe.cli import app
from steerpipe.core.config import load_config
from steerpipe.runtime.plans import place_model, plan_placement

runner = CliRunner()
KEYS = Path(__file__).parents[2] / "examples" / "keystrokes.jsonl"
RATES = ["--tier", "fast memory=10GB", "--tier", "RAM=5GB", "--tier", "disk=2GB"]


def run(*words: str) -> str:
    result = runner.invoke(app, ["plan", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_seeds_inputs_give_the_seeds_figures() -> None:
    tiers = ("--tier", "PCIe=31.5GB", "--tier", "DDR5=28.6GB", "--tier", "NVMe=7.0GB")
    lines = [" ".join(line.split()) for line in run("--block", "2GB", *tiers, "--typing", "30").splitlines()]
    assert "PCIe 31.5 63.5 ms 1.9 2 to 3" in lines
    assert "DDR5 28.6 69.9 ms 2.1 2 to 3" in lines
    assert "NVMe 7.0 285.7 ms 8.6 9 to 10" in lines


def test_other_inputs_give_other_figures() -> None:
    lines = run("--block", "352MB", "--tier", "PCIe 5=55GB", "--tier", "SATA=0.5GB", "--typing", "1.5").splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert "PCIe 5 55.0 6.4 ms 0.0096 0 to 1" in rows and "SATA 0.5 704.0 ms 1.1 1 to 2" in rows


def test_a_block_as_json() -> None:
    found = json.loads(run("--block", "2GB", "--tier", "PCIe=31.5GB", "--typing", "30", "--json"))
    (row,) = found["typing"]
    assert (
        found["block_bytes"] == 2 * 10**9 and row["link"] == "PCIe" and row["tokens"] == pytest.approx(1.905, abs=1e-3)
    )


def test_the_embedded_model_under_a_budget_says_what_lies_where() -> None:
    found = json.loads(run(*RATES, "--fast-memory", "25%", "--ram", "50MiB", "--device", "cpu", "--json"))
    assert found["geometry"]["block_bytes"] == 16_384
    assert found["resident_share"] == 0.25 and found["typing_tokens_per_second"] == 0.65
    places = [row["where"] for row in found["memory"]]
    assert places == ["RAM", "RAM", "RAM", "RAM", "disk"]
    assert [row["link"] for row in found["typing"]] == ["RAM", "disk"]
    assert found["typing"][1]["seconds"] == pytest.approx(16_384 / 2e9)
    assert found["missing_bytes"] == 1080 * 16_384
    demand = [floor["demand_seconds"] for floor in found["token_floors"]]
    assert demand == sorted(demand) and len(demand) == 4


def test_a_cpu_that_computes_where_blocks_lie_has_its_own_floor(model: Path, tmp_path: Path) -> None:
    pack = str(tmp_path / "pack")
    assert runner.invoke(app, ["pack", str(model), pack, "--experts", "int8"]).exit_code == 0
    words = [pack, *RATES, "--fast-memory", "50%", "--ram", "50MiB", "--device", "cpu"]
    assert "with CPU" in run(*words, "--tier", "CPU=8GB") and "with CPU" not in run(*words)
    placement = place_model(Path(pack), load_config({"fast_memory": "50%", "ram": "50MiB", "device": "cpu"}))
    for device, helps in (("cpu", True), ("cuda", False)):  # nothing is page-locked
        plan = plan_placement(replace(placement, device=device), 1e10, {"RAM": 5e9, "CPU": 8e9}, 1.0, 64)
        assert all((floor.shared_seconds != floor.demand_seconds) is helps for floor in plan.tokens[1:])


def test_a_resident_model_has_nothing_to_cover() -> None:
    text = run("--tier", "fast memory=10GB", "--tier", "RAM=5GB", "--device", "cpu")
    assert "nothing to cover" in text and "every expert is there" in text


def test_a_checkpoint_is_planned_without_being_packed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEERPIPE_CACHE_DIR", str(tmp_path / "cache"))
    found = json.loads(run(str(model), *RATES, "--fast-memory", "50%", "--device", "cpu", "--json"))
    assert found["resident_share"] == 0.5 and found["geometry"]["block_bytes"] % 4096 == 0
    assert not (tmp_path / "cache").exists()


def test_links_that_are_not_given_are_measured() -> None:
    found = json.loads(run("--fast-memory", "25%", "--device", "cpu", "--json"))
    assert found["memory_bytes_per_second"] > 1e8 and found["typing"][0]["bytes_per_second"] > 1e6


def test_a_persons_speed_is_taken_from_a_log() -> None:
    found = json.loads(run("--block", "2GB", "--tier", "x=1GB", "--keystrokes", str(KEYS), "--json"))
    assert 0.3 < found["typing_tokens_per_second"] < 1.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--block", "2GB"], "--tier"),
        (["--block", "2GB", "--tier", "31.5GB"], "NAME=RATE"),
        (["--block", "2GB", "--tier", "PCIe=fast"], "bytes"),
        (["--block", "2GB", "--tier", "PCIe=1GB", "--fast-memory", "25%"], "fast_memory"),
        (["some/model", "--block", "2GB", "--tier", "PCIe=1GB"], "a model"),
        (["--block", "2GB", "--tier", "PCIe=1GB", "--typing", "0"], "--typing"),
        (["--block", "2GB", "--tier", "PCIe=1GB", "--typing", "1", "--keystrokes", "log"], "both"),
        (["--block", "2GB", "--tier", "PCIe=1GB", "--keystrokes", "no-such-log"], "no-such-log"),
        (["--tier", "moon=1GB"], "moon"),
        (["--tier", "CPU=8GB", "--device", "cpu"], "int4 experts"),
        (["--fast-memory", "1KiB"], "at least"),
        (["--fast-memory", "lots"], "fast_memory"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_fix(words: list[str], said: str) -> None:
    result = runner.invoke(app, ["plan", *words])
    assert result.exit_code == 2, result.output
    assert said in result.stderr and "fix:" in result.stderr and result.stdout == ""
