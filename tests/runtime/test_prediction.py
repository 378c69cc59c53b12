"""A ladder's engine comes with the best prediction that its model has, and the answer stays the same."""

import shutil
from pathlib import Path

import pytest
import torch

from steerpipe import Pipeline
from steerpipe.core.errors import ConfigError, InputError
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.predict.reuse import ReuseConfig, ReuseForecast
from steerpipe.predict.shipped import ASSETS
from steerpipe.predict.trials import Verdict
from steerpipe.runtime.models import find_model, open_model
from steerpipe.runtime.prediction import reuse_for, settle_policy
from steerpipe.runtime.reuse_tap import ReuseTap
from steerpipe.store.policies import Lfru, Reuse
from steerpipe.tiny import write_tiny
from steerpipe.transfer.source import LadderSource

QUESTION = "Do you like dogs?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prediction") / "model"
    write_tiny("olmoe", folder)
    return folder


def answer(**settings: object) -> tuple[int, ...]:
    with Pipeline(dtype="float32", threads=1, profile=False, **settings) as pipe:
        return pipe.generate(QUESTION, temperature=0.0, max_tokens=24, ignore_eos=True).token_ids


def test_the_embedded_model_uses_its_trained_predictors_by_default() -> None:
    with Pipeline(fast_memory="25%", dtype="float32", threads=1, profile=False) as pipe:
        assert isinstance(pipe.experts, LadderSource) and type(pipe.experts.policy) is Reuse
        assert pipe.prediction is not None and pipe.prediction.steering is not None
        names = [each.name for each in pipe.prediction.steering._predictors]
        assert names[0] == "trained heads" and len(names) == 2
        pipe.generate(QUESTION, temperature=0.0, max_tokens=24, ignore_eos=True)
        said = pipe.prediction.as_json()
        assert said is not None and set(said) == {"predictor", "verdict", "trial", "eviction", "beside", "scores"}
        assert pipe.experts.policy._told is not None  # the forecast of reuse has spoken


def test_prediction_and_reuse_change_no_token() -> None:
    exact = answer(fast_memory="100%")
    assert answer(fast_memory="12.5%") == exact
    assert answer(fast_memory="12.5%", predict="off", policy="lru") == exact


def test_prediction_that_is_asked_for_is_not_tried_first() -> None:
    exact = answer(fast_memory="100%")
    with Pipeline(fast_memory="12.5%", predict="on", dtype="float32", threads=1, profile=False) as pipe:
        assert pipe.prediction is not None and pipe.prediction.steering is not None
        assert pipe.prediction.steering.predictor is not None
        assert pipe.prediction.steering.predictor.name == "trained heads"
        got = pipe.generate(QUESTION, temperature=0.0, max_tokens=24, ignore_eos=True).token_ids
        assert got == exact and pipe.prediction.steering.scorecard.total("trained heads").sent > 0
        assert pipe.prediction.line() == "prediction by trained heads: on, as asked for"
        assert not pipe.prediction.verdicts and pipe.prediction.verdict is None


def test_while_no_trial_has_ended_a_line_says_how_far_it_is(model: Path) -> None:
    with Pipeline(model, fast_memory="25%", dtype="float32", threads=1, profile=False) as pipe:
        assert pipe.prediction is not None
        pipe.generate("abc", max_tokens=6, ignore_eos=True)
        assert pipe.prediction.line() == "prediction: none yet, watched for 5 of 16 tokens"
        steering = pipe.prediction.steering
        steering._cost = lambda _: 1.0  # type: ignore[union-attr]  # a second per token
        pipe.generate("abc", max_tokens=20, ignore_eos=True)
        said = pipe.prediction.line()
        assert said is not None and said.startswith("prediction is off: it would take 1000.00 ms per token or more")
        steering._cost = lambda _: -1.0  # type: ignore[union-attr]
        steering._rest = 0  # type: ignore[union-attr]
        pipe.generate("abc", max_tokens=22, ignore_eos=True)
        assert pipe.prediction.line() == "prediction: lookahead, tried for 5 of 64 tokens"


def test_a_model_of_few_layers_is_watched_to_the_end(tmp_path: Path) -> None:
    """Its last layers lie less than the deepest horizon behind its first."""
    write_tiny("olmoe", tmp_path / "model", num_hidden_layers=2)
    settings = {"fast_memory": "25%", "dtype": "float32", "threads": 1, "profile": False}
    with Pipeline(tmp_path / "model", pace="10MB", **settings) as pipe:  # a block takes many layers
        assert len(pipe.generate("abc", max_tokens=40, ignore_eos=True).token_ids) == 40


def test_prediction_can_be_switched_off() -> None:
    with Pipeline(fast_memory="25%", predict="off", policy="lfru", profile=False) as pipe:
        assert isinstance(pipe.experts, LadderSource) and type(pipe.experts.policy) is Lfru
        assert pipe.prediction is not None and pipe.prediction.steering is None and not pipe.prediction.taps
        assert pipe.prediction.as_json() is None and pipe.prediction.line() is None


