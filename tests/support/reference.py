"""What transformers says: logits and routing of its own model, greedy answers of its own `generate`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(slots=True)
class Reference:
    """Of one sequence: logits [T, vocab] fp32; per MoE layer, the router's choice and probabilities."""

    logits: Tensor
    experts: dict[int, Tensor] = field(default_factory=dict)  # layer → [T, k], rank order
    gates: dict[int, Tensor] = field(default_factory=dict)  # layer → [T, k]
    probabilities: dict[int, Tensor] = field(default_factory=dict)  # layer → [T, E], fp32

    def clear_rows(self, layer: int, margin: float = 1e-6) -> Tensor:
        """[T] bool: rows in which no two neighbours in rank, down to the first expert left out, nearly tie."""
        ranked = self.probabilities[layer].sort(dim=-1, descending=True).values  # [T, E]
        upto = min(self.experts[layer].shape[1] + 1, ranked.shape[1])
        return (ranked[:, : upto - 1] - ranked[:, 1:upto] > margin).all(dim=-1)


def compute(model: PreTrainedModel, tokens: Sequence[int]) -> Reference:
    """One pass over the whole sequence on the model's device; results on the CPU."""
    found = Reference(torch.empty(0))
    with torch.no_grad(), _watched(model, found):
        found.logits = model(torch.tensor([list(tokens)], device=model.device)).logits[0].float().cpu()
    return found


def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False, max_new_tokens=count, pad_token_id=0,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@contextmanager
def _watched(model: PreTrainedModel, found: Reference) -> Iterator[None]:
    hooks = []
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            hooks.append(layer.mlp.experts.register_forward_pre_hook(_keep_choice(found, index), with_kwargs=True))
            hooks.append(layer.mlp.gate.register_forward_hook(_keep_probabilities(found, index)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _keep_choice(found: Reference, layer: int) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        _, experts, gates = (*args, *kwargs.values())
        found.experts[layer], found.gates[layer] = experts.cpu(), gates.float().cpu()

    return hook


def _keep_probabilities(found: Reference, layer: int) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        found.probabilities[layer] = output[0].float().softmax(-1).cpu()

    return hook
