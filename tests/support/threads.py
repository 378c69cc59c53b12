"""python -m tests.support.threads COUNT FOLDER: checks the row rule of a checkpoint with so many torch threads."""

import sys
from pathlib import Path
from random import Random

import torch
from tests.model.test_row_rule import check_bits
from tests.support.running import load


def main(count: int, folder: Path) -> None:
    torch.set_num_threads(count)
    assert torch.get_num_threads() == count
    for dtype in (torch.float32, torch.bfloat16):
        model = load(folder, dtype, blocks=64)
        for seed in range(3):
            check_bits(model, Random(seed), length=70)
        print(str(dtype).removeprefix("torch."), "ok")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