def test_a_model_that_is_held_whole_predicts_nothing() -> None:
    with Pipeline(fast_memory="auto", profile=False) as pipe:
        assert pipe.budget.resident and pipe.prediction is None


def test_a_model_never_seen_before_looks_ahead_with_its_own_routers(model: Path) -> None:
    with Pipeline(model, fast_memory="25%", profile=False) as pipe:
        assert pipe.prediction is not None and pipe.prediction.steering is not None
        assert [each.name for each in pipe.prediction.steering._predictors] == ["lookahead"]
        assert isinstance(pipe.experts, LadderSource) and type(pipe.experts.policy) is Lfru
        assert pipe.generate("abc", max_tokens=8, ignore_eos=True).token_ids


@pytest.mark.parametrize("name", ["reuse.safetensors", "head-1.safetensors", "lookahead.safetensors", "openings.npz"])
def test_predictors_of_another_model_are_refused_at_opening(name: str, tmp_path: Path) -> None:
    write_tiny("olmoe", tmp_path / "model")
    (tmp_path / "model" / "predictors").mkdir()
    shutil.copy(ASSETS / "predictors" / "nano" / name, tmp_path / "model" / "predictors")
    with pytest.raises(InputError, match=r"of a model with 24 MoE layers.*this one has \d.*\n  fix: remove"):
        Pipeline(tmp_path / "model", fast_memory="25%", profile=False)


def test_a_head_under_the_name_of_another_horizon_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "nano"
    shutil.copytree(find_model(None), folder)
    (folder / "predictors").mkdir()
    shutil.copy(ASSETS / "predictors" / "nano" / "head-2.safetensors", folder / "predictors" / "head-1.safetensors")
    with pytest.raises(InputError, match="looks 2 layers ahead, not 1"):
        Pipeline(folder, fast_memory="25%", profile=False)


def test_policies_are_settled_by_what_the_model_has(model: Path, tmp_path: Path) -> None:
    assert reuse_for(model, open_model(model, tmp_path).spec) is None
    assert settle_policy("auto", None) == "lfru" and settle_policy("lru", None) == "lru"
    with pytest.raises(ConfigError, match="reuse needs a forecast"):
        settle_policy("reuse", None)
    with pytest.raises(ConfigError, match="reuse needs a forecast"):
        Pipeline(model, fast_memory="25%", policy="reuse")


def test_the_line_is_the_last_verdict() -> None:
    with Pipeline(fast_memory="25%", profile=False) as pipe:
        assert pipe.prediction is not None
        pipe.prediction.verdicts += [Verdict(("none", "a"), (1.0, 2.0), 0), Verdict(("none", "a"), (1.0, 0.5), 1)]
        assert pipe.prediction.line() == "prediction by a saves 50% per token (500.00 instead of 1000.00 ms): on"
        said = pipe.prediction.as_json()
        assert said is not None and said["trial"] == {"seconds_per_token": {"none": 1.0, "a": 0.5}}


def probe(layer: int, rows: int) -> RouterProbe:
    state = torch.arange(rows * 4.0).view(rows, 4) + layer
    return RouterProbe(layer, state, torch.zeros(rows, 2, dtype=torch.int64), torch.ones(rows, 2), None)


def forecast() -> ReuseForecast:
    torch.manual_seed(0)
    config = ReuseConfig(2, 3, 4, taps=(1,), context_tokens=4.0, count_tokens=32.0, horizon_tokens=8.0)
    shapes = {name: tensor.shape for name, tensor in _tiny(config).items()}
    return ReuseForecast.restore(
        {"history": 1.0, **_as_json(config)}, {name: torch.randn(shape) for name, shape in shapes.items()}
    )


def _as_json(config: ReuseConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def _tiny(config: ReuseConfig) -> dict[str, torch.Tensor]:
    count = config.layers * config.experts
    return {
        "project": torch.zeros(1, 2 * config.hidden, 2), "offset": torch.zeros(1, 2),
        "expand": torch.zeros(1, 2, count), "bias": torch.zeros(1, count),
    }  # fmt: skip


def test_a_forecast_is_told_once_per_tap_and_of_a_batch_the_soonest_counts() -> None:
    policy = Reuse(6)
    tap = ReuseTap(forecast(), (10, 20), policy, lambda: 5.0)
    assert not tap.begin((SequenceId(1),), torch.zeros(1), decode=False)
    assert tap.begin((SequenceId(1), SequenceId(2)), torch.zeros(2), decode=True)
    tap.routed(probe(10, 2))
    assert policy._told is None  # layer 0 is no tap
    tap.routed(probe(20, 2))
    together = policy._told
    alone = []
    for row in range(2):
        own = Reuse(6)
        one = ReuseTap(forecast(), (10, 20), own, lambda: 5.0)
        assert one.begin((SequenceId(9),), torch.zeros(1), decode=True)
        full = probe(20, 2)
        one.routed(RouterProbe(20, full.residual[row : row + 1], full.experts, full.gates, None))
        assert own._told is not None
        alone.append(torch.from_numpy(own._told))
    assert together is not None
    torch.testing.assert_close(torch.from_numpy(together), torch.stack(alone).amax(0))
