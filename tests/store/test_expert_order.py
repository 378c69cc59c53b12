"""Experts that fire together become neighbours."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from steerpipe.core.errors import PackError
from steerpipe.model.checkpoint import Checkpoint
from steerpipe.store.order import coactivation, mean_distance, order_experts
from steerpipe.store.routing import recorded_order


def clustered(experts: int, clusters: int, tokens: int, seed: int, noise: float = 0.2) -> np.ndarray:
    """Four experts per token from one hidden cluster; the clusters are scattered over the indices."""
    random = np.random.default_rng(seed)
    members = random.permutation(experts).reshape(clusters, -1)
    rows = []
    for _ in range(tokens):
        pool = members[random.integers(clusters)] if random.random() > noise else np.arange(experts)
        rows.append(random.choice(pool, 4, replace=False))
    return np.array(rows)


@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_found(seed: int) -> None:
    routing = clustered(60, 10, 2000, seed, noise=0.1)
    together = coactivation(routing, 60)
    before = mean_distance(together, np.arange(60))
    after = mean_distance(together, order_experts(routing, 60))
    assert before > 18
    assert after < 0.4 * before


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), experts=st.integers(1, 40), tokens=st.integers(0, 50), top_k=st.integers(1, 4))
def test_it_is_always_a_permutation_and_never_worse(seed: int, experts: int, tokens: int, top_k: int) -> None:
    random = np.random.default_rng(seed)
    top_k = min(top_k, experts)
    routing = np.array([random.choice(experts, top_k, replace=False) for _ in range(tokens)], dtype=np.int64)
    routing = routing.reshape(tokens, top_k)
    order = order_experts(routing, experts)
    assert sorted(order.tolist()) == list(range(experts))
    together = coactivation(routing, experts)
    assert mean_distance(together, order) <= mean_distance(together, np.arange(experts)) + 1e-9


def test_distance_is_counted_in_blocks() -> None:
    together = coactivation(np.array([[0, 3]]), 4)
    assert mean_distance(together, np.array([0, 1, 2, 3])) == 3
    assert mean_distance(together, np.array([1, 3, 0, 2])) == 1


def routing_file(folder: Path, tensor: torch.Tensor, name: str = "routing") -> Path:
    save_file({name: tensor.contiguous()}, folder / "trace.safetensors")
    return folder / "trace.safetensors"


def test_a_recorded_trace_orders_each_layer_on_its_own(checkpoint: Checkpoint, tmp_path: Path) -> None:
    first = torch.tensor([[0, 2], [1, 3]]).repeat(20, 1)  # [tokens, top_k]
    second = torch.tensor([[0, 3], [1, 2]]).repeat(20, 1)
    order = recorded_order(checkpoint.spec, routing_file(tmp_path, torch.stack((first, second), 1).int()))
    for layer, pairs in ((0, ({0, 2}, {1, 3})), (1, ({0, 3}, {1, 2}))):
        assert set(order[layer][:2]) in pairs
        assert set(order[layer][2:]) in pairs


@pytest.mark.parametrize(
    ("tensor", "name", "message"),
    [
        (torch.zeros(5, 3, 2, dtype=torch.int32), "routing", r"shape \[5, 3, 2\], for 2 MoE layers"),
        (torch.zeros(5, 2, dtype=torch.int32), "routing", r"shape \[5, 2\]"),
        (torch.full((5, 2, 2), 4, dtype=torch.int64), "routing", "experts 4 to 4 of 4"),
        (torch.full((5, 2, 2), -1, dtype=torch.int64), "routing", "experts -1 to -1 of 4"),
        (torch.zeros(5, 2, 2), "routing", "no integer tensor"),
        (torch.zeros(5, 2, 2, dtype=torch.int32), "other", "no integer tensor"),
    ],
)  # fmt: skip
def test_a_trace_of_another_model_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, tensor: torch.Tensor, name: str, message: str
) -> None:
    with pytest.raises(PackError, match=message):
        recorded_order(checkpoint.spec, routing_file(tmp_path, tensor, name))


def test_a_missing_trace_is_an_error_of_ours(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(PackError, match="does not exist"):
        recorded_order(checkpoint.spec, tmp_path / "nothing")
