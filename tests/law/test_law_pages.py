"""The law where keys and values take pages from the experts: who holds the memory changes time, never a bit."""

import functools

import pytest
import torch

from steerpipe.core.pages import page_shape
from steerpipe.engine.request import Request
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.kv_pages import PagedKvPool
from steerpipe.transfer.faulty import FaultyLink
from steerpipe.transfer.source import LadderSource, slot_bytes
from tests.law.cases import DTYPES, LINKS
from tests.law.test_law import RandomGuesses
from tests.support.running import CPU
from tests.transfer.packs import tiny_pack
from tests.transfer.running import GREEDY, SAMPLED, Run, prompt, requests, resident, run


def asked() -> list[Request]:
    """Some need a second block while they decode, one while it is prefilled."""
    return [*requests(), Request(prompt(5, 126), GREEDY, batched=True), Request(prompt(6, 150), SAMPLED)]


@functools.cache
def apart(blocks: int, dtype: torch.dtype) -> Run:
    """Every expert resident, and as many blocks in memory of their own."""
    pool = KvPool(tiny_pack().spec, dtype, CPU, blocks)
    return run(resident("qwen3_moe", None, dtype), dtype=dtype, asked=asked(), pool=pool)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("guesses", ["none", "random"])
@pytest.mark.parametrize(("blocks", "form"), [(2, "float32"), (5, "bfloat16")])
def test_no_bit_changes_when_pages_change_hands(link: str, guesses: str, blocks: int, form: str) -> None:
    pack, dtype = tiny_pack(), DTYPES[form]
    shape = page_shape(KvPool(pack.spec, dtype, CPU, 1).block_bytes, slot_bytes(pack, dtype))
    assert shape.blocks == 1
    with LadderSource.open(
        pack, slots=(blocks + 1) * shape.slots, dtype=dtype, readers=2 if link == "reordering" else 1, shape=shape,
        wrap=lambda below: FaultyLink(below, LINKS[link], seed=7),
    ) as source:  # fmt: skip
        assert source.lender is not None
        pool = PagedKvPool(pack.spec, dtype, CPU, blocks, pages=source.lender, page_blocks=1)
        experts = RandomGuesses(source, 3) if guesses == "random" else source
        found = run(experts, dtype=dtype, asked=asked(), pool=pool)
        assert found.same_bits(apart(blocks, dtype))
        source.check_integrity()
        counts = source.lender.counts()
        assert counts.taken == counts.returned > blocks and counts.kv == 0
        assert counts.moved and source.counters().evictions
