"""Keys and values in pages of the slots on a card: direct, served and leased steps change no bit."""

import pytest
import torch

from steerpipe import Pipeline
from tests.support.tiny import VOCAB, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

if torch.cuda.is_available():  # importing kernels needs triton
    from steerpipe.transfer.cuda.source import CudaSource
    from tests.support.gpu import load_gpu, pack_of
    from tests.support.gpu_pages import drive, paged, plan_for

CUDA = torch.device("cuda")
GREEDY = {"temperature": 0.0, "max_tokens": 80, "ignore_eos": True, "logprobs": 2}


@pytest.mark.parametrize("way", ["direct", "served", "leased", "through the ring"])
def test_no_bit_changes_when_pages_change_hands(way: str) -> None:
    pack = pack_of(tiny("qwen3_moe", head_dim=16).folder)
    apart = load_gpu(pack, torch.bfloat16, CUDA)
    plan = plan_for(pack, torch.bfloat16, pages=8 if way in ("direct", "served") else 6, kv_pages=5)
    total = sum(pack.spec.moe(layer).experts * pack.layout(layer).block_bytes for layer in pack.spec.moe_layers)
    pinned = total // 2 if way == "through the ring" else total
    with CudaSource.open(pack, slots=0, device=CUDA, pinned_bytes=pinned, plan=plan, direct=way == "direct") as source:
        assert source.lender is not None
        loaded = paged(apart, source, plan)
        loaded.decoder.graphs = way != "leased"  # type: ignore[attr-defined]
        found = drive(loaded, VOCAB, prompt=100, steps=40, rounds=3)
        assert torch.equal(found, drive(apart, VOCAB, prompt=100, steps=40, rounds=3))
        source.check_integrity()
        counts = source.lender.counts()
        assert counts.taken == counts.returned > 8 and counts.kv == 0
        assert source.counters().evictions


def test_a_pipeline_on_a_card_shares_its_memory_and_says_the_same() -> None:
    prompts = [f"Tell me about number {number}, please." for number in range(8)]
    common = {"device": "cuda", "profile": False, "max_context": 512, "max_batch": 8}
    with Pipeline(**common) as whole:
        expected = [(each.token_ids, each.logprobs) for each in whole.generate_batch(prompts, **GREEDY)]
    with Pipeline(**common, fast_memory="40MiB", kv_memory="shared") as shared:
        assert any(row.what == "experts, and keys and values" and row.where == "GPU" for row in shared.memory)
        found = [(each.token_ids, each.logprobs) for each in shared.generate_batch(prompts, **GREEDY)]
        assert found == expected
        pages = shared.pages()
        assert pages is not None and pages.taken == pages.returned >= 8
        shared.experts.check_integrity()  # type: ignore[union-attr]
