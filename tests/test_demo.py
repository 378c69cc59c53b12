"""`steerpipe demo`: what it says is measured, and a difference is no success."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from steerpipe.cli import app
from steerpipe.core.config import EngineConfig
from steerpipe.demo import families, show, ways
from steerpipe.doctor.cpu import model_name

GOOD = families.FamilyCheck("olmoe", 1e-6, 64, chunking_changes_bits=False, tokens_per_second=500.0)
SPEED = ways.Speed(40.0, 30.0)
LRU = ways.WayCheck("LRU", 0.5, SPEED, SPEED, changes_bits=False)


def run(*options: str) -> Result:
    return CliRunner().invoke(app, ["demo", *options], env={"COLUMNS": "200"})


def one_line(result: Result) -> str:
    return result.stdout.rstrip("\n").splitlines()[-1]


def ways_give(monkeypatch: pytest.MonkeyPatch, *checks: ways.WayCheck) -> None:
    """These, and those that they do not name as they should be."""
    named = {check.name: check for check in (*(replace(LRU, name=way.name) for way in ways.WAYS), *checks)}
    monkeypatch.setattr(show, "run_ways", lambda _: ways.Contest("Yes.", 4, 4, 1e6, tuple(named.values())))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ways, a short answer, a link that is hardly slowed, and no families."""
    monkeypatch.setattr(show, "FAMILIES", ())
    monkeypatch.setattr(ways, "TOKENS", (3, 4))
    monkeypatch.setattr(ways, "WAYS", (ways.WAYS[0], *ways.WAYS[2:]))
    monkeypatch.setattr(ways, "LAYERS_PER_BLOCK", 0.5)


@pytest.mark.usefixtures("short")
def test_every_way_gives_the_same_bits_and_only_the_link_makes_stalls() -> None:
    told = json.loads(run("--json").stdout)
    contest = told["contest"]
    assert contest["answer"].strip() and contest["tokens"] in (3, 4) and told["differing"] == []
    demand, kept, predicted, resident = contest["ways"]
    assert demand["hit_rate"] < 0.2 < min(kept["hit_rate"], predicted["hit_rate"])
    assert max(kept["hit_rate"], predicted["hit_rate"]) < resident["hit_rate"] == 1.0
    assert resident["paced"] is None and resident["unpaced"]["stall_ms"] == 0.0
    for each in (demand, kept, predicted):
        assert 0 < each["paced"]["stall_ms"] < each["paced"]["token_ms"]
    assert demand["paced"]["stall_ms"] > predicted["paced"]["stall_ms"]


def test_the_predicted_way_predicts_however_short_the_answer_is() -> None:
    (predicted,) = (way for way in ways.WAYS if way.name == "predicted")
    with ways._open(**predicted.settings, pace="40MB") as pipe:
        pipe.generate(ways.PROMPT, **ways._options(4))
        assert pipe.prediction is not None and (said := pipe.prediction.as_json()) is not None
    assert said["predictor"] == "trained heads" and said["verdict"] == "prediction by trained heads: on, as asked for"
    assert said["scores"]["trained heads"]["sent"] > 0


def test_the_pace_is_that_of_qwen_over_pcie_4() -> None:
    """A block of 17.3 MB at 25 GB/s takes 0.692 ms, a layer computes 0.1 ms."""
    assert pytest.approx(6.92, abs=0.01) == ways.LAYERS_PER_BLOCK
    names = [way.name for way in ways.WAYS]
    assert names == ["on demand", "LRU", "LFRU", "predicted"]
    contest = ways.Contest("Yes.", 4, 4, 1e6, (LRU,))
    assert "Qwen1.5-MoE in bf16 over PCIe 4" in str(ways.ways_table(contest).caption)


def test_it_is_said_where_a_part_of_the_answer_was_timed() -> None:
    whole, part = (ways.ways_table(ways.Contest("Yes.", 16, tokens, 1e6, (LRU,))).title for tokens in (16, 13))
    assert str(whole).startswith("One answer, its 16 tokens,") and str(part).startswith(
        "One answer, 13 of its 16 tokens,"
    )


@pytest.mark.parametrize(
    ("predicted_ms", "said"), [(30.0, "25% less than"), (50.0, "25% MORE than"), (40.0, "0% less than")]
)
def test_what_prediction_is_worth_is_said_as_it_is(predicted_ms: float, said: str) -> None:
    checks = [replace(LRU, name=way.name) for way in ways.WAYS[:-1]]
    predicted = replace(LRU, name="predicted", paced=ways.Speed(predicted_ms, 1.0), unpaced=ways.Speed(9.0, 1.0))
    line = ways.gain_line(ways.Contest("Yes.", 4, 4, 1e6, (*checks, predicted)))
    assert said in line and f"{predicted_ms:.0f} with prediction" in line and " 9 " not in line


