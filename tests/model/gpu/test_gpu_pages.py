"""Keys and values in pages of a GPU source's slots, in Triton's interpreter: not a bit changes."""

import pytest
import torch

from steerpipe.transfer.cuda.source import CudaSource
from tests.support.gpu import load_gpu, pack_of
from tests.support.gpu_pages import drive, paged, plan_for
from tests.support.running import CPU
from tests.support.tiny import tiny

VOCAB = 83


@pytest.mark.parametrize("pinned", [1.0, 0.5], ids=["all pinned", "half through the ring"])
def test_no_bit_changes_when_pages_change_hands(pinned: float) -> None:
    small = {"num_hidden_layers": 1, "vocab_size": VOCAB, "num_attention_heads": 2, "num_key_value_heads": 2}
    folder = tiny("qwen3_moe", **small).folder
    pack = pack_of(folder)
    apart = load_gpu(pack)
    plan = plan_for(pack, torch.float32, pages=4, kv_pages=3)
    total = sum(pack.spec.moe(layer).experts * pack.layout(layer).block_bytes for layer in pack.spec.moe_layers)
    with CudaSource.open(pack, slots=0, device=CPU, pinned_bytes=int(pinned * total), plan=plan) as source:
        assert source.lender is not None
        found = drive(paged(apart, source, plan), VOCAB, prompt=5, steps=1, rounds=1)
        assert torch.equal(found, drive(apart, VOCAB, prompt=5, steps=1, rounds=1))
        source.check_integrity()
        counts = source.lender.counts()
        assert counts.taken == counts.returned == 3 and counts.kv == 0
        assert source.counters().evictions
