"""One program waits for a row's blocks: it has seen the address of each, and of nobody else."""

import torch

from steerpipe.kernels.hold import hold


def test_every_expert_of_the_row_is_looked_up_and_nobody_else() -> None:
    table = torch.arange(100, 110, dtype=torch.int64)
    seen = torch.zeros(4, dtype=torch.int64)
    hold(torch.tensor([7, 2, -1, 9], dtype=torch.int32), table, seen=seen)
    assert seen.tolist() == [107, 102, 0, 109]
