"""In which order `predict_on_gpu.py` measures, and what is there when its time is up or its last part fails."""

import json
import math
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.predict_parts import Log
from benchmarks.predict_rows import Rates
from steerpipe.bench.shapes import make_shape
from steerpipe.store.formats import ExpertFormat

program = pytest.importorskip("benchmarks.predict_on_gpu")  # it wants Triton
rates = pytest.importorskip("benchmarks.predict_rates")
RATES = Rates(74e-6, 18e-6, 0.0, 99e-6, end=1e-4, between=5e-4)


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> dict[str, Any]:
    """What the file has in the end. Every run takes a second, and what the profiler tells is made up."""
    bench = SimpleNamespace(
        shape=SimpleNamespace(layers=24), link=5e10, resident=lambda: 1e-3, history="history",
        live=lambda row, share: dict.fromkeys(("live_ms", "link_utilisation", "misses", "late", "cut_mb"), 1.0),
        given=Namespace(**{
            "chunks": "4608x1", "skip_no_cache": True, "shares": "0.5", "rows": "0", "rounds": 2, "round_rows": "1,3",
            "round_shares": "0.5,0.25", "seconds": math.inf,
        } | given),
    )  # fmt: skip
    monkeypatch.setattr(Log, "seconds", lambda log: float(len(log.found.get("lines", ()))))
    monkeypatch.setattr(program, "measure_rates", lambda *_: RATES)
    for part in ("median_step", "end_of_step", "median_after"):
        monkeypatch.setattr(rates, part, lambda *_, **__: 2e-3)
    file = folder / "int4.json"
    try:
        program.measure(bench, Log(file))
    finally:
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_no_row_begins_when_the_time_is_up_and_the_profile_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "kernels", lambda *_: [])
    whole, late = (measured(tmp_path, monkeypatch, seconds=each) for each in (math.inf, 4))
    assert len(whole["lines"]) == 1 + 2 * 2 * 2 and "not_begun" not in whole
    assert late["lines"] == whole["lines"][:4] and late["not_begun"] == 5
    assert late["rates"] == whole["rates"] and late["rates"]["experts"] is not None


def test_what_never_ran_on_a_card_costs_no_other_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(bench: object, new: int, kind: int) -> list[object]:
        if kind == rates.HISTORY:
            raise RuntimeError("the graph cannot be captured")
        return []

    monkeypatch.setattr(rates, "kernels", kernels)
    with pytest.raises(RuntimeError, match="captured"):
        measured(tmp_path, monkeypatch)
    found = json.loads((tmp_path / "int4.json").read_text())
    assert len(found["lines"]) == 9 and found["rates"]["experts"] is not None and "beside_delay" not in found
    monkeypatch.setattr(rates, "kernels", lambda *_: [])
    scale = (74e-6 * 24 - 5e-4) / 2e-3
    assert measured(tmp_path, monkeypatch)["beside_delay"] == pytest.approx(scale * 2e-3)


def test_a_step_that_was_held_up_once_does_not_count_in_the_seeds_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([[1e-3, 9e-3], [2e-3, 2e-3], [1e-3, 1e-3], [2e-3, 5e-3], [1e-3, 1e-3], [2e-3, 2e-3]])
    links = iter([1e9, 4e9, 2e9])
    bench = SimpleNamespace(
        shape=make_shape("qwen1.5-moe", ExpertFormat.INT4, 1024), given=Namespace(tokens=2, warmup=1),
        ladder=SimpleNamespace(measure_link=lambda: next(links)), device=None,
        open=lambda *_, **__: nullcontext(), rig=SimpleNamespace(predict=lambda *_: None),
        steps=lambda *_: (next(steps), {"misses": 96.0}),
    )  # fmt: skip
    monkeypatch.setattr(program, "made_up_forecaster", lambda *_, **__: None)
    found = program.Bench.no_cache(bench)
    assert (found["on demand"], found["lookahead, committed"]) == pytest.approx((1.0, 2.0))
    assert found["copy floor"] == pytest.approx(bench.shape.routed_bytes / 2e9 * 1e3)
    assert found["rounds"]["on demand"] == pytest.approx([5.0, 1.0, 1.0]) and len(found["rounds"]["copy floor"]) == 3
    assert found["on demand, misses"] == 96.0


@pytest.mark.parametrize(("kind", "asked"), [(rates.TAPPED, "heads"), (rates.HISTORY, "history")])
def test_a_rate_is_measured_of_who_is_asked_in_the_rows(kind: int, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, predicted = SimpleNamespace(_shelf=SimpleNamespace()), list[str]()
    monkeypatch.setattr(rates, "made_up_forecaster", lambda _, arithmetic, *__: arithmetic)
    monkeypatch.setattr(rates, "made_up_network", lambda _, arithmetic, *__: arithmetic)
    bench = SimpleNamespace(
        shape=make_shape("qwen1.5-moe", ExpertFormat.INT4, 1024), device=None, history="history",
        open=lambda *_: nullcontext(source), rig=SimpleNamespace(predict=lambda who, _: predicted.append(who)),
    )  # fmt: skip
    with rates.known(bench, 1, kind) as (opened, routing):
        assert opened is source and len(routing.ids) == rates.SETTLE + rates.STEPS
    assert predicted == [asked] and source._shelf.throttle.allows()


@pytest.mark.parametrize(("history", "missing"), [("history", 0), ("transformers", 1)])
def test_the_delay_of_an_answer_is_measured_where_it_cannot_be_taken_for_anothers(
    history: str, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(rates, "kernels", lambda _, new, kind: seen.append((new, kind)) or [])
    monkeypatch.setattr(rates, "median_after", lambda *_, **__: 2e-3)
    bench = SimpleNamespace(shape=SimpleNamespace(layers=24), history=history)
    log = SimpleNamespace(found={"profiled step": 74e-6 * 24 - 5e-4})
    assert rates.history_delay(bench, log, RATES) == pytest.approx(2e-3)
    assert seen == [(missing, rates.HISTORY)]
