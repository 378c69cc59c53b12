import numpy as np
import pytest

from steerpipe.arena.misses import missed_uses
from steerpipe.transfer.machine import Machine
from steerpipe.transfer.recorded import draw_recording
from steerpipe.transfer.replay import replay
from steerpipe.transfer.synthetic import SyntheticRouting


@pytest.mark.parametrize("slots", [8, 40, 90])
def test_misses_are_those_that_replay_counts(slots: int) -> None:
    recording = draw_recording(SyntheticRouting(layers=4, experts=24, top_k=4, tokens=120))
    machine = Machine(slots, block_bytes=1, link_bytes_per_second=1.0, layer_seconds=0.0)
    report = replay(recording, machine, "lfru")
    assert missed_uses(recording.routing, 24, slots).sum() == report.misses
    assert report.late == 0


def test_everything_is_missed_once_where_everything_fits() -> None:
    recording = draw_recording(SyntheticRouting(layers=2, experts=8, top_k=2, tokens=60))
    missed = missed_uses(recording.routing, 8, 16)
    numbers = recording.routing + np.arange(2)[None, :, None] * 8
    assert missed.sum() == len(np.unique(numbers))
    assert missed[0].all()
