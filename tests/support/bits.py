"""The row rule on any loaded model; without transformers or hypothesis, so that a new process starts quickly.

python -m tests.support.bits THREADS FOLDER: checks a checkpoint with so many torch threads.
"""

import sys
from pathlib import Path
from random import Random

import torch

from tests.support.running import Loaded, ShuffledExperts, load


def random_tokens(vocab: int, count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_bits(model: Loaded, random: Random, length: int) -> None:
    """Chunks, arrival order and batches change no bit: one random try of each."""
    tokens = random_tokens(model.spec.vocab, length, random.randint(0, 2**31))
    whole = model.prefill(tokens)
    at = random.sample(range(length), random.randint(0, min(length - 1, 6)))
    late = ShuffledExperts(model.experts, random, singly=False)
    assert torch.equal(model.prefill(tokens, at, experts=late), whole), f"chunks at {sorted(at)}"
    kvs = [model.pool.sequence() for _ in range(random.randint(2, 20))]
    for kv in kvs:
        model.prefill(tokens[: random.randint(1, length)], kv=kv)
    alone = [kv.fork() for kv in kvs]
    fed = random_tokens(model.spec.vocab, len(kvs), 1)
    together = model.batch(kvs, fed)
    for row, fork in enumerate(alone):
        assert torch.equal(model.batch([fork], [fed[row]])[0], together[row]), f"row {row} of {len(kvs)}"
    for kv in kvs + alone:
        kv.free()


def main(threads: int, folder: Path) -> None:
    torch.set_num_threads(threads)
    assert torch.get_num_threads() == threads
    for dtype in (torch.float32, torch.bfloat16):
        check_bits(load(folder, dtype), Random(threads), length=40)
        print(str(dtype).removeprefix("torch."), "ok")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
