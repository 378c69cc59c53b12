"""The reuse forecast: what it computes, and its file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from steerpipe.core.errors import ConfigError, DamagedFileError, InputError
from steerpipe.predict.mark import ModelMark
from steerpipe.predict.reuse import LiveReuse, ReuseConfig, ReuseForecast, normed, tap_inputs
from steerpipe.predict.reuse_file import load_reuse, save_reuse
from steerpipe.predict.stored import Training

CONFIG = ReuseConfig(
    layers=3, experts=4, hidden=5, taps=(0, 2), context_tokens=4.0, count_tokens=32.0, horizon_tokens=8
)
TRAINING = Training(1000, 10, 1.5, "CPU", 0, "tiny")
RANK = 2


def forecast(*, shared: bool = True) -> ReuseForecast:
    torch.manual_seed(0)
    expand = torch.randn(1 if shared else 2, RANK, 12)
    return ReuseForecast(CONFIG, torch.randn(2, 10, RANK), torch.randn(2, RANK), expand, torch.randn(2, 12), 0.25)


@pytest.mark.parametrize("taps", [(), (2, 0), (0, 0), (0, 3), (-1, 2)])
def test_taps_are_layers_in_order(taps: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="taps"):
        replace(CONFIG, taps=taps)


def test_half_lives_and_horizon_are_above_nothing() -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        replace(CONFIG, horizon_tokens=0.0)


def test_scores_are_log_odds_in_doublings_of_the_count() -> None:
    made, inputs = forecast(shared=False), torch.randn(3, 10)
    seen = inputs @ made.project[1] + made.offset[1]
    expected = ((seen * torch.sigmoid(seen)) @ made.expand[1] + made.bias[1]) / 0.25
    assert made.scores(1, inputs).numpy() == pytest.approx(expected.numpy(), rel=1e-5, abs=1e-5)


def test_live_scores_follow_the_running_mean_of_one_text() -> None:
    made = forecast()
    live = LiveReuse(made)
    first, second = torch.randn(1, 5), torch.randn(1, 5)
    keeps = 2 ** (-1 / 4)
    assert live.at(1, first) is None
    live.at(2, first)
    said = live.at(2, second)
    mean = keeps * (1 - keeps) * normed(first) + (1 - keeps) * normed(second)
    assert said is not None
    expected = made.scores(1, tap_inputs(normed(second), mean))[0]
    assert said.numpy() == pytest.approx(expected.numpy(), rel=1e-4, abs=1e-4)
    live.restart()
    again = live.at(2, second)
    alone = made.scores(1, tap_inputs(normed(second), normed(second)))[0]
    assert again is not None
    assert again.numpy() == pytest.approx(alone.numpy(), rel=1e-4, abs=1e-4)


def test_its_cost_is_that_of_all_taps_of_a_token() -> None:
    cost = forecast().cost()
    assert cost.multiply_adds == 2 * (10 * RANK + RANK * 12)
    assert cost.parameters == 2 * 10 * RANK + 2 * RANK + RANK * 12 + 2 * 12 + 1


@pytest.mark.parametrize("shared", [True, False])
def test_a_file_gives_back_what_was_kept(tmp_path: Path, shared: bool) -> None:
    made, path = forecast(shared=shared), tmp_path / "deep" / "reuse.safetensors"
    size = save_reuse(made, path, TRAINING)
    assert path.stat().st_size == size
    assert list(path.parent.iterdir()) == [path]
    loaded = load_reuse(path)
    assert (loaded.config, loaded.history) == (CONFIG, 0.25)
    for name, tensor in made.tensors().items():
        assert torch.equal(loaded.tensors()[name], tensor.half().float()), name


def test_a_file_that_is_missing_torn_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reuse.safetensors"
    with pytest.raises(InputError, match="does not exist"):
        load_reuse(path)
    size = save_reuse(forecast(), path, TRAINING)
    path.write_bytes(path.read_bytes()[: size // 2])
    with pytest.raises(DamagedFileError, match="damaged"):
        load_reuse(path)
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(InputError, match="no reuse forecast"):
        load_reuse(path)
    save_file({"a": torch.zeros(2)}, path, {"steerpipe": json.dumps({"schema": 1, "kind": "head"})})
    with pytest.raises(InputError, match="'head'"):
        load_reuse(path)


def test_a_forecast_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reuse.safetensors"
    own = ModelMark(CONFIG.layers, CONFIG.experts, 2, CONFIG.hidden, "aa11")
    save_reuse(forecast(), path, TRAINING)
    load_reuse(path, here=own)
    for other in ({"layers": 24}, {"experts": 60}, {"hidden": 192}):
        with pytest.raises(InputError, match=r"is of a model with .*; this one has .*\n  fix: remove it"):
            load_reuse(path, here=replace(own, **other))
    save_reuse(forecast(), path, TRAINING, "aa11")
    load_reuse(path, here=own)
    with pytest.raises(InputError, match=r"weights aa11; this one has .*weights bb22"):
        load_reuse(path, here=replace(own, weights="bb22"))
    with pytest.raises(InputError, match="is a folder"):
        load_reuse(tmp_path)


@pytest.mark.parametrize("fault", ["missing tensor", "other shape", "no history", "no taps"])
def test_a_file_whose_parts_do_not_fit_is_damaged(tmp_path: Path, fault: str) -> None:
    made, path = forecast(), tmp_path / "reuse.safetensors"
    tensors, said = made.tensors(), made.said()
    match fault:
        case "missing tensor":
            del tensors["bias"]
        case "other shape":
            tensors["bias"] = torch.zeros(2, 11)
        case "no history":
            said["history"] = 0.0
        case _:
            said["taps"] = []
    save_file(tensors, path, {"steerpipe": json.dumps({"schema": 1, "kind": "reuse", "config": said})})
    with pytest.raises(DamagedFileError, match="no reuse forecast"):
        load_reuse(path)
