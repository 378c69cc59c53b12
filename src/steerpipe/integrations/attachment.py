"""A model and the ladder that its experts come from."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

import torch
from transformers import PreTrainedModel

from steerpipe.core.budget import ExpertBudget
from steerpipe.core.errors import ConfigError, UnsupportedConfigError
from steerpipe.integrations.blocks import BlockFile
from steerpipe.integrations.compute import BINDING, IMPLEMENTATION, BoundLayer, register
from steerpipe.integrations.exchange import ExpertLayer, restore
from steerpipe.store.reader import Pack
from steerpipe.transfer.counters import LadderCounters
from steerpipe.transfer.source import LadderSource

_ATTRIBUTE = "steerpipe_attachment"  # of a model


@dataclass(frozen=True, slots=True)
class Plan:
    """What is settled before anything is moved."""

    layers: tuple[ExpertLayer, ...]
    sums: tuple[bool, ...]  # per layer: see BoundLayer
    budget: ExpertBudget
    device: torch.device


class Attachment:
    """Ends with `detach`, with the block that it is the context manager of, or with its model.

    The model holds this, and this knows the model weakly: dropping the model gives all memory back at once.
    """

    def __init__(self, model: PreTrainedModel, plan: Plan, blocks: BlockFile, source: LadderSource) -> None:
        """`model` still has the experts implementation that `detach` will give back to it."""
        self.source = source
        self.budget = plan.budget
        self._model = weakref.ref(model)
        self._plan = plan
        self._blocks = blocks
        self._before = model.get_experts_implementation()
        self._attached = True

    @property
    def fast_bytes(self) -> int:
        """What the slots take."""
        return self.source.fast_bytes

    @property
    def disk_bytes(self) -> int:
        """What the blocks take."""
        return self._blocks.size_bytes

    def counters(self) -> LadderCounters:
        """What the ladder did since the start; subtract an earlier snapshot for an interval."""
        return self.source.counters()

    @torch.inference_mode(False)
    @torch.no_grad()
    def detach(self) -> None:
        """Reads the experts back into the model's modules, every bit as it was. Twice is once.

        Needs memory for all of them. TransferError or PackError: the disk does not give them; the model stays attached.
        """
        if not self._attached:
            return
        if self._model() is not None:
            restore(self._plan.layers, self._blocks, self._plan.device)
        self.unbind()

    def unbind(self) -> None:
        """Ends the ladder and lets the model go, whatever its modules hold: for models that are given up."""
        self._attached = False
        model = self._model()
        if model is not None:
            for layer in self._plan.layers:
                layer.module.__dict__.pop(BINDING, None)
            model.__dict__.pop(_ATTRIBUTE, None)
            model.set_experts_implementation(self._before)
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def attachment_of(model: PreTrainedModel) -> Attachment:
    """What `attach` returned for this model, or `load` made for it. ConfigError: nothing."""
    found: Attachment | None = getattr(model, _ATTRIBUTE, None)
    if found is None:
        raise ConfigError(f"nothing is attached to this {type(model).__name__}", fix="attach it, or use load")
    return found


def bind(model: PreTrainedModel, plan: Plan, blocks: BlockFile) -> Attachment:
    """Opens the ladder over the blocks and points the model's modules at it. If that fails, the model is as it was."""
    budget = plan.budget
    source = LadderSource.open(
        cast("Pack", blocks),  # it has all of a Pack that the ladder uses: see blocks
        slots=budget.slots, dtype=torch.uint8, device=plan.device, ram_bytes=budget.ram_bytes, pace=budget.pace,
    )  # fmt: skip
    attachment = Attachment(model, plan, blocks, source)
    try:
        register()
        for number, (layer, in_gate_dtype) in enumerate(zip(plan.layers, plan.sums, strict=True)):
            setattr(layer.module, BINDING, BoundLayer(source, number, layer.form, in_gate_dtype))
        model.set_experts_implementation(IMPLEMENTATION)
        _check_reached(plan.layers)
    except BaseException:
        attachment.unbind()
        raise
    setattr(model, _ATTRIBUTE, attachment)
    return attachment


def _check_reached(layers: Sequence[ExpertLayer]) -> None:
    for layer in layers:
        if layer.module.config._experts_implementation != IMPLEMENTATION:  # noqa: SLF001 (its only name)
            raise UnsupportedConfigError(
                f"set_experts_implementation of this model does not reach {layer.name}",
                fix="attach the text model inside it instead",
            )
