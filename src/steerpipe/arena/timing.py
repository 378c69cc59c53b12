"""What a predictor takes for one token: a decision for each layer, one after the other, for one row, as in decode."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from steerpipe.predict.protocol import RoutingPredictor, answers
from steerpipe.predict.records import PackedTrace, States
from steerpipe.predict.sight import Decision, Sight, rows_for

_TOKENS = 32  # of the trace: enough past for every window
_WARMUP = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Median microseconds per token; by a CUDA graph where there is one, as the engine runs predictors on a GPU."""

    eager_microseconds: float  # on a CPU its own time, whatever else the machine does; on a GPU until it is done
    graph_microseconds: float | None  # None: a CPU, or the predictor cannot be captured
    repeats: int


@torch.no_grad()
def time_token(
    predictor: RoutingPredictor, trace: PackedTrace, horizon: int, device: torch.device | str, repeats: int = 15
) -> Timing:
    """`predictor` must be on `device`; of `trace` a few tokens are copied there."""
    near = first_tokens(trace, _TOKENS, device)
    sights = []
    for target in range(trace.geometry.layers):
        decision = Decision(target, horizon)
        if answers(predictor, decision):
            sights.append(Sight(near, rows_for(near, decision)[-1:], decision))

    def token() -> list[Tensor]:
        return [predictor.probabilities(sight) for sight in sights]

    on_gpu = near.device.type == "cuda"
    wait, clock = (torch.cuda.synchronize, time.perf_counter) if on_gpu else (_nothing, time.process_time)
    eager = _median(token, wait, clock, repeats)
    return Timing(eager, _graph_median(token, repeats) if on_gpu else None, repeats)


def first_tokens(trace: PackedTrace, count: int, device: torch.device | str) -> PackedTrace:
    """The first so many rows, on `device`."""
    states = trace.states

    def moved(tensor: Tensor) -> Tensor:
        return tensor[:count].to(device)

    return replace(
        trace,
        tokens=moved(trace.tokens),
        sequence=moved(trace.sequence),
        place=moved(trace.place),
        experts=moved(trace.experts),
        weights=None if trace.weights is None else moved(trace.weights),
        states=None
        if states is None
        else States(
            moved(states.entering), moved(states.residual), None if states.shared is None else moved(states.shared)
        ),
    )


def _median(run: Callable[[], object], wait: Callable[[], None], clock: Callable[[], float], repeats: int) -> float:
    taken = []
    for _ in range(_WARMUP + repeats):
        wait()
        begin = clock()
        run()
        wait()
        taken.append(clock() - begin)
    return 1e6 * statistics.median(taken[_WARMUP:])


def _graph_median(run: Callable[[], object], repeats: int) -> float | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:  # it waits for the device, or allocates in a way that no graph can hold
        torch.cuda.synchronize()
        return None
    return _median(graph.replay, torch.cuda.synchronize, time.perf_counter, repeats)


def _nothing() -> None:
    pass
