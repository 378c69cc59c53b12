"""Who serves a step is told which of its layers nobody waits for yet."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from steerpipe.model.gpu.graph import StepGraphs


class Noted:
    """A source that notes for which layers nothing has to begin at once."""

    def __init__(self) -> None:
        self.served: list[tuple[int, list[int], bool]] = []

    def serve(self, layer: int, routed: list[int], *, ahead: bool = False, **_: Any) -> None:
        self.served.append((layer, routed, ahead))


def test_a_layer_that_the_tap_before_decides_is_served_ahead() -> None:
    tap = SimpleNamespace(decides=lambda order: order > 0, take_decided=lambda order, *_: [10 + order])
    graphs = SimpleNamespace(
        _stamp=3, _layers=(2, 5, 7), _source=Noted(), _mailbox=SimpleNamespace(take=lambda order, *_: [order])
    )
    StepGraphs._serve_predicting(graphs, SimpleNamespace(steer=None, tap=tap))  # type: ignore[arg-type]
    assert graphs._source.served == [(2, [0], False), (5, [11], True), (7, [12], True)]
