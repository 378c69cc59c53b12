"""Whose forecasts `record_forecasts.py` writes, and under which name."""

from pathlib import Path

import pytest
import torch

from benchmarks.predict_rows import HISTORY_ROWS, ROWS
from benchmarks.record_forecasts import load_history, predictors_of
from steerpipe.core.errors import InputError
from steerpipe.predict.files import save
from steerpipe.predict.previous import PreviousToken
from steerpipe.predict.shipped import ShippedPredictors
from steerpipe.predict.sight import Decision
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.trajectory_networks import Architecture, build
from steerpipe.predict.window import Window
from tests.predict.planted import GEOMETRY, planted_routers

ROUTERS = planted_routers()


def history(
    file: Path, kind: Architecture = Architecture.TRANSFORMER, ahead: int = 2, window: Window = Window.LAYERS
) -> Path:
    network = build(kind, GEOMETRY.experts, 2 + (window is Window.BOTH))
    networks = {Decision(layer, ahead): network for layer in range(GEOMETRY.layers)}
    save(Trajectory(kind, GEOMETRY.experts, networks, window=window, steps=2), file)
    return file


def test_a_network_of_history_is_called_what_its_rows_ask_for(tmp_path: Path) -> None:
    near, far = history(tmp_path / "near.safetensors", ahead=1), history(tmp_path / "my own.safetensors")
    shipped = ShippedPredictors({"head-1": near, "lookahead": near})
    assert {row.said for row in ROWS if row.name in HISTORY_ROWS} == {"transformers"}
    assert list(predictors_of(shipped, ROUTERS, far)) == ["heads", "lookahead", "transformers"]
    assert list(predictors_of(shipped, ROUTERS, None)) == ["heads", "lookahead"]


def test_what_is_no_expert_transformer_of_these_layers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "history.safetensors"

    def refused() -> str:
        with pytest.raises(InputError, match="fix: train one: steerpipe train transformer") as caught:
            load_history(file, ROUTERS)
        return caught.value.what

    history(file, Architecture.MLP)
    assert refused() == f"{file} holds no ExpertTransformer"
    save(PreviousToken(*torch.rand(2, ROUTERS.layers, ROUTERS.experts)), file)
    assert refused() == f"{file} holds no ExpertTransformer"
    history(file, window=Window.BOTH)
    assert "last layers alone" in refused()
    history(file, ahead=1)
    assert "every layer 2 ahead" in refused()
