"""A predictor that does not pay is switched off by what it was measured to cost."""

import random
from itertools import pairwise

from steerpipe.predict.trials import WATCH_TOKENS, Trials, Verdict, Watch


def run(
    trials: Trials, seconds: list[float], tokens: int, noise: float = 0.0, seed: int = 0
) -> tuple[float, list[Verdict]]:
    """Total time of so many tokens when way i takes seconds[i], and the verdicts on the way."""
    draw = random.Random(seed)
    total, verdicts = 0.0, []
    for _ in range(tokens):
        took = seconds[trials.way] * (1 + noise * (draw.random() - 0.5))
        total += took
        verdict = trials.observe(took)
        verdicts += [verdict] if verdict else []
    return total, verdicts


def test_the_quickest_way_is_chosen_and_kept() -> None:
    trials = Trials(["none", "a", "b"])
    _, verdicts = run(trials, [1.0, 0.9, 0.7], 8 * 4 * 3)
    assert [verdict.chosen for verdict in verdicts] == [2]
    assert trials.way == 2 and not trials.trying
    assert verdicts[0].line() == "prediction by b saves 30% per token (700.00 instead of 1000.00 ms): on"


def test_what_does_not_pay_is_switched_off_and_the_run_says_so() -> None:
    trials = Trials(["none", "a", "b"])
    _, verdicts = run(trials, [1.0, 1.2, 1.1], 8 * 4 * 3)
    assert trials.way == 0
    assert verdicts[0].line() == "prediction does not pay here (b: +10% per token): off"


def test_less_than_noise_is_no_gain() -> None:
    trials = Trials(["none", "a"])
    run(trials, [1.0, 0.995], 8 * 4 * 2)
    assert trials.way == 0


def test_a_harmful_way_costs_less_than_three_percent_over_4000_tokens() -> None:
    for seed in range(20):
        total, _ = run(Trials(["none", "bad"]), [1.0, 1.5], 4000, noise=0.5, seed=seed)
        assert total < 4000 * 1.03


def test_trials_come_less_and_less_often_while_they_agree() -> None:
    trials = Trials(["none", "a"], turn_tokens=2, rounds=1, first_rest_tokens=10, longest_rest_tokens=40)
    at = [token for token in range(300) if trials.observe([1.0, 2.0][trials.way]) is not None]
    assert [later - earlier - 4 for earlier, later in pairwise(at)][:5] == [10, 20, 40, 40, 40]


def test_a_way_that_begins_to_pay_is_found_again() -> None:
    trials = Trials(["none", "a"])
    run(trials, [1.0, 1.3], 200)
    assert trials.way == 0
    _, verdicts = run(trials, [1.0, 0.6], 600)
    assert verdicts[-1].chosen == 1


def test_what_an_earlier_run_chose_runs_at_once_and_is_tried_again_after_a_rest() -> None:
    trials = Trials(["none", "a"], first_rest_tokens=20, chosen=1)
    assert trials.way == 1 and not trials.trying and not trials.left
    _, verdicts = run(trials, [1.0, 1.5], 20)
    assert not verdicts and trials.trying
    _, verdicts = run(trials, [1.0, 1.5], 8 * 4 * 2)
    assert [verdict.chosen for verdict in verdicts] == [0] and trials.way == 0


def test_an_earlier_run_is_said_to_be_one() -> None:
    paid, not_paid = Verdict(("none", "a"), (2.0, 1.5), 1), Verdict(("none", "a"), (2.0, 2.5), 0)
    assert paid.line_of_the_past() == "prediction by a saved 25% per token in an earlier run: on"
    assert not_paid.line_of_the_past() == "prediction did not pay in an earlier run: off for now"


def test_the_first_token_of_a_turn_does_not_count() -> None:
    trials = Trials(["none", "a"], turn_tokens=4, rounds=2)
    for token in range(16):
        first = token % 4 == 0
        verdict = trials.observe(100.0 if first else [1.0, 0.5][trials.way])
    assert verdict is not None and verdict.seconds == (1.0, 0.5)


def test_a_turn_in_which_something_else_happened_decides_nothing() -> None:
    trials = Trials(["none", "a"])
    verdict = None
    for token in range(8 * 4 * 2):
        assert trials.left == 8 * 4 * 2 - token
        verdict = trials.observe(50.0 if token == 12 else [1.0, 0.9][trials.way])  # a graph was captured: way a
    assert verdict is not None and verdict.chosen == 1 and trials.left == 0


def watched(seconds: float, waited: float) -> Watch:
    watch = Watch()
    assert [watch.observe(seconds, waited) for _ in range(WATCH_TOKENS)][-2:] == [False, True]
    return watch


def test_what_costs_more_than_it_could_ever_save_is_not_tried() -> None:
    waits = watched(1.0, 0.3)  # at most .3 s can be hidden, .24 with a usual recall
    assert waits.promises(0.2) and not waits.promises(0.25)
    assert not watched(1.0, 0.0).promises(0.0)  # never waits: nothing to save
    computes_little = watched(1.0, 0.95)  # .05 s of compute hide no more than .05 s of stall
    assert computes_little.promises(0.02) and not computes_little.promises(0.04)
