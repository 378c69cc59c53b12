"""The hooks of one MoE layer, and what they have seen.

R rows of a pass (batch x positions, row after row), k routed experts, H hidden.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steerpipe.core.errors import ConfigError
from steerpipe.trace.seams import Seam, shared_expert


class RoutingWatch:
    """What the experts of one layer were called with; one entry per pass."""

    def __init__(self, seam: Seam) -> None:
        self.seam = seam
        self.experts: list[Tensor] = []  # [R, k] int16
        self.weights: list[Tensor] = []  # [R, k]

    def hooks(self) -> list[RemovableHandle]:
        experts = cast("nn.Module", self.seam.experts)
        return [experts.register_forward_pre_hook(self._on_experts, with_kwargs=True)]

    def forget(self) -> None:
        self.experts.clear()
        self.weights.clear()

    def _on_experts(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _hidden, index, gates = (*args, *kwargs.values())  # in every family of transformers 5.17 to 5.22
        assert not index.is_floating_point() and gates.shape == index.shape, "experts are called in another way"
        width = index.shape[-1]
        self.experts.append(index.detach().reshape(-1, width).to(torch.int16))
        self.weights.append(gates.detach().reshape(-1, width).clone())


class StateWatch:
    """The hidden states around one layer's MoE block; one entry per pass. See predict.records.States."""

    def __init__(self, seam: Seam, dtype: torch.dtype | None) -> None:
        """Kept as `dtype` (None: as they are). ConfigError: a layer that is not understood."""
        if seam.block is seam.layer:
            raise ConfigError(
                f"{seam.name} ({type(seam.layer).__name__}) has its experts beside its attention, not in a block",
                fix="trace this model without hidden states",
            )
        self.seam = seam
        self.shared_expert = shared_expert(seam)
        self.entering: list[Tensor] = []  # [R, H]
        self.residual: list[Tensor] = []
        self.shared: list[Tensor] = []  # stays empty without a shared expert
        self._dtype = dtype
        self._normed: list[tuple[Tensor, Tensor]] = []  # (input, output) of the norms so far in this pass
        self._outputs: dict[nn.Module, Tensor] = {}  # of the shared expert and its switch in this pass

    def hooks(self) -> list[RemovableHandle]:
        layer, block, parts = self.seam.layer, self.seam.block, self.shared_expert
        handles = [norm.register_forward_hook(self._on_norm) for norm in self.seam.norms]
        handles.append(layer.register_forward_pre_hook(self._on_layer, with_kwargs=True))
        handles.append(block.register_forward_pre_hook(self._on_block, with_kwargs=True))
        if parts is not None:
            modules = [part for part in (parts.module, parts.switch) if part is not None]
            handles.extend(module.register_forward_hook(self._on_shared) for module in modules)
            handles.append(layer.register_forward_hook(self._on_layer_end))
        return handles

    def forget(self) -> None:
        for kept in (self.entering, self.residual, self.shared, self._normed):
            kept.clear()
        self._outputs.clear()

    def _on_layer(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._normed.clear()
        self.entering.append(self._keep(_hidden_states(args, kwargs)))

    def _on_norm(self, _module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._normed.append((args[0], output))

    def _on_block(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The norm in front is the one whose output is given to the block; without one the block gets the residual."""
        given = _hidden_states(args, kwargs)
        before = [source for source, output in self._normed if output is given]
        self.residual.append(self._keep(before[-1] if before else given))
        self._normed.clear()

    def _on_shared(self, module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        self._outputs[module] = output.detach()

    def _on_layer_end(self, _module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
        assert self.shared_expert is not None, "hooked only with a shared expert"
        own = self._outputs.pop(self.shared_expert.module)
        if self.shared_expert.switch is not None:
            own = torch.sigmoid(self._outputs.pop(self.shared_expert.switch)) * own
        self.shared.append(self._keep(own))

    def _keep(self, state: Tensor) -> Tensor:
        """A copy: the model may add to its residual stream in place."""
        return state.detach().reshape(-1, state.shape[-1]).to(self._dtype, copy=True)


def _hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    given = args[0] if args else kwargs["hidden_states"]
    assert isinstance(given, Tensor), "a layer is given its hidden states first"
    return given
