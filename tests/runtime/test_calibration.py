"""The dial takes the cheapest places first, keeps its bound, and says so in a file that is whole or not there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steerpipe.core.errors import ConfigError, DamagedFileError, InputError
from steerpipe.core.quality import KL_BOUNDS, Dial, MissPolicy, QualityPlan, Substituted
from steerpipe.runtime.calibration import (
    Meter,
    allowance,
    cheapest,
    drifting_layers,
    joined,
    only,
    places_of,
    spans,
)  # fmt: skip
from steerpipe.runtime.models import EMBEDDED
from steerpipe.runtime.quality import identity_of
from steerpipe.runtime.quality_profile import Loss, Measurement, load_profile, profile_of, save_profile
from steerpipe.store.reader import open_pack


def loss(kl: float, cost: float = 0.1) -> Loss:
    return Loss(kl, 2.0, 0.9, 0.1, cost)


def measured(policy: str, layer: int, rank: int | None, kl: float, cost: float) -> Measurement:
    return Measurement(policy, (layer, layer), rank, loss(kl, cost))


def test_a_meter_tells_divergence_surprise_and_agreement() -> None:
    exact = torch.tensor([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]]).clamp_min(1e-9).log()
    lossy = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]).log()
    meter = Meter()
    meter.add(exact, lossy, torch.tensor([1, 0]), Substituted(10, 4))
    found = meter.loss()
    kl = (0.5 * torch.tensor(2.0).log() + 0.9 * torch.tensor(0.9 / 0.8).log()) / 2
    assert found.kl == pytest.approx(float(kl), abs=1e-6)
    assert found.perplexity == pytest.approx((0.5 * 0.8) ** -0.5)
    assert (found.top1, found.share) == (0.5, 0.4)
    assert found.cost == pytest.approx(found.kl * 2 / 4)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 24, 48])
def test_spans_cover_every_layer_once(layers: int) -> None:
    covered = [layer for first, last in spans(layers) for layer in range(first, last + 1)]
    assert covered == list(range(layers))


def test_every_policy_is_measured_where_it_can_be() -> None:
    places = list(places_of(4, 2))
    assert (MissPolicy.PATCH, (0, 0), 1) in places and (MissPolicy.COMMIT, (3, 3), None) in places
    assert not any(policy is MissPolicy.COMMIT and span == (0, 0) for policy, span, _ in places)
    plan = only(MissPolicy.DROP, (1, 2), 1, 4, 2)
    drops = [(layer, rank) for layer, ranks in plan.rows() for rank in (0, 1) if ranks[rank] is MissPolicy.DROP]
    assert drops == [(1, 1), (2, 1)]


def test_early_layers_that_cost_more_than_the_middle_drift() -> None:
    costs = {0: 0.2, 1: 0.05, 2: 0.3, 3: 0.1, 4: 0.1, 5: 0.4}
    found = [measured("surrogate", layer, 0, 0.01, cost) for layer, cost in costs.items()]
    assert drifting_layers(found) == (0, 2)  # 5 costs most, but is not early


def test_the_cheapest_policy_of_a_place_is_taken_and_the_cheapest_use_comes_first() -> None:
    found = [
        measured("surrogate", 0, 0, 0.5, 0.01),
        measured("surrogate", 1, 0, 0.5, 0.5), measured("drop", 1, 0, 0.2, 0.2),
        measured("surrogate", 1, 1, 0.1, 0.1), measured("patch", 1, 1, 0.01, 0.02),
        measured("commit", 1, None, 0.0, 0.0),
    ]  # fmt: skip
    chosen = cheapest(found, exact=(0,))
    assert [(each.policy, each.rank) for each in chosen] == [("patch", 1), ("drop", 0)]
    plan = joined(chosen, 2, 2)
    assert plan.policies == ((MissPolicy.WAIT,) * 2, (MissPolicy.DROP, MissPolicy.PATCH))


def test_a_patch_is_charged_as_a_surrogate_until_it_has_come_and_together_costs_more() -> None:
    found = [measured("surrogate", 0, 0, 0.1, 0.1), measured("patch", 0, 0, 0.01, 0.01)]
    made = allowance(found[1:], found, loss(0.02), loss(0.3), 0.05, ranks=2)
    assert made.costs[0] == pytest.approx((0.1 * 3, 0.0))
    assert made.mended[0] == pytest.approx((0.01 * 2, 0.0))
    less = allowance(found[1:], found, loss(0.001), loss(0.05), None, ranks=2)
    assert less.costs[0][0] == pytest.approx(0.1) and less.per_token is None  # never less than apart


def test_the_shipped_profile_keeps_its_bounds_and_fast_never_waits() -> None:
    pack = open_pack(EMBEDDED)
    file = profile_of(EMBEDDED)
    assert file is not None and file.stat().st_size < 40_000
    profile = load_profile(file, identity_of(pack))
    for dial, bound in KL_BOUNDS.items():
        assert profile.setting(dial).loss.kl <= bound
    assert MissPolicy.WAIT not in profile.setting(Dial.FAST).plan.used
    for dial in (Dial.HIGH, Dial.BALANCED):
        plan = profile.setting(dial).plan
        assert all(set(plan.policies[layer]) == {MissPolicy.WAIT} for layer in profile.drifting)
        assert profile.setting(dial).allowance.per_token == KL_BOUNDS[dial]
    assert profile.drifting and profile.tokens > 500


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    shipped = profile_of(EMBEDDED)
    assert shipped is not None
    profile = load_profile(shipped, identity_of(open_pack(EMBEDDED)))
    size = save_profile(profile, tmp_path / "new" / "quality.json")
    assert (tmp_path / "new" / "quality.json").stat().st_size == size
    assert load_profile(tmp_path / "new" / "quality.json", profile.model) == profile
    (tmp_path / "predictors").mkdir()
    save_profile(profile, tmp_path / "predictors" / "quality.json")
    assert profile_of(tmp_path) == tmp_path / "predictors" / "quality.json" and profile_of(tmp_path / "new") is None


def test_a_dial_that_would_cost_too_much_is_refused(tmp_path: Path) -> None:
    shipped = profile_of(EMBEDDED)
    assert shipped is not None
    profile = load_profile(shipped, identity_of(open_pack(EMBEDDED)))
    with pytest.raises(ConfigError, match="more than its bound"):
        replace(profile, settings={}).setting(Dial.FAST)


@pytest.mark.parametrize(
    ("content", "error", "match"),
    [
        ("{", DamagedFileError, "cannot be read"),
        ('{"schema": 9}', InputError, "schema 1"),
        ("[]", InputError, "schema 1"),
        ('{"schema": 1}', DamagedFileError, "damaged"),
    ],
)
def test_a_wrong_profile_is_told_apart(tmp_path: Path, content: str, error: type[Exception], match: str) -> None:
    file = tmp_path / "quality.json"
    file.write_text(content)
    with pytest.raises(error, match=match):
        load_profile(file, "me")
    with pytest.raises(InputError, match="does not exist"):
        load_profile(tmp_path / "none.json", "me")


def test_a_profile_of_another_model_is_refused() -> None:
    shipped = profile_of(EMBEDDED)
    assert shipped is not None
    with pytest.raises(InputError, match="was measured with"):
        load_profile(shipped, "another")


def test_a_plan_comes_back_from_json_and_a_wrong_one_is_refused() -> None:
    plan = QualityPlan.uniform(MissPolicy.PATCH, 3, 2)
    assert QualityPlan.from_json(json.loads(json.dumps(plan.as_json()))) == plan
    for wrong in ({}, [], {"policies": [["drop"]], "layers": 3}, {"policies": [["dorp"]]}, {"policies": 5}):
        with pytest.raises(ConfigError):
            QualityPlan.from_json(wrong)
