"""A quality plan says what happens to every rank of every layer, and nothing impossible."""

import pytest

from steerpipe.core.errors import ConfigError
from steerpipe.core.quality import MissPolicy, QualityPlan, Substituted, parse_policy

WAIT, DROP, COMMIT = MissPolicy.WAIT, MissPolicy.DROP, MissPolicy.COMMIT


def test_one_policy_everywhere_but_in_the_exact_layers() -> None:
    plan = QualityPlan.uniform(DROP, 3, 2, exact_layers=[1])
    assert plan.policies == ((DROP, DROP), (WAIT, WAIT), (DROP, DROP))
    assert not plan.exact and QualityPlan.uniform(WAIT, 3, 2).exact
    assert plan.used == {WAIT, DROP}


def test_nothing_is_committed_to_before_the_first_layer() -> None:
    assert QualityPlan.uniform(COMMIT, 2, 1).policies == ((WAIT,), (COMMIT,))
    with pytest.raises(ConfigError, match="before the first layer"):
        QualityPlan(((COMMIT,), (COMMIT,)))


@pytest.mark.parametrize("policies", [(), ((),), ((WAIT,), (WAIT, WAIT))])
def test_every_layer_has_every_rank(policies: tuple[tuple[MissPolicy, ...], ...]) -> None:
    with pytest.raises(ConfigError, match="every layer and rank"):
        QualityPlan(policies)


def test_a_layer_commits_as_a_whole() -> None:
    with pytest.raises(ConfigError, match="some of its ranks"):
        QualityPlan(((WAIT, WAIT), (COMMIT, WAIT)))


def test_patches_come_later_than_their_layer() -> None:
    with pytest.raises(ConfigError, match="patch_layers is 0"):
        QualityPlan(((WAIT,),), patch_layers=0)


def test_a_plan_survives_json() -> None:
    plan = QualityPlan(((WAIT, DROP), (COMMIT, COMMIT)), patch_layers=3)
    assert QualityPlan.from_json(plan.as_json()) == plan


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="'wiat'") as raised:
        parse_policy("wiat")
    assert "wait" in raised.value.fix


def test_shares_of_an_interval() -> None:
    assert Substituted().share == 0.0
    assert Substituted(6, 4, 1, 0.5) + Substituted(4, 1, 0, 0.25) == Substituted(10, 5, 1, 0.75)
    assert Substituted(4, 1, 0).share == 0.25
