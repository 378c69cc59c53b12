"""The law of shared pages on the GPU's path: who holds the memory changes time, never a bit. For CUDA and the CPU."""

from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from steerpipe.core.pages import PagePlan, page_shape
from steerpipe.model.gpu.decoder import GpuDecoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.kv_pages import PagedKvPool
from steerpipe.store.reader import Pack
from steerpipe.transfer.cuda.source import CudaSource
from tests.support.gpu import MAX_BATCH
from tests.support.running import Loaded


def plan_for(pack: Pack, dtype: torch.dtype, pages: int, kv_pages: int) -> PagePlan:
    block_bytes = KvPool(pack.spec, dtype, torch.device("cpu"), 1).block_bytes
    slot_bytes = max(pack.layout(layer).block_bytes for layer in pack.spec.moe_layers)
    return PagePlan(page_shape(block_bytes, slot_bytes), pages, kv_pages)


def paged(loaded: Loaded, source: CudaSource, plan: PagePlan) -> Loaded:
    """The same model over `source`, its keys and values in the source's pages."""
    old, decoder = loaded.pool, loaded.decoder
    assert source.lender is not None and isinstance(decoder, GpuDecoder)
    pool = PagedKvPool(
        old.spec, old.dtype, old.device, plan.kv_pages * plan.shape.blocks, pages=source.lender,
        page_blocks=plan.shape.blocks,
    )  # fmt: skip
    own = GpuDecoder(loaded.spec, decoder._network._weights, pool, old.device, max_batch=MAX_BATCH)
    return replace(loaded, decoder=own, experts=source, pool=pool)


def drive(loaded: Loaded, vocab: int, *, prompt: int, steps: int, rounds: int = 2) -> Tensor:
    """All logits, as bits: sequences begin, end and grow between steps of every class."""
    random = Random(5)
    logits = []
    for _ in range(rounds):
        kvs = []
        for length in (prompt, 3, prompt // 2):
            kvs.append(loaded.pool.sequence())
            logits.append(loaded.prefill(random.choices(range(vocab), k=length), (), kvs[-1]))
            logits.append(loaded.one_row(random.choices(range(vocab), k=steps), kvs[0]))
        logits.extend(loaded.batch(kvs, random.choices(range(vocab), k=len(kvs))) for _ in range(steps))
        kvs.pop().free()
        logits.append(loaded.one_row(random.choices(range(vocab), k=steps), kvs[0]))
        for kv in kvs:
            kv.free()
    assert loaded.pool.live_blocks == 0
    return torch.cat(logits).cpu().view(torch.int32)
