"""The experts function that transformers calls: leases, waves, and the sums in expert order.

Same operations in the same order as the module's own eager forward, so the same bits; `arithmetic` proves it for each
module before it is used. Legend: T tokens, k experts per token, H hidden, I expert width.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from steerpipe.core.errors import RequestError
from steerpipe.core.protocols import ExpertSource, ExpertWeights
from steerpipe.integrations.blocks import whole_slot
from steerpipe.integrations.form import ExpertForm, ExpertsModule

IMPLEMENTATION = "steerpipe"
BINDING = "steerpipe_layer"  # attribute of an experts module that is attached
KEPT_ROWS = 16  # the experts of so many last rows are worth keeping; longer calls are prompts

Parameters = dict[str, Tensor]  # one expert's, by the module's names


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """What an attached module knows: where its experts come from."""

    source: ExpertSource
    layer: int
    form: ExpertForm
    sum_in_gate_dtype: bool  # whether contributions are added in the routing weights' dtype, or in the input's
    _views: dict[int, Parameters] = field(default_factory=dict)  # by the slot's address: slots never move

    def parameters(self, weights: ExpertWeights) -> Parameters:
        address = weights.gate_up.data_ptr()
        found = self._views.get(address)
        if found is None:
            found = self._views[address] = self.form.views(whole_slot(weights))
        return found


def experts_forward(module: ExpertsModule, hidden: Tensor, index: Tensor, gates: Tensor) -> Tensor:
    """hidden [T, H], index [T, k] of experts, gates [T, k] → [T, H]. Waits for experts; RequestError: not usable so."""
    bound = _bound_layer(module, hidden)
    experts = bound.form.experts
    routed = distinct(index, experts)
    keep = None if len(index) <= KEPT_ROWS else distinct(index[-KEPT_ROWS:], experts)
    total = ExpertSum(hidden, gates, routed, in_gate_dtype=bound.sum_in_gate_dtype)
    with bound.source.lease(bound.layer, routed, keep) as lease:
        for wave in lease.waves():
            for expert in wave.experts:
                total.add(
                    expert, *contribution(module, bound.parameters(wave.table[expert]), hidden, index, gates, expert)
                )
    return total.result


def contribution(
    module: ExpertsModule, parameters: Parameters, hidden: Tensor, index: Tensor, gates: Tensor, expert: int
) -> tuple[Tensor, Tensor]:
    """The rows [n] that one expert is asked for, and what it adds to them: [n, H]."""
    rank, row = torch.where(index.t() == expert)  # rank by rank, as the eager forward has them
    return row, expert_rows(module, parameters, hidden[row]) * gates[row, rank, None]


def expert_rows(module: ExpertsModule, parameters: Parameters, rows: Tensor) -> Tensor:
    """Some rows [n, H] through one expert: [n, H], not weighted yet."""
    linear = _transposed if module.is_transposed else F.linear
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inner = linear(rows, parameters[first], parameters.get(f"{first}_bias"))  # [n, 2I], or [n, I] without gate
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)  # noqa: SLF001 (theirs to share)
    out = linear(inner, parameters["down_proj"], parameters.get("down_proj_bias"))  # [n, H]
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


class ExpertSum:
    """Adds contributions in ascending expert order, in whatever order they come; what is early is held."""

    def __init__(self, hidden: Tensor, gates: Tensor, experts: Iterable[int], *, in_gate_dtype: bool) -> None:
        self._dtype = hidden.dtype
        self._total = torch.zeros_like(hidden, dtype=gates.dtype if in_gate_dtype else None)
        self._awaited = sorted(experts, reverse=True)
        self._early: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, expert: int, row: Tensor, part: Tensor) -> None:
        self._early[expert] = (row, part)
        while self._awaited and self._awaited[-1] in self._early:
            next_row, next_part = self._early.pop(self._awaited.pop())
            self._total.index_add_(0, next_row, next_part.to(self._total.dtype))

    @property
    def result(self) -> Tensor:
        assert not self._awaited, f"experts {self._awaited} never came"
        return self._total.to(self._dtype)


def register() -> None:
    """Makes transformers know the name. Twice is once."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def _transposed(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """`matrix` is [in, out]."""
    return rows @ matrix if bias is None else rows @ matrix + bias


def distinct(index: Tensor, experts: int) -> list[int]:
    """The experts that are asked for, ascending. An index past the last one is transformers' sign for nobody."""
    found: list[int] = index.unique().tolist()
    return [expert for expert in found if expert < experts]


def _bound_layer(module: ExpertsModule, hidden: Tensor) -> BoundLayer:
    bound: BoundLayer | None = getattr(module, BINDING, None)
    if bound is None:
        raise RequestError(
            f"{type(module).__name__} is told to use {IMPLEMENTATION}, but nothing is attached to it",
            fix="attach the model (two models that share a config object share this too), or call "
            'model.set_experts_implementation("eager")',
        )
    if module.training:
        raise RequestError(
            "the model is in training mode, but its experts come and go", fix="call model.eval(), or detach to train"
        )
    if torch.is_grad_enabled() and hidden.requires_grad:
        raise RequestError(
            "gradients were asked for, but the experts will have gone when they are computed",
            fix="run the model under torch.no_grad() or torch.inference_mode(), or detach to train",
        )
    if hidden.dtype != bound.form.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise RequestError(
            f"the experts are {bound.form.dtype}, but what they are to compute on is {hidden.dtype}",
            fix="cast the model before it is attached, or detach first",
        )
    return bound
