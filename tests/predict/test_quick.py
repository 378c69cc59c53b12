"""With numpy, for a running pass, predictors say what they say with torch."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.predict.by_horizon import ByHorizon
from steerpipe.predict.calibration import Calibration
from steerpipe.predict.frequency import Frequency
from steerpipe.predict.head import ALL_INPUTS, HeadNetwork, Input, ResidualHead
from steerpipe.predict.live import LiveSight, Memory
from steerpipe.predict.lookahead import DefaultVectors, RouterLookahead
from steerpipe.predict.protocol import RoutingPredictor
from steerpipe.predict.quick import quick_of
from steerpipe.predict.records import Geometry
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Decision

LAYERS, EXPERTS, TOP_K, HIDDEN = 4, 9, 3, 16
GEOMETRY = Geometry(LAYERS, EXPERTS, TOP_K, HIDDEN)
HORIZONS = (1, 2, 3)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def routers(dtype: torch.dtype = torch.float32, *, biased: bool = False) -> Routers:
    def each(*shape: int) -> tuple[Tensor, ...]:
        return tuple(drawn(*shape) for _ in range(LAYERS))

    biases = each(EXPERTS) if biased else None
    norms = tuple(norm.to(dtype) for norm in each(HIDDEN))
    return Routers(each(EXPERTS, HIDDEN), biases, norms, norms, 1e-6, TOP_K)


def head(inputs: Sequence[Input] = ALL_INPUTS, *, shared: bool = True, horizon: int = 1) -> ResidualHead:
    network = HeadNetwork(own := routers(), rank=5, shared=shared, inputs=inputs)
    for parameter in network.parameters():
        parameter.data = drawn(*parameter.shape)
    return ResidualHead(network, own, horizon, Calibration(drawn(1, LAYERS).abs(), drawn(1, LAYERS)))


def lookahead(
    *, shared: bool, vectors: bool, dtype: torch.dtype = torch.float32, biased: bool = False
) -> RoutingPredictor:
    counts = torch.ones(LAYERS, EXPERTS, dtype=torch.int64)
    defaults = DefaultVectors(drawn(LAYERS, EXPERTS, HIDDEN), counts) if vectors else None
    calibration = Calibration(drawn(3, LAYERS).abs(), drawn(3, LAYERS))
    own = routers(dtype, biased=biased)
    return RouterLookahead(own, shared=shared, defaults=defaults, horizons=HORIZONS, calibration=calibration)


def assert_same(
    predictor: RoutingPredictor, steps: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32
) -> None:
    """At every layer of steps of those sequences, at every horizon."""
    memory, quick = Memory(GEOMETRY), quick_of(predictor)
    for sequences in steps:
        rows = len(sequences)
        memory.begin(tuple(map(SequenceId, sequences)), torch.randint(100, (rows,)))
        for layer in range(LAYERS):
            experts = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)])
            states = [drawn(rows, HIDDEN).to(dtype) for _ in range(2)]
            memory.note(layer, RouterProbe(layer, states[0], experts, torch.rand(rows, TOP_K), states[1]))
            for horizon in (each for each in predictor.horizons if each):
                sight = LiveSight(memory, Decision((layer + horizon) % LAYERS, horizon))
                expected, found = predictor.probabilities(sight), quick.probabilities(memory, layer, horizon)
                assert found.dtype == np.float32
                torch.testing.assert_close(torch.from_numpy(found), expected, atol=2e-5, rtol=2e-4)


ALONE, TOGETHER = [[1], [1], [1]], [[1, 2], [1, 2], [2, 3], [3], [4, 3, 2]]


@pytest.mark.parametrize("steps", [ALONE, TOGETHER])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("inputs", [(), (Input.GATES,), (Input.PREVIOUS_EXPERTS, Input.PREVIOUS_RESIDUAL), ALL_INPUTS])
def test_a_head(inputs: Sequence[Input], shared: bool, steps: Sequence[Sequence[int]]) -> None:
    torch.manual_seed(0)
    assert_same(head(inputs, shared=shared), steps)


@pytest.mark.parametrize("steps", [ALONE, TOGETHER])
@pytest.mark.parametrize(
    ("shared", "vectors", "biased"), [(False, False, True), (True, False, False), (True, True, True)]
)
def test_lookahead(shared: bool, vectors: bool, biased: bool, steps: Sequence[Sequence[int]]) -> None:
    torch.manual_seed(1)
    assert_same(lookahead(shared=shared, vectors=vectors, biased=biased), steps)


def test_states_and_norms_in_bf16() -> None:
    torch.manual_seed(2)
    assert_same(lookahead(shared=True, vectors=True, dtype=torch.bfloat16), TOGETHER, torch.bfloat16)


def test_heads_by_horizon_are_each_asked_their_own() -> None:
    torch.manual_seed(3)
    assert_same(ByHorizon("heads", {1: head(), 2: head(horizon=2), 3: head(horizon=3)}), TOGETHER)


def test_whoever_else_predicts_is_asked_in_the_usual_way() -> None:
    torch.manual_seed(4)
    assert_same(Frequency(torch.rand(LAYERS, EXPERTS), HORIZONS), TOGETHER)


def test_what_is_sure_overflows_nothing() -> None:
    torch.manual_seed(5)
    sure = head()
    sure.calibration.scale.fill_(1e6)
    assert_same(sure, ALONE)
