"""What a model would be like on this machine, without loading it: headers are read, weights are not."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from steerpipe.core.budget import ExpertBudget, ExpertFacts
from steerpipe.core.config import EngineConfig
from steerpipe.core.errors import InputError
from steerpipe.core.resolve import ITEM_BYTES, resolve
from steerpipe.model.checkpoint import open_checkpoint, read_folder_spec
from steerpipe.model.spec import ModelSpec
from steerpipe.runtime.experts import settle_budget
from steerpipe.runtime.facts import gather_facts
from steerpipe.runtime.memory import MemoryRow, memory_rows
from steerpipe.runtime.planner import DISK, Cover, Floor, Geometry, Link, cover, prompt_floor, token_floors
from steerpipe.store.layout import BlockLayout
from steerpipe.store.plan import PackOptions, plan_pack
from steerpipe.store.reader import is_pack, open_pack
from steerpipe.store.slots import slot_bytes

LAST_CELL_TOKENS = 16  # what is left of a prompt at Enter when the rest was computed while it was typed

CPU = "CPU"  # among rates: of blocks that it computes where they lie


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parts of a model would lie."""

    folder: Path
    device: str
    form: str  # of the experts' blocks
    geometry: Geometry
    budget: ExpertBudget
    memory: tuple[MemoryRow, ...]

    @property
    def resident_share(self) -> float:
        return min(1.0, self.budget.slots / (self.geometry.layers * self.geometry.experts))


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Floors and covers of a placement over measured or given links."""

    placement: Placement
    memory_rate: float
    typing_tokens_per_second: float
    typing: tuple[Cover, ...]  # of one block, per link
    generating: tuple[Cover, ...]  # the same, in tokens generated
    missing_bytes: int  # of the experts that have no slot
    typing_missing: tuple[Cover, ...]  # of all of those, per link
    tokens: tuple[Floor, ...]
    prompts: tuple[Floor, ...]

    def as_json(self) -> dict[str, Any]:
        placement = self.placement
        return {
            "model": str(placement.folder),
            "device": placement.device,
            "geometry": asdict(placement.geometry),
            "resident_share": placement.resident_share,
            "memory": [asdict(row) for row in placement.memory],
            "memory_bytes_per_second": self.memory_rate,
            "typing_tokens_per_second": self.typing_tokens_per_second,
            "typing": [cover_json(each) for each in self.typing],
            "generating": [cover_json(each) for each in self.generating],
            "missing_bytes": self.missing_bytes,
            "typing_missing": [cover_json(each) for each in self.typing_missing],
            "token_floors": [asdict(floor) for floor in self.tokens],
            "prompt_floors": [asdict(floor) for floor in self.prompts],
        }


def cover_json(each: Cover) -> dict[str, Any]:
    return asdict(each) | {"least_tokens": each.least, "most_tokens": each.most}


def place_model(folder: Path, config: EngineConfig) -> Placement:
    """Settles the budgets as a run would. Raises what a run would raise, and InputError for a model without experts."""
    _, spec = read_folder_spec(folder)
    if not spec.moe_layers:
        raise InputError(f"{folder} has no experts", fix="plan is about Mixture-of-Experts models")
    facts = gather_facts(spec, folder)
    settled = resolve(config, facts)
    layouts = _layouts(folder)
    block = max(layout.block_bytes for layout in layouts)
    held = block if settled.device == "cuda" else slot_bytes(layouts, getattr(torch, settled.dtype))
    experts = ExpertFacts(sum(spec.moe(layer).experts for layer in spec.moe_layers), held, block)
    budget = settle_budget(config, settled, facts, experts)
    read = facts.resident_parameters - (
        0 if spec.tied_embeddings else spec.vocab * spec.hidden
    )  # of it, a token needs a row
    geometry = _geometry(spec, experts, read * ITEM_BYTES[settled.dtype])
    rows = memory_rows(settled, facts, budget, experts)
    return Placement(folder, settled.device, layouts[0].format.value, geometry, budget, rows)


def plan_placement(
    placement: Placement, memory_rate: float, rates: Mapping[str, float], tokens_per_second: float, prompt_tokens: int
) -> ModelPlan:
    """`rates`: bytes per second from "page-locked RAM", "RAM" and "disk", where the placement has anything there; and
    of the CPU, where it is to compute what is missing.
    """
    geometry, resident = placement.geometry, placement.resident_share
    links = links_of(placement, rates)
    computes = "page-locked RAM" if placement.device == "cuda" else "RAM"
    cpu = Link(computes, rates[CPU]) if CPU in rates else None
    tokens = token_floors(geometry, resident, memory_rate, links, cpu)
    generated = 1 / tokens[min(1, len(tokens) - 1)].demand_seconds  # as recorded, where anything is ever missing
    lengths = sorted({prompt_tokens, min(prompt_tokens, LAST_CELL_TOKENS)}, reverse=True)
    every = geometry.layers * geometry.experts
    missing = max(0, every - placement.budget.slots) * geometry.block_bytes
    return ModelPlan(
        placement=placement,
        memory_rate=memory_rate,
        typing_tokens_per_second=tokens_per_second,
        typing=tuple(cover(geometry.block_bytes, link, tokens_per_second) for link in links),
        generating=tuple(cover(geometry.block_bytes, link, generated) for link in links),
        missing_bytes=missing,
        typing_missing=tuple(cover(max(1, missing), link, tokens_per_second) for link in links),
        tokens=tokens,
        prompts=tuple(prompt_floor(geometry, length, resident, memory_rate, links) for length in lengths),
    )


def links_of(placement: Placement, rates: Mapping[str, float]) -> tuple[Link, ...]:
    """Where a missing expert may lie, with the share of experts in each place; nothing where all are resident."""
    budget, geometry = placement.budget, placement.geometry
    if budget.resident:
        return ()
    every = geometry.layers * geometry.experts * geometry.block_bytes
    shares = {"page-locked RAM": budget.pinned_bytes / every, "RAM": (budget.ram_bytes - budget.pinned_bytes) / every}
    shares[DISK] = max(0.0, 1 - sum(shares.values()))
    slowest = budget.pace or float("inf")
    return tuple(Link(name, min(rates[name], slowest), share) for name, share in shares.items() if share > 0)


def _layouts(folder: Path) -> list[BlockLayout]:
    """Of the pack, or of the pack that would be made of a checkpoint."""
    if is_pack(folder):
        return [each.layout for each in open_pack(folder).manifest.classes]
    return [each.layout for each in plan_pack(open_checkpoint(folder), PackOptions()).classes]


def _geometry(spec: ModelSpec, experts: ExpertFacts, dense_bytes: int) -> Geometry:
    """Of a model whose MoE layers differ, the largest: what follows from it is no floor there, but an upper bound."""
    layers = [spec.moe(layer) for layer in spec.moe_layers]
    return Geometry(
        layers=len(layers),
        experts=max(layer.experts for layer in layers),
        top_k=max(layer.top_k for layer in layers),
        block_bytes=experts.block_bytes,
        slot_bytes=experts.slot_bytes,
        dense_bytes=dense_bytes,
    )
