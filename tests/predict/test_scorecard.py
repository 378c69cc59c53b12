"""Counts of what predictions were worth add up."""

import numpy as np

from steerpipe.predict.scorecard import Score, Scorecard


def mask(*which: int) -> np.ndarray:
    held = np.zeros(6, dtype=np.bool_)
    held[list(which)] = True
    return held


def test_recall_on_misses_leaves_out_what_was_there() -> None:
    card = Scorecard(layers=2)
    card.settle(
        "head",
        1,
        routed=np.array([0, 3]),
        named=np.array([3, 5]),
        absent=mask(3, 4, 5),
        sent=mask(3, 5),
        ready=mask(0, 3),
    )
    score = card.total("head")
    assert score == Score(decisions=1, routed=2, named=1, missing=1, foreseen=1, sent=2, used=1, ready=1)
    assert (score.recall, score.recall_on_misses, score.precision) == (0.5, 1.0, 0.5)


def test_a_guess_that_is_still_on_its_way_is_used_but_not_ready() -> None:
    card = Scorecard(layers=1)
    card.settle("head", 0, routed=np.array([2]), named=np.array([2]), absent=mask(2), sent=mask(2), ready=mask())
    assert (card.total("head").used, card.total("head").ready) == (1, 0)


def test_layers_and_predictors_are_apart_and_add_up() -> None:
    card = Scorecard(layers=3)
    for layer in (0, 2, 2):
        card.settle("a", layer, routed=np.array([1]), named=np.array([1]), absent=mask(1), sent=mask(), ready=mask())
    card.settle("b", 1, routed=np.array([1]), named=np.array([0]), absent=mask(), sent=mask(), ready=mask())
    assert card.layer("a", 2).decisions == 2 and card.layer("a", 1) == Score()
    assert card.total("a") == card.layer("a", 0) + card.layer("a", 2)
    assert card.total("a") - card.layer("a", 0) == card.layer("a", 2)
    assert card.total("b").recall_on_misses == 0.0 and card.total("nobody") == Score()
    assert card.names == ("a", "b")
