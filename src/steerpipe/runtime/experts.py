"""Chooses where the experts of a model lie: all in memory, or in slots over RAM and disk."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from steerpipe.core.budget import ExpertBudget, ExpertFacts, plan_budget
from steerpipe.core.budget_cuda import plan_cuda_budget
from steerpipe.core.budget_shared import plan_shared_budget, plan_shared_cuda_budget
from steerpipe.core.config import SHARED, EngineConfig
from steerpipe.core.ids import ExpertId
from steerpipe.core.protocols import ExpertSource
from steerpipe.core.resolve import Facts, ResolvedConfig
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.kv_pages import Lender, PagedKvPool
from steerpipe.model.spec import ModelSpec
from steerpipe.runtime.draft_forecast import Foreseen
from steerpipe.store.progress import Progress, silent
from steerpipe.store.reader import Pack
from steerpipe.store.resident import ResidentExperts
from steerpipe.transfer.counters import LadderCounters
from steerpipe.transfer.source import LadderSource, slot_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steerpipe.core.blocks import BlockSource
    from steerpipe.runtime.substitutes import NearbyExperts, Shelf
    from steerpipe.store.policies import Policy
    from steerpipe.transfer.cuda.copier import Copier

Source = TypeVar("Source")


class Ladder(Foreseen, Protocol):
    """What a LadderSource and a CudaSource have in common: counts, something learnt, and an end."""

    @property
    def policy(self) -> "Policy": ...

    @property
    def experts(self) -> tuple[ExpertId, ...]:
        """In the policy's numbering."""
        ...

    @property
    def residents(self) -> list[ExpertId]: ...

    @property
    def tokens(self) -> float: ...

    @property
    def lender(self) -> Lender | None:
        """Of the pages that the slots lie in; None where keys and values have memory of their own."""
        ...

    def warm(self, experts: "Iterable[ExpertId]") -> int: ...

    def impatient(self) -> "Shelf":
        """The same experts for whoever does not wait for them."""
        ...

    def nearby(self) -> "NearbyExperts":
        """Experts that the CPU can compute where they lie. ConfigError: there are none."""
        ...

    def counters(self) -> LadderCounters: ...

    def close(self) -> None: ...


def expert_facts(pack: Pack, dtype: torch.dtype, device: str) -> ExpertFacts:
    """A slot of a GPU holds the raw block; elsewhere it holds what is computed with."""
    experts = sum(pack.spec.moe(layer).experts for layer in pack.spec.moe_layers)
    if not experts:
        return ExpertFacts(0, 0, 0)
    largest = max(pack.layout(layer).block_bytes for layer in pack.spec.moe_layers)
    return ExpertFacts(experts, largest if device == "cuda" else slot_bytes(pack, dtype), largest)


def settle_budget(config: EngineConfig, resolved: ResolvedConfig, facts: Facts, experts: ExpertFacts) -> ExpertBudget:
    """What the experts get of the memory that dense weights and the KV cache leave."""
    dense_bytes = facts.resident_parameters * getattr(torch, resolved.dtype).itemsize
    if config.kv_memory == SHARED:
        blocks, block_bytes = resolved.kv_blocks, resolved.kv_memory_bytes // resolved.kv_blocks
        if resolved.device == "cuda":
            return plan_shared_cuda_budget(
                config, experts, blocks, block_bytes, facts.free_cuda_bytes - dense_bytes, facts.free_ram_bytes
            )
        return plan_shared_budget(config, experts, blocks, block_bytes, facts.free_ram_bytes - dense_bytes)
    taken = resolved.kv_memory_bytes + dense_bytes
    if resolved.device == "cuda":
        return plan_cuda_budget(config, experts, facts.free_cuda_bytes - taken, facts.free_ram_bytes)
    return plan_budget(config, experts, facts.free_ram_bytes - taken)


@dataclass(frozen=True, slots=True)
class Opened(Generic[Source]):
    """Experts as a decoder wants them. `ladder`: the same, where they come and go or have an end; else None."""

    source: Source
    ladder: Ladder | None


def open_experts(
    pack: Pack, budget: ExpertBudget, policy: str, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> Opened[ExpertSource]:
    """Loads everything, or opens the ladder, which loads as experts are asked for."""
    if budget.resident:
        return Opened(ResidentExperts.load(pack, dtype, device, progress), None)
    ladder = LadderSource.open(
        pack, slots=budget.slots, dtype=dtype, device=device, ram_bytes=budget.ram_bytes, policy=policy,
        pace=budget.pace, shape=None if budget.pages is None else budget.pages.shape,
    )  # fmt: skip
    return Opened(ladder, ladder)


def open_kv(
    spec: ModelSpec, resolved: ResolvedConfig, dtype: torch.dtype, device: torch.device, ladder: Ladder | None
) -> KvPool:
    """Memory of its own, allocated as it is needed; or the pages of `ladder`, where it lends such."""
    lender = None if ladder is None else ladder.lender
    if lender is None:
        return KvPool(spec, dtype, device, resolved.kv_blocks)
    return PagedKvPool(spec, dtype, device, resolved.kv_blocks, pages=lender, page_blocks=lender.shape.blocks)


def open_blocks(
    pack: Pack, budget: ExpertBudget, policy: "Policy | str", device: torch.device, progress: Progress | None, *,
    lossy: bool = False, copier: "Copier | None" = None,
) -> "Opened[BlockSource]":  # fmt: skip
    """Slots on the GPU over page-locked and other RAM and the disk; what fits in RAM is read now. `lossy`: the host
    answers for what is missing, so no row reads it by itself. `copier`: who moves blocks; None: the usual one.
    """
    from steerpipe.model.gpu.experts import NoBlocks  # Triton, and the CUDA driver: only where there is a GPU
    from steerpipe.model.gpu.limits import check_model
    from steerpipe.transfer.cuda.source import CudaSource

    check_model(pack.spec, device)  # before minutes of reading
    if not budget.slots:
        return Opened(NoBlocks(), None)
    ladder = CudaSource.open(
        pack, slots=budget.slots, device=device, pinned_bytes=budget.pinned_bytes,
        ram_bytes=budget.ram_bytes - budget.pinned_bytes, policy=policy, pace=budget.pace, progress=progress or silent,
        plan=budget.pages, direct=False if lossy else None, copier=copier,
    )  # fmt: skip
    return Opened(ladder, ladder)
