"""What is settled before the first expert moves: how many slots there are, and that the numbers will be the same."""

from collections.abc import Sequence

import torch

from steerpipe.core.budget import ExpertBudget, ExpertFacts, plan_budget
from steerpipe.core.config import EngineConfig
from steerpipe.core.machine import read_memory
from steerpipe.integrations.arithmetic import settle_sums
from steerpipe.integrations.blocks import SlotLayout
from steerpipe.integrations.exchange import ExpertLayer
from steerpipe.integrations.form import ExpertForm


def settle_budget(forms: Sequence[ExpertForm], config: EngineConfig, *, held_bytes: int = 0) -> ExpertBudget:
    """ConfigError or CapacityError name the smallest budget. `held_bytes`: what the modules will give back."""
    facts = ExpertFacts(
        experts=sum(form.experts for form in forms),
        slot_bytes=max(SlotLayout.of(form).slot_bytes for form in forms),  # slots have the size of the largest
        block_bytes=max(form.block_bytes for form in forms),
    )
    return plan_budget(config, facts, read_memory().available_bytes + held_bytes)


def prove(layers: Sequence[ExpertLayer], device: torch.device) -> tuple[bool, ...]:
    """For each layer, `settle_sums`; layers of one class and form are proved once."""
    settled: dict[tuple[type, ExpertForm], bool] = {}
    for layer in layers:
        kind = (type(layer.module), layer.form)
        if kind not in settled:
            settled[kind] = settle_sums(layer.name, layer.module, layer.form, device)
    return tuple(settled[type(layer.module), layer.form] for layer in layers)
