"""What the decoder on a GPU refuses, before anything is loaded."""

from dataclasses import replace

import pytest
import torch

from steerpipe.bench.shapes import make_shape
from steerpipe.core.errors import ConfigError
from steerpipe.model.gpu.limits import MOST_EXPERTS, check_model
from steerpipe.model.spec import ModelSpec, MoeSpec
from steerpipe.store.formats import ExpertFormat

CUDA = torch.device("cuda")


def spec(**changes: int) -> ModelSpec:
    """A model whose first layer differs by `changes`."""
    found = make_shape("tiny", ExpertFormat.INT4, 64).spec
    first = found.layers[0]
    assert isinstance(first.mlp, MoeSpec)
    return replace(found, layers=(replace(first, mlp=replace(first.mlp, **changes)), *found.layers[1:]))


def test_a_model_that_can_be_computed_passes() -> None:
    check_model(spec(), CUDA)
    check_model(spec(experts=MOST_EXPERTS), CUDA)


def test_layers_that_route_to_different_numbers_of_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"route a token to \[.*\] experts") as caught:
        check_model(spec(top_k=spec().moe(0).top_k + 1), CUDA)
    assert "--device cpu" in caught.value.fix


def test_more_experts_than_the_router_compares_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 1,025 experts; on a GPU there may be 1,024"):
        check_model(spec(experts=MOST_EXPERTS + 1), CUDA)


def test_fp32_products_must_be_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with pytest.raises(ConfigError, match="'high' precision"):
        check_model(spec(), CUDA)
    check_model(spec(), torch.device("cpu"))
