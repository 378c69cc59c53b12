"""`bench decode`: the floors first, then every step that was asked for, resident and within budgets.

A budget is held against (resident step - expert kernels) + missed bytes / link rate, all measured in the same run.
"""

import gc
from dataclasses import dataclass, field
from typing import Any

import torch

from steerpipe.bench.floors import on_demand_floor, prefill_floor, resident_floor
from steerpipe.bench.options import DecodeOptions
from steerpipe.bench.rates import memory_rates
from steerpipe.bench.residents import ResidentBlocks, resident_experts
from steerpipe.bench.results import Findings
from steerpipe.bench.routing import generated
from steerpipe.bench.session import Keep, Say, Session
from steerpipe.bench.shapes import Shape, make_shape
from steerpipe.bench.stage import Stage
from steerpipe.core.errors import CapacityError
from steerpipe.core.machine import read_memory
from steerpipe.core.units import format_bytes

_ALL = 100.0  # percent


@dataclass(frozen=True, slots=True)
class _Base:
    """A case with all experts resident, in seconds."""

    step: float
    kernels: float


@dataclass(slots=True)
class _Bases:
    """What the floors of budgets start from; empty where not all experts fit on the device."""

    steps: dict[tuple[int, int], _Base] = field(default_factory=dict)  # by context and batch
    prefill: float = 0.0


def run_decode(options: DecodeOptions, say: Say, keep: Keep, *, kernels: bool | None = None) -> Findings:
    """Everything that `options` ask for. See Session; on a CPU `kernels` needs Triton's interpreter."""
    session = Session(options, say, keep, kernels)
    session.findings.memory_rates = memory_rates(session.device)
    shown = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in session.findings.memory_rates.items())
    say(f"memory of the device, GB/s: {shown}")
    for form in options.formats:
        shape = make_shape(options.shape, form, options.longest)
        _check_room(session, shape)
        _run_format(Stage(session, shape))
        _give_back(session.device)
    return session.finish()


def _run_format(stage: Stage) -> None:
    _say_floors(stage)
    bases = _run_resident(stage)
    stage.rig.forget()
    _give_back(stage.session.device)
    tight = [residency for residency in stage.options.residencies if residency < _ALL]
    if tight:
        _run_budgets(stage, tight, bases)


def _check_room(session: Session, shape: Shape) -> None:
    """On a CPU, where memory that is not there ends the process instead of raising."""
    if session.device.type == "cuda":
        return
    need = shape.all_experts * shape.layout.weights * session.dtype.itemsize + shape.dense_bytes(session.dtype.itemsize)
    free = read_memory().available_bytes
    if need > free:
        raise CapacityError(
            f"{shape.name} takes {format_bytes(need)} in memory; {format_bytes(free)} are free",
            fix="choose a smaller shape, such as --shape nano",
        )


def _say_floors(stage: Stage) -> None:
    rate = stage.session.memory_rate
    for context, batch in stage.cases():
        size = stage.active(context, batch, stage.union(batch)).total
        stage.session.say(
            f"floor of {stage.shape.layout.format.value}, context {context}, batch {batch}: {size / 1e9:.3f} GB read "
            f"once at {rate / 1e12:.2f} TB/s: {1e3 * size / rate:.3f} ms"
        )


def _run_resident(stage: Stage) -> _Bases:
    """Also where only budgets are asked for: their floors need it. A model that does not fit goes without."""
    session, bases = stage.session, _Bases()
    wanted = _ALL in stage.options.residencies
    try:
        source = _resident_source(stage)
    except CapacityError as problem:
        if wanted:
            raise
        session.note(f"no resident run: {problem.what}; floors are dense weights read once, and the link")
        return bases
    for context, batch in stage.cases():
        _resident_case(stage, source, bases, context, batch, wanted)
    if stage.options.prefill:
        found = stage.time_prefill(source, _ALL)
        bases.prefill = found.times.median_ms / 1e3
        if wanted:
            floor = resident_floor(stage.active(stage.options.prefill, 1, stage.prompt_union()), session.memory_rate)
            slots = stage.shape.all_experts
            session.add(stage.prefill_line(found, _ALL, slots, floor="weights read once", floor_ms=floor * 1e3))
    if isinstance(source, ResidentBlocks):
        source.close()
    return bases


