"""Runs an arena: every entry on the same held-out texts."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from steerpipe.arena.apart import check_apart, without_openings
from steerpipe.arena.causality import check_causal
from steerpipe.arena.entries import SHIPPED, Entry, Role, check_names
from steerpipe.arena.evaluation import HorizonScore, evaluate
from steerpipe.arena.foresee import foresee, foresee_reuse, recording_of
from steerpipe.arena.machines import StatedMachine
from steerpipe.arena.misses import missed_uses
from steerpipe.arena.results import FIRST_LAYERS, ArenaResult, EntryResult, HorizonResult, Setting
from steerpipe.arena.timing import first_tokens, time_token
from steerpipe.arena.worth import MachineWorth, measure_worth
from steerpipe.core.errors import InputError, SteerpipeError
from steerpipe.predict.protocol import RoutingPredictor, answers
from steerpipe.predict.records import Geometry, PackedTrace, TracedSequence, pack_traces
from steerpipe.predict.reuse import ReuseForecast
from steerpipe.predict.sight import Decision
from steerpipe.transfer.forecasts import Predictor
from steerpipe.transfer.machine import slots_of_share

_CAUSAL_TOKENS = 48  # of the test, on which peeking is looked for
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured besides the metrics."""

    miss_residency: float = 0.25
    miss_tokens: int = 20_000  # following a cache takes about 1 ms per token
    machines: Sequence[StatedMachine] = ()
    worth_tokens: int = 600
    worth_warmup_tokens: int = 200  # of them; not measured
    reuse: ReuseForecast | None = None  # eviction by it as well, alone and with the predictors that are shipped
    jobs: int = 1  # processes for the simulator
    timings: bool = True


def run_arena(
    source: str,
    geometry: Geometry,
    train: Sequence[TracedSequence],
    test: Sequence[TracedSequence],
    entries: Sequence[Entry],
    options: Options,
    *,
    device: torch.device | str = "cpu",
    progress: Progress = lambda _: None,
) -> ArenaResult:
    """Every entry on `test`; `train` is what entries were trained on here, and must share nothing with it.

    Entries without a horizon are left out, and `progress` is told.
    """
    check_apart(train, test)
    entries = _answering(entries, progress)
    check_names(entries)
    own, opening_tokens = without_openings(train, test)
    if not own:
        raise InputError("there is no test prompt", fix="hold out a larger share, or trace more prompts")
    trace = pack_traces(own, geometry, device)
    missed = _missed(trace, options)
    results = []
    for entry in entries:
        progress(entry.name)
        results.append(_result(entry, trace, missed, options))
    able = [entry for entry, result in zip(entries, results, strict=True) if not result.refused]
    worth, tokens = _worth(able, trace, options, progress)
    followed = missed[: options.miss_tokens]
    setting = Setting(
        source, geometry, len({each.prompt for each in train}), sum(len(each.tokens) for each in train),
        len({each.prompt for each in own}), trace.rows, opening_tokens, options.miss_residency,
        1.0 - float(followed.float().mean()), len(followed), _machine(),
    )  # fmt: skip
    return ArenaResult(setting, tuple(results), tuple(worth), tokens)


def _answering(entries: Sequence[Entry], progress: Progress) -> list[Entry]:
    for entry in entries:
        if not entry.by_horizon:
            progress(f"{entry.name} is left out: {entry.left_out}")
    return [entry for entry in entries if entry.by_horizon]


def _missed(trace: PackedTrace, options: Options) -> Tensor:
    """[N, L, k] bool; of tokens beyond those that the cache is followed over nothing counts as missed."""
    geometry = trace.geometry
    slots = slots_of_share(options.miss_residency, geometry.layers * geometry.experts)
    routing = trace.experts[: options.miss_tokens].cpu().numpy()
    missed = np.zeros(tuple(trace.experts.shape), dtype=np.bool_)
    missed[: len(routing)] = missed_uses(routing, geometry.experts, slots)
    return torch.from_numpy(missed).to(trace.device)


def _result(entry: Entry, trace: PackedTrace, missed: Tensor, options: Options) -> EntryResult:
    try:
        return _measured(entry, trace, missed, options)
    except Exception as problem:  # noqa: BLE001  a peek, or whatever a plugin raises: the others go on
        what = problem.what if isinstance(problem, SteerpipeError) else str(problem)
        reason = " ".join(f"{type(problem).__name__}: {what}".split())
        return EntryResult(entry.name, entry.role, entry.origin, None, None, entry.training(), (), None, None, reason)


def _measured(entry: Entry, trace: PackedTrace, missed: Tensor, options: Options) -> EntryResult:
    cost, horizons = entry.cost(), []
    near = first_tokens(trace, _CAUSAL_TOKENS, trace.device)
    for horizon, predictor in sorted(entry.by_horizon.items()):
        if entry.role is not Role.BOUND:
            _check_causal(predictor, near, horizon)
        horizons.append(_horizon(evaluate(predictor, trace, horizon, missed)))
    first = min(entry.by_horizon)
    cpu = entry.moved("cpu") if trace.device.type != "cpu" else entry
    gpu = entry.moved("cuda") if torch.cuda.is_available() else None
    return EntryResult(
        entry.name, entry.role, entry.origin, cost.parameters, cost.multiply_adds, entry.training(), tuple(horizons),
        time_token(cpu.by_horizon[first], trace, first, "cpu") if options.timings and cpu else None,
        time_token(gpu.by_horizon[first], trace, first, "cuda") if options.timings and gpu else None,
        None,
    )  # fmt: skip


def _check_causal(predictor: RoutingPredictor, trace: PackedTrace, horizon: int) -> None:
    for target in range(trace.geometry.layers):
        decision = Decision(target, horizon)
        if answers(predictor, decision):
            check_causal(predictor, trace, decision)


def _horizon(score: HorizonScore) -> HorizonResult:
    within = score.together(score.horizon, score.layers)
    if within is None:
        raise InputError(
            f"no layer is answered for within the token at horizon {score.horizon}",
            fix=f"answer for a layer from {score.horizon} on, or leave the horizon out",
        )
    return HorizonResult(
        score.horizon,
        within.metrics(),
        score.over(0, min(FIRST_LAYERS, score.layers)),
        tuple(score.layer(target) for target in range(score.layers)),
        tuple(within.calibration()),
    )


def _worth(
    entries: Sequence[Entry], trace: PackedTrace, options: Options, progress: Progress
) -> tuple[list[MachineWorth], int]:
    if not options.machines:
        return [], 0
    part = first_tokens(trace, options.worth_tokens, trace.device)
    said: dict[str, Predictor] = {}
    for entry in entries:
        ahead = entry.ahead()
        if entry.role is Role.BOUND or not ahead:
            continue  # perfect forecasts are a baseline of every machine
        parts = [foresee(entry.by_horizon[horizon], part, [horizon], trace.geometry.top_k) for horizon in ahead]
        said[entry.name] = parts[0].joined(parts[1:])
    progress(f"replay on {len(options.machines)} machines")
    warmup = min(options.worth_warmup_tokens, part.rows // 2)
    recording = recording_of(part, "held-out texts")
    reuse = foresee_reuse(options.reuse, part) if options.reuse is not None else None
    shipped = [entry.name for entry in entries if entry.origin == SHIPPED]
    worth = measure_worth(
        recording, options.machines, said, warmup_tokens=warmup, reuse=reuse, under_reuse=shipped, jobs=options.jobs
    )
    return worth, part.rows - warmup


def _machine() -> str:
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{platform.machine()} with {torch.get_num_threads()} thread(s){gpu}, torch {torch.__version__}"
