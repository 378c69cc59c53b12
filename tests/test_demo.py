"""`steerpipe demo`: what it says is measured, and a difference is no success."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from steerpipe import demo
from steerpipe.cli import app
from steerpipe.doctor.cpu import model_name

GOOD = demo.FamilyCheck("olmoe", 1e-6, 64, chunking_changes_bits=False, tokens_per_second=500.0)
HALF = demo.BudgetCheck("50%", 720, 0.7, 30.0, changes_bits=False)


def run(*options: str) -> Result:
    return CliRunner().invoke(app, ["demo", *options], env={"COLUMNS": "200"})


def one_line(result: Result) -> str:
    return result.stdout.rstrip("\n").splitlines()[-1]


def budgets_give(monkeypatch: pytest.MonkeyPatch, *checks: demo.BudgetCheck) -> None:
    monkeypatch.setattr(demo, "check_budgets", lambda _: ("Yes.", checks))


def test_the_embedded_model_gives_the_same_bits_with_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FAMILIES", ())
    monkeypatch.setattr(demo, "_ANSWER_TOKENS", 4)
    monkeypatch.setattr(demo, "_BUDGETS", ("auto", "12.5%"))
    told = json.loads(run("--json").stdout)
    assert told["answer"].strip()
    whole, eighth = told["budgets"]
    assert (whole["slots"], whole["hit_rate"]) == (1440, 1.0)
    assert eighth["slots"] == 180
    assert 0 < eighth["hit_rate"] < 1
    assert not eighth["changes_bits"]


def test_a_budget_that_changes_bits_is_named_and_the_status_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FAMILIES", ())
    budgets_give(monkeypatch, HALF, replace(HALF, budget="25%", changes_bits=True))
    shown = run()
    assert shown.exit_code == 1
    assert "other bits" in shown.stdout
    assert one_line(shown).startswith("DIFFERENT: the embedded model at 25%. ")


def test_other_bits_of_a_budget_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: the second answer is drawn at another temperature."""
    monkeypatch.setattr(demo, "FAMILIES", ())
    monkeypatch.setattr(demo, "_ANSWER_TOKENS", 4)
    monkeypatch.setattr(demo, "_BUDGETS", ("auto", "50%"))
    real = demo.Pipeline.stream

    def stream(pipe: demo.Pipeline, *given: Any, **named: Any) -> Any:
        return real(pipe, *given, **named | {"temperature": 0.0 if pipe.budget.resident else 2.0})

    monkeypatch.setattr(demo.Pipeline, "stream", stream)
    assert json.loads(run("--json").stdout)["differing"] == ["the embedded model at 50%"]


def test_a_family_that_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FAMILIES", ("olmoe",))
    budgets_give(monkeypatch, HALF)
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
    def check(family: str, _: Path) -> demo.FamilyCheck:
        return replace(GOOD, family=family, **(fault if family == "mixtral" else {}))

    monkeypatch.setattr(demo, "check_family", check)
    budgets_give(monkeypatch, HALF)
    shown, told = run(), run("--json")
    assert (shown.exit_code, told.exit_code) == (1, 1)
    assert one_line(shown).startswith("DIFFERENT: mixtral. ")
    found = json.loads(told.stdout)
    assert found["differing"] == ["mixtral"]
    assert (found["machine"], found["threads"]) == (model_name(), 1)
    assert [family["family"] for family in found["families"]] == list(demo.FAMILIES)


@pytest.mark.parametrize(("wrong", "expected"), [("tokens", 63), ("chunks", 64)])
def test_a_wrong_reference_or_other_bits_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str, expected: int
) -> None:
    """The comparison itself: one token of the reference is changed, or chunks of 16 change a bit."""
    real_reference, real_generate = demo._transformers, demo.Pipeline.generate

    def reference(folder: Path, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
        ids, logprobs = real_reference(folder, prompt)
        return ([ids[0] + 1, *ids[1:]] if wrong == "tokens" else ids), logprobs

    def generate(pipe: demo.Pipeline, *given: Any, **named: Any) -> Any:
        answer = real_generate(pipe, *given, **named)
        off = wrong == "chunks" and pipe.config.prefill_chunk == 16
        return replace(answer, logprobs=answer.logprobs[::-1]) if off else answer

    monkeypatch.setattr(demo, "_transformers", reference)
    monkeypatch.setattr(demo.Pipeline, "generate", generate)
    check = demo.check_family("olmoe", tmp_path / "olmoe")
    assert check.differs
    assert (check.same_tokens, check.chunking_changes_bits) == (expected, wrong == "chunks")
