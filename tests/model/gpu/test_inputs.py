"""The integers of captured steps, written by the host, and rows that are picked from what is computed later."""

import numpy as np
import pytest
import torch

from steerpipe.core.ids import SequenceId
from steerpipe.model.gpu.inputs import StepInputs
from steerpipe.model.gpu.rows import Picked, passes, room_for
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.step import decode_rows
from tests.model.test_kv_cache import SPEC
from tests.support.running import CPU


def test_what_was_written_is_there_when_its_copy_has_run() -> None:
    spec = SPEC
    pool = KvPool(spec, torch.float32, CPU, capacity_blocks=8)
    kv = pool.sequence()
    kv.append(4)
    (rows,) = passes(decode_rows([SequenceId(0)], [kv], [7], CPU, cell=1))
    inputs, room = StepInputs(1, spec.max_context, CPU), room_for(rows.keys)
    views = inputs.views(room)
    inputs.write(rows, room, 9)
    assert not any(view.any() for view in views)
    inputs.queue(room)
    stamp, tokens, positions, turns, blocks = views
    assert [int(each[0]) for each in (stamp, tokens, positions, turns)] == [9, 7, 4, 4]
    assert blocks[0, : len(kv.addresses)].tolist() == kv.addresses
    assert inputs.stamp.data_ptr() == stamp.data_ptr()
    inputs.write_nobody(room)
    inputs.queue(room)
    assert [int(each[0]) for each in (stamp, tokens, positions, turns)] == [0, 0, -1, 0] and not blocks.any()
    kv.free()


@pytest.mark.parametrize(
    ("rows", "places"),
    [(1, []), (1, [0]), (5, []), (5, [0]), (5, [1, 2, 3]), (5, [2, 1, 3]), (5, [3, 1, 4, 0]), (5, [4, 0])],
)
def test_picked_rows_are_those_of_what_came_later_and_a_copy(rows: int, places: list[int]) -> None:
    x = torch.zeros(rows, 3)
    picked = Picked(x, np.array(places, dtype=np.int64))
    x.copy_(torch.arange(3 * rows).view(rows, 3))
    wanted = x[places].clone()
    picked.queue()
    x.fill_(-1)
    assert torch.equal(picked.rows, wanted)
