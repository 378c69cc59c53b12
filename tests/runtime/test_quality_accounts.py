"""Accounts of many answers: the one that is computed keeps its own, however many were dropped beside it."""

import numpy as np

from steerpipe.core.ids import SequenceId
from steerpipe.runtime.quality_accounts import REMEMBERED, Accounts


def test_an_answer_that_runs_outlives_those_that_nobody_took() -> None:
    accounts = Accounts()
    for number in range(1, REMEMBERED + 8):
        accounts.begin((SequenceId(0), SequenceId(number)))
        accounts.note(0, np.zeros((2, 4), dtype=np.bool_))
    assert accounts.take(SequenceId(0)).uses == 4 * (REMEMBERED + 7)
    assert accounts.take(SequenceId(1)).uses == 0