def test_of_runs_on_this_machine_the_one_in_the_middle_is_shown() -> None:
    runs = [ways._Run(ways.Speed(ms, ms / 2), 0.5, same=True) for ms in (7.0, 90.0, 8.0)]
    slowed = ways._Run(SPEED, 0.25, same=True)
    check = ways._check("LRU", slowed, *runs)
    assert (check.unpaced, check.paced, check.hit_rate) == (ways.Speed(8.0, 4.0), SPEED, 0.25)
    assert not check.changes_bits
    for odd in range(4):
        every = [replace(each, same=number != odd) for number, each in enumerate((slowed, *runs))]
        assert ways._check("LRU", *every).changes_bits


def test_a_way_that_changes_bits_is_named_and_the_status_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "FAMILIES", ())
    ways_give(monkeypatch, LRU, replace(LRU, name="LFRU", changes_bits=True))
    shown = run()
    assert shown.exit_code == 1
    assert "other bits" in shown.stdout
    assert one_line(shown).startswith("DIFFERENT: the embedded model, LFRU. ")


@pytest.mark.usefixtures("short")
def test_other_bits_of_a_way_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: all answers but the resident one are drawn at another temperature."""
    real = ways.Pipeline.stream

    def stream(pipe: ways.Pipeline, *given: Any, **named: Any) -> Any:
        whole = pipe.counters() is None
        return real(pipe, *given, **named | {"temperature": 0.0 if whole else 2.0})

    monkeypatch.setattr(ways.Pipeline, "stream", stream)
    assert json.loads(run("--json").stdout)["differing"] == [
        "the embedded model, on demand", "the embedded model, LFRU", "the embedded model, predicted",
    ]  # fmt: skip


def test_a_family_that_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "FAMILIES", ("olmoe",))
    ways_give(monkeypatch, LRU)
    result = run()
    assert result.exit_code == 0, result.output
    assert "64 of 64" in result.stdout and "same bits" in result.stdout
    assert f"tokens/s on {model_name()}, 1 thread" in result.stdout
    assert one_line(result).startswith("All 1 families compute what transformers computes")


@pytest.mark.parametrize(
    "fault",
    [
        {"same_tokens": 63},
        {"same_tokens": 0},
        {"chunking_changes_bits": True},
        {"budget_changes_bits": True},
        {"greatest_difference": 0.01},
        {"greatest_difference": float("nan")},
    ],
    ids=str,
)
def test_a_family_that_differs_is_named_and_the_status_says_so(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    def check(family: str, _: Path) -> families.FamilyCheck:
        return replace(GOOD, family=family, **(fault if family == "mixtral" else {}))

    monkeypatch.setattr(show, "check_family", check)
    ways_give(monkeypatch, LRU)
    shown, told = run(), run("--json")
    assert (shown.exit_code, told.exit_code) == (1, 1)
    assert one_line(shown).startswith("DIFFERENT: mixtral. ")
    found = json.loads(told.stdout)
    assert found["differing"] == ["mixtral"]
    assert (found["machine"], found["threads"]) == (model_name(), 1)
    assert [family["family"] for family in found["families"]] == list(show.FAMILIES)


@pytest.mark.parametrize(("wrong", "expected"), [("tokens", 63), ("chunks", 64)])
def test_a_wrong_reference_or_other_bits_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str, expected: int
) -> None:
    """The comparison itself: one token of the reference is changed, or chunks of 16 change a bit."""
    real_reference, real_generate = families._transformers, families.Pipeline.generate

    def reference(folder: Path, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
        ids, logprobs = real_reference(folder, prompt)
        return ([ids[0] + 1, *ids[1:]] if wrong == "tokens" else ids), logprobs

    def generate(pipe: families.Pipeline, *given: Any, **named: Any) -> Any:
        answer = real_generate(pipe, *given, **named)
        off = wrong == "chunks" and pipe.config.prefill_chunk == 16
        return replace(answer, logprobs=answer.logprobs[::-1]) if off else answer

    monkeypatch.setattr(families, "_transformers", reference)
    monkeypatch.setattr(families.Pipeline, "generate", generate)
    check = families.check_family("olmoe", tmp_path / "olmoe")
    assert check.differs
    assert (check.same_tokens, check.chunking_changes_bits) == (expected, wrong == "chunks")


def test_the_environment_makes_no_other_contest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"QUALITY": "drop", "PACE": "5MB", "FAST_MEMORY": "50%", "DEVICE": "cpu"}.items():
        monkeypatch.setenv(f"STEERPIPE_{name}", value)
    assert not families.check_family("olmoe", tmp_path / "olmoe").differs
    asked: list[Any] = []
    monkeypatch.setattr(ways, "Pipeline", lambda config: asked.append(config))
    for way in ways.WAYS:
        ways._open(**way.settings)
    fixed: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "profile": False}
    assert asked == [EngineConfig(**fixed, **way.settings) for way in ways.WAYS]
