import pytest
import torch

from steerpipe.arena import evaluation
from steerpipe.arena.evaluation import evaluate
from steerpipe.predict.bounds import Oracle, Random
from tests.arena.traces import GEOMETRY, Successor, draw, packed


def test_a_predictor_that_knows_the_rule_is_right_within_the_token_and_at_a_loss_before_it() -> None:
    score = evaluate(Successor(), packed(draw()), 2)
    assert [score.layer(target).recall for target in (2, 3)] == [1.0, 1.0]
    assert score.overall().recall == 1.0
    assert score.over(0, 2).recall < 0.5
    assert score.overall().decisions == 2 * 6 * 20
    assert score.layer(0).decisions == 6 * 19  # no decision before the first token of a text


def test_pieces_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = packed(draw())
    whole = evaluate(Successor(), trace, 1).overall()
    monkeypatch.setattr(evaluation, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(evaluation.predictions, "__defaults__", (7,))
    assert evaluate(Successor(), trace, 1).overall() == whole


def test_only_uses_that_were_missed_count_for_recall_on_misses() -> None:
    trace = packed(draw())
    missed = torch.zeros(trace.experts.shape, dtype=torch.bool)
    missed[5, 3, 1] = True
    found = evaluate(Successor(), trace, 1, missed).overall()
    assert (found.missed, found.recall_on_misses) == (1, 1.0)


def test_bounds_are_where_they_belong() -> None:
    trace = packed(draw(prompts=40, tokens=50))
    assert evaluate(Oracle(), trace, 3).overall().recall == 1.0
    chance = GEOMETRY.top_k / GEOMETRY.experts
    assert evaluate(Random(), trace, 1).overall().recall == pytest.approx(chance, abs=0.02)