def _resident_source(stage: Stage) -> Any:
    if stage.session.kernels:
        return ResidentBlocks(stage.shape, stage.session.device, stage.options.seed)
    return resident_experts(stage.shape, stage.session.dtype, stage.options.seed)


def _resident_case(stage: Stage, source: Any, bases: _Bases, context: int, batch: int, wanted: bool) -> None:
    found = stage.time_decode(source, _ALL, context, batch)
    figures: dict[str, Any] = {}
    rate, active = stage.session.memory_rate, stage.active(context, batch, stage.union(batch))
    alone = 0.0
    if stage.session.kernels:
        from steerpipe.bench.kernels import expert_kernel_seconds  # Triton

        alone = expert_kernel_seconds(stage.rig, source, stage.routing or generated(stage.shape, 64), batch)
        figures = {"expert_kernels_ms": alone * 1e3, "expert_rate_share": active.experts / alone / rate}
    bases.steps[context, batch] = _Base(found.times.median_ms / 1e3, alone)
    if wanted:
        floor_ms = 1e3 * resident_floor(active, rate)
        line = stage.decode_line(
            found, _ALL, stage.shape.all_experts, context, batch,
            floor="weights read once", floor_ms=floor_ms, **figures,
        )  # fmt: skip
        stage.session.add(line)


def _run_budgets(stage: Stage, residencies: list[float], bases: _Bases) -> None:
    from steerpipe.bench.budgets import Ladder, slots_for  # the CUDA driver

    session, policy, driver = stage.session, stage.options.policy, stage.options.driver
    if stage.options.predict != "none" and stage.options.horizon > 1:
        driver = "served"  # what is said of later layers the host alone sends for
    with Ladder(stage.shape, session.device, stage.options.seed) as ladder:
        pinning, link = ladder.backing.pinning, ladder.measure_link()
        session.findings.pinnings[stage.shape.layout.format.value] = pinning
        session.say(
            f"pinned {pinning.size_bytes / 1e9:.1f} GB: filled in {pinning.fill_seconds:.1f} s, registered in "
            f"{pinning.register_seconds:.1f} s; link, scattered blocks of "
            f"{stage.shape.layout.block_bytes / 1e6:.2f} MB: {link / 1e9:.1f} GB/s"
        )
        for residency in residencies:
            for context, batch in stage.cases():
                slots = slots_for(residency, stage.shape, batch)
                with ladder.open(slots, policy, driver) as source:
                    _budget_case(stage, source, bases, residency, slots, context, batch, link)
                del source
                stage.rig.forget()
            if stage.options.prefill:
                slots = slots_for(residency, stage.shape, 1)
                with ladder.open(slots, policy, driver) as source:
                    _budget_prefill(stage, source, bases, residency, slots, link)
                del source
                stage.rig.forget()


def _budget_case(
    stage: Stage, source: Any, bases: _Bases, residency: float, slots: int, context: int, batch: int, link: float
) -> None:
    predictor = stage.predict(residency)
    found = stage.time_decode(source, residency, context, batch)
    base = bases.steps.get((context, batch))
    if base is None:  # nothing is known of the resident step: dense weights and KV are read once
        base = _Base(resident_floor(stage.active(context, batch, 0), stage.session.memory_rate), 0.0)
    missed = found.missed_bytes(stage.shape.layout.block_bytes)
    line = stage.decode_line(
        found, residency, slots, context, batch,
        floor="on demand", floor_ms=1e3 * on_demand_floor(base.step, base.kernels, missed, link),
        link_bytes_per_second=link, resident_ms=base.step * 1e3, expert_kernels_ms=base.kernels * 1e3,
        predictor=predictor, guessed_bytes=found.guessed_bytes,
    )  # fmt: skip
    stage.session.add(line)


def _budget_prefill(
    stage: Stage, source: Any, bases: _Bases, residency: float, slots: int, link: float
) -> None:  # fmt: skip
    stage.warm_up(source, residency)
    found = stage.time_prefill(source, residency)
    missed = found.missed_bytes(stage.shape.layout.block_bytes)
    line = stage.prefill_line(
        found, residency, slots, floor="copies, or the resident prefill",
        floor_ms=1e3 * prefill_floor(missed, link, bases.prefill), link_bytes_per_second=link,
        resident_ms=bases.prefill * 1e3 or None,
    )  # fmt: skip
    stage.session.add(line)


def _give_back(device: torch.device) -> None:
    """What is not used any more, here and in torch's own keeping: the next source wants it in one piece."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
