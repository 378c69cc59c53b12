"""Training of the history networks: one for each (target layer, horizon), by cross entropy on the routed experts.

Networks of one horizon are trained together, as one batch of networks: on a GPU 24 small ones take as long as one.
T networks, R rows, S steps of the window, E experts.
"""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F

from steerpipe.predict.records import PackedTrace
from steerpipe.predict.sight import Decision, Sight, rows_for
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.trajectory_networks import Architecture, HistoryLstm, build
from steerpipe.predict.window import STEPS, Window, read_window, window_length
from steerpipe.train.fit import Schedule, batches_of, fit_batches
from steerpipe.train.networks import sights_of, usable_rows
from steerpipe.train.progress import Progress, silent

Reader = Callable[[Sight], Tensor]  # the window of a decision: [R, S, E]


def train_trajectory(
    trace: PackedTrace,
    architecture: Architecture,
    decisions: Sequence[Decision],
    schedule: Schedule,
    *,
    window: Window = Window.LAYERS,
    steps: int = STEPS,
    without: tuple[int, ...] = (),
    progress: Progress = silent,
) -> Trajectory:
    """BCEWithLogits, as in the seed."""
    experts = trace.geometry.experts

    def read(sight: Sight) -> Tensor:
        return read_window(sight, window, steps, without)

    with torch.random.fork_rng(devices=[trace.device] if trace.device.type == "cuda" else []):
        torch.manual_seed(schedule.seed)
        networks: dict[Decision, nn.Module] = {
            decision: build(architecture, experts, window_length(window, steps)).to(trace.device).train()
            for decision in decisions
        }
        for decision, network in networks.items():
            if isinstance(network, HistoryLstm):
                network.start_at(_rates(trace, decision.target))
        for horizon in {decision.horizon: None for decision in decisions}:
            alike = {decision: each for decision, each in networks.items() if decision.horizon == horizon}
            if len(alike) > 1:
                _fit_together(alike, trace, horizon, read, schedule, progress)
            else:
                for decision, network in alike.items():
                    _fit(network, trace, decision, read, schedule, progress)
    return Trajectory(architecture, experts, networks, window=window, steps=steps, without=without)


def _rates(trace: PackedTrace, layer: int) -> Tensor:
    """[E]: how often each expert is used."""
    used = torch.bincount(trace.experts[:, layer].long().flatten(), minlength=trace.geometry.experts)
    return used / trace.rows


def _fit(
    network: nn.Module, trace: PackedTrace, decision: Decision, read: Reader, schedule: Schedule, progress: Progress
) -> None:
    def gather(drawn: Tensor) -> tuple[Tensor, ...]:
        sight = Sight(trace, drawn, decision)
        return read(sight), sight.truth()

    parameters = dict(network.named_parameters())

    def loss_of(history: Tensor, routed: Tensor) -> Tensor:
        if schedule.half:
            logits = functional_call(network, _in_half(parameters), (history.bfloat16(),)).float()
        else:
            logits = network(history)
        return F.binary_cross_entropy_with_logits(logits, routed)

    what = f"layer {decision.target}, horizon {decision.horizon}"
    batches = batches_of(rows_for(trace, decision), schedule, gather, axis=0)
    fit_batches(network.parameters(), batches, loss_of, schedule, what=what, progress=progress)


def _fit_together(
    networks: dict[Decision, nn.Module], trace: PackedTrace, horizon: int, read: Reader, schedule: Schedule,
    progress: Progress,
) -> None:  # fmt: skip
    """Every network on the same tokens, each with its own window and labels."""
    targets = [decision.target for decision in networks]
    stacked, buffers = stack_module_state(list(networks.values()))
    parameters = {name: nn.Parameter(value.detach()) for name, value in stacked.items()}
    shape = copy.deepcopy(next(iter(networks.values()))).to("meta")

    def one(own: Mapping[str, Tensor], own_buffers: Mapping[str, Tensor], history: Tensor) -> Tensor:
        logits: Tensor = functional_call(shape, (dict(own), dict(own_buffers)), (history,))
        return logits

    def gather(drawn: Tensor) -> tuple[Tensor, ...]:
        every = sights_of(trace, drawn, horizon)
        sights = [every[target] for target in targets]
        return torch.stack([read(sight) for sight in sights]), torch.stack([sight.truth() for sight in sights])

    def loss_of(history: Tensor, routed: Tensor) -> Tensor:  # [T, R, S, E], [T, R, E]
        own, seen = (_in_half(parameters), history.bfloat16()) if schedule.half else (parameters, history)
        logits = torch.vmap(one, randomness="different")(own, buffers, seen).float()
        return F.binary_cross_entropy_with_logits(logits, routed, reduction="none").mean((1, 2)).sum()

    batches = batches_of(usable_rows(trace), schedule, gather, axis=1)
    what = f"{len(targets)} layers, horizon {horizon}"
    fit_batches(parameters.values(), batches, loss_of, schedule, what=what, progress=progress)
    with torch.no_grad():
        for number, network in enumerate(networks.values()):
            for name, parameter in network.named_parameters():
                parameter.copy_(parameters[name][number])


def _in_half(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For one step; what is learnt stays fp32."""
    return {name: value.bfloat16() for name, value in parameters.items()}
