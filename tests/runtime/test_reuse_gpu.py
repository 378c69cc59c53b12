"""Eviction by the reuse forecast on a GPU: what the policy hears, and that it is off where LFRU is quicker."""

from collections.abc import Callable

import numpy as np
import pytest

from steerpipe.core.errors import ConfigError
from steerpipe.runtime.reuse_gpu import REST_TOKENS, ROUNDS, TURN_TOKENS, WARM_TOKENS, ListeningReuse, policy_on_gpu

LAYERS, EXPERTS = 4, 3
TRIAL = WARM_TOKENS + 2 * ROUNDS * TURN_TOKENS


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[ListeningReuse, Clock]:
    clock = Clock()
    return ListeningReuse(LAYERS * EXPERTS, LAYERS, 32.0, clock), clock


def run(policy: ListeningReuse, clock: Clock, steps: int, seconds: Callable[[bool], float]) -> list[bool]:
    """Steps of one text, each of which takes `seconds` of whether the forecast was on, and a pause behind it."""
    on = []
    for _ in range(steps):
        runs = policy.begin(again=True)
        on.append(policy.on)
        assert runs or not on[-1], "nobody listens where nobody speaks"
        for layer in range(LAYERS):
            clock.now += seconds(on[-1]) / LAYERS
            policy.touch_many([layer * EXPERTS], 1.0)
        clock.now += 5.0  # whoever reads the answer takes his time
    return on


@pytest.mark.parametrize(("cost", "stays"), [(0.90, True), (1.0, True), (1.05, False)])
def test_the_forecast_stays_unless_lfru_is_quicker(cost: float, stays: bool) -> None:
    policy, clock = made()
    on = run(policy, clock, TRIAL + 64, lambda forecast: cost if forecast else 1.0)
    assert all(on[:WARM_TOKENS]) and not all(on[WARM_TOKENS:TRIAL])
    assert set(on[TRIAL + 2 :]) == {stays}
    assert policy.begin(again=True) == stays, "who is off costs nothing"
    line = policy.line()
    assert line is not None and line.endswith("on" if stays else "off") and "LFRU 1000.00" in line
    again = run(policy, clock, REST_TOKENS, lambda forecast: 0.5 if forecast else 1.0)
    assert any(again), "it is tried again"


def test_who_asks_for_it_by_name_has_it() -> None:
    clock = Clock()
    policy = ListeningReuse(LAYERS * EXPERTS, LAYERS, 32.0, clock, tried=False)
    assert all(run(policy, clock, TRIAL + 64, lambda forecast: 2.0))
    assert policy.line() is None


def test_before_a_trial_there_is_nothing_to_say() -> None:
    policy, clock = made()
    run(policy, clock, WARM_TOKENS, lambda forecast: 1.0)
    assert policy.line() is None


def test_it_hears_at_a_use_and_forgets_with_the_text() -> None:
    policy, _ = made()
    said = np.zeros(LAYERS * EXPERTS, dtype=np.float32)
    said[4] = -9.0
    waiting = [said]
    policy.newest = lambda: waiting.pop() if waiting else None
    policy.begin(again=False)
    policy.touch_many([4], 1.0)
    everybody = np.arange(LAYERS * EXPERTS)
    assert policy.victim(everybody, 1.0) == 4  # used last, and not soon again
    policy.begin(again=True)
    assert policy.victim(everybody, 1.0) == 4
    policy.begin(again=False)
    assert policy.victim(everybody, 1.0) == 0


def test_who_is_off_does_not_listen() -> None:
    policy, clock = made()
    run(policy, clock, TRIAL + 8, lambda forecast: 2.0 if forecast else 1.0)
    policy.newest = lambda: pytest.fail("nobody speaks in a step without the branch")
    run(policy, clock, 2, lambda forecast: 1.0)


def test_without_a_forecast_lfru_evicts() -> None:
    assert policy_on_gpu("auto", None) == "lfru"
    assert policy_on_gpu("lru", None) == "lru"
    with pytest.raises(ConfigError, match="needs a forecast"):
        policy_on_gpu("reuse", None)
