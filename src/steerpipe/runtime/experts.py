"""Chooses where the experts of a model lie: all in memory, or in slots over RAM and disk."""

import torch

from steerpipe.core.budget import ExpertBudget, ExpertFacts, plan_budget
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import ConfigError
from steerpipe.core.protocols import ExpertSource
from steerpipe.store.progress import Progress
from steerpipe.store.reader import Pack
from steerpipe.store.resident import ResidentExperts
from steerpipe.transfer.source import LadderSource, slot_bytes


def expert_facts(pack: Pack, dtype: torch.dtype) -> ExpertFacts:
    experts = sum(pack.spec.moe(layer).experts for layer in pack.spec.moe_layers)
    if not experts:
        return ExpertFacts(0, 0, 0)
    largest = max(pack.layout(layer).block_bytes for layer in pack.spec.moe_layers)
    return ExpertFacts(experts, slot_bytes(pack, dtype), largest)


def settle_budget(pack: Pack, config: EngineConfig, dtype: torch.dtype, device: str, free_bytes: int) -> ExpertBudget:
    """The budget for the experts of a pack; `free_bytes` is what the dense weights and the KV cache leave."""
    budget = plan_budget(config, expert_facts(pack, dtype), free_bytes)
    if device == "cuda" and not budget.resident:
        raise ConfigError(
            "experts on demand are not computed on CUDA yet",
            fix="run with device = cpu, or use a format in which all experts fit on the GPU",
        )
    return budget


def open_experts(
    pack: Pack, budget: ExpertBudget, policy: str, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> ExpertSource:
    """Loads everything, or opens the ladder, which loads as experts are asked for."""
    if budget.resident:
        return ResidentExperts.load(pack, dtype, device, progress)
    return LadderSource.open(
        pack, slots=budget.slots, dtype=dtype, device=device, ram_bytes=budget.ram_bytes, policy=policy,
        pace=budget.pace,
    )  # fmt: skip
