"""Runs by turns are the runs that they would have been alone."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.live_runs import TURN, WARMUP, Run, Text, live
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.store.pack import write_pack
from steerpipe.tiny import write_tiny

TOKENS = WARMUP + TURN + 3  # the last turn is a short one
TEXT = Text(5, 3)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tiny("qwen2_moe", folder / "model", vocab_size=512)
    write_pack(open_checkpoint(folder / "model"), folder / "pack")
    return folder / "pack"


def test_runs_by_turns_route_as_they_do_alone(pack: Path) -> None:
    runs = [Run(TEXT, 1.0, None), Run(TEXT, 0.25, None), Run(Text(9, 4), 0.25, None)]
    resident, small, other = live(pack, TOKENS, runs)
    (alone,) = live(pack, TOKENS, runs[1:2])
    assert np.array_equal(small.routing, alone.routing)
    assert np.array_equal(small.routing, resident.routing)
    assert not np.array_equal(small.routing, other.routing)
    assert len(small.spent) == TOKENS - WARMUP
    assert len(small.routing) == TOKENS  # the prompt's row makes the first token
    assert small.hit_rate == alone.hit_rate < resident.hit_rate == 1.0


def test_only_what_came_over_the_link_has_a_read_time(pack: Path) -> None:
    resident, small = live(pack, TOKENS, [Run(TEXT, 1.0, None), Run(TEXT, 0.25, None)])
    assert resident.read_seconds == 0.0
    assert small.read_seconds > 0.0
