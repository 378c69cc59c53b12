"""A model from a folder, built by transformers with its experts left out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from steerpipe.core.errors import CheckpointError, TensorError
from steerpipe.integrations.blocks import BlockWriter
from steerpipe.integrations.checkpoint import AbsentTensor, LazyTensor, ParameterSource, find_sources
from steerpipe.integrations.exchange import ExpertLayer, expert_layers
from steerpipe.model.checkpoint import read_entries, read_json, refuse_quantised
from steerpipe.model.safetensors import TensorEntry


@dataclass(frozen=True, slots=True)
class HollowModel:
    """A loaded model whose experts are on the meta device, and where they are to be had."""

    model: PreTrainedModel
    layers: tuple[ExpertLayer, ...]
    sources: Mapping[str, ParameterSource]

    def write_experts(self, writer: BlockWriter) -> None:
        """Every expert from the checkpoint's files into its block. Takes the memory of one."""
        for number, layer in enumerate(self.layers):
            block = torch.zeros(layer.form.block_bytes, dtype=torch.uint8)
            views = layer.form.views(block)
            for expert in range(layer.form.experts):
                for name, view in views.items():
                    view.copy_(self.sources[f"{layer.name}.{name}"].read(expert, self.model))
                writer.write(number, expert, block)


def load_hollow(folder: Path, dtype: torch.dtype | None, attn_implementation: str | None) -> HollowModel:
    """Reads config, headers and dense weights. None: the dtype that the weights have, transformers' own attention."""
    refuse_quantised(read_json(folder / "config.json"), str(folder / "config.json"))
    entries = read_entries(folder)
    config = _read_config(folder)
    settled = dtype or _stored_dtype(config, entries)
    with torch.device("meta"):
        empty: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=settled)
    sources, experts = find_sources(empty, expert_layers(empty), entries)
    state = {name: (AbsentTensor if name in experts else LazyTensor)(entry) for name, entry in entries.items()}
    kind: Any = type(empty)
    model, report = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=settled, attn_implementation=attn_implementation,
        output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    _check_complete(folder, report)
    model.name_or_path = str(folder)
    if (
        folder / "generation_config.json"
    ).is_file():  # from_pretrained would have read it, had it been given the folder
        model.generation_config = GenerationConfig.from_pretrained(folder)
    layers = expert_layers(model)
    assert all(each.is_meta for layer in layers for each in layer.parameters().values()), "an expert was loaded"
    return HollowModel(model, layers, sources)


def _check_complete(folder: Path, report: Mapping[str, Any]) -> None:
    """transformers fills what is missing with random numbers, and says so in a log."""
    wrong = [*sorted(report["missing_keys"]), *(str(key) for key, *_ in sorted(report["mismatched_keys"]))]
    if wrong:
        raise TensorError(
            f"{folder} has no weights of the right shape for {', '.join(wrong[:4])} ({len(wrong)} in all)",
            fix="config.json and the weights do not belong together, or files are missing: fetch the model again",
        )


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError) as problem:
        raise CheckpointError(
            f"transformers does not know this model: {str(problem).splitlines()[0]}", fix="use a newer transformers"
        ) from None
    return config


def _stored_dtype(config: PreTrainedConfig, entries: Mapping[str, TensorEntry]) -> torch.dtype:
    """What config.json says, else that of the first weights."""
    said = config.dtype
    if isinstance(said, torch.dtype):
        return said
    return next((entry.dtype for entry in entries.values() if entry.dtype.is_floating_point), torch.float32)
