"""What predictions are worth: the recorded texts on stated machines, between LFRU and the oracles. Pure: no torch."""

import multiprocessing
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from steerpipe.arena.foresight import ReuseForesight
from steerpipe.arena.machines import StatedMachine
from steerpipe.store.policies import HALF_LIFE_TOKENS
from steerpipe.transfer.forecasts import PerfectPredictor, Predictor
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.replay import Keep, replay
from steerpipe.transfer.replay_report import ReplayReport

ON_DEMAND, LFRU, BELADY, RESIDENT = "on demand", "LFRU", "Belady", "all resident"
REUSE = "reuse eviction"


def perfect(horizon: int) -> str:
    return f"perfect, {horizon} ahead"


@dataclass(frozen=True, slots=True)
class MachineWorth:
    """One machine: the runs that every figure is read between, and one run per predictor, all on the same tokens."""

    machine: StatedMachine
    baselines: tuple[ReplayReport, ...]
    entries: tuple[ReplayReport, ...]  # LFRU with the entry's forecasts
    with_reuse: tuple[ReplayReport, ...] = ()  # the same on eviction by the reuse forecast, by itself first

    def baseline(self, name: str) -> ReplayReport:
        return next(run for run in self.baselines if run.name == name)

    def closed(self, run: ReplayReport, horizon: int) -> float | None:
        """Share of what perfect forecasts of the same horizon save over LFRU; below 0: it costs time."""
        worst, best = self.baseline(LFRU).tpot_mean_seconds, self.baseline(perfect(horizon)).tpot_mean_seconds
        return (worst - run.tpot_mean_seconds) / (worst - best) if worst > best else None

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": asdict(self.machine) | {"name": self.machine.name},
            "paying_precision": self.machine.paying_precision,
            "baselines": [run.as_json() for run in self.baselines],
            "entries": [run.as_json() for run in self.entries],
            "with_reuse": [run.as_json() for run in self.with_reuse],
        }


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    machine: StatedMachine
    policy: str = "lfru"
    keep: Keep = Keep.CACHE
    predictor: Predictor | None = None
    reuse: ReuseForesight | None = None


def measure_worth(
    recording: Recording,
    machines: Sequence[StatedMachine],
    predictors: Mapping[str, Predictor],
    *,
    warmup_tokens: int,
    reuse: ReuseForesight | None = None,
    under_reuse: Collection[str] = (),
    jobs: int = 1,
) -> list[MachineWorth]:
    """Replays everything on everything; 2 to 5 s per run of 1,000 tokens of 24 layers. `jobs` processes at once.

    `reuse`: eviction by this forecast as well, alone and with the predictors named in `under_reuse`.
    With more than one job the caller's main module must be safe to import (`if __name__ == "__main__"`).
    """
    chosen = {name: each for name, each in predictors.items() if name in under_reuse}
    parts: list[list[_Job]] = []
    for machine in machines:
        parts.append(list(_baselines(recording, machine, predictors)))
        parts.append([_Job(name, machine, predictor=each) for name, each in predictors.items()])
        parts.append(list(_reusing(machine, chosen, reuse)))
    reports = iter(_run_all([(recording, job, warmup_tokens) for part in parts for job in part], jobs))
    runs = [tuple(next(reports) for _ in part) for part in parts]
    return [MachineWorth(machine, *runs[3 * number : 3 * number + 3]) for number, machine in enumerate(machines)]


def _run_all(planned: Sequence[tuple[Recording, _Job, int]], jobs: int) -> list[ReplayReport]:
    if jobs == 1:
        return [_run(*each) for each in planned]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_run, *zip(*planned, strict=True)))


def _baselines(recording: Recording, machine: StatedMachine, predictors: Mapping[str, Predictor]) -> Iterator[_Job]:
    yield _Job(ON_DEMAND, machine, "lru", Keep.NOTHING)
    yield _Job(LFRU, machine)
    yield _Job(BELADY, machine, "belady")
    for horizon in sorted({each.horizon for each in predictors.values()}):
        yield _Job(perfect(horizon), machine, predictor=PerfectPredictor(recording.routing, horizon))
    yield _Job(RESIDENT, machine, "lru", Keep.ALL)


def _reusing(
    machine: StatedMachine, predictors: Mapping[str, Predictor], reuse: ReuseForesight | None
) -> Iterator[_Job]:
    if reuse is not None:
        yield _Job(REUSE, machine, "reuse", reuse=reuse)
        for name, predictor in predictors.items():
            yield _Job(f"{name} + {REUSE}", machine, "reuse", predictor=predictor, reuse=reuse)


def _run(recording: Recording, job: _Job, warmup_tokens: int) -> ReplayReport:
    half_life = HALF_LIFE_TOKENS if job.reuse is None else job.reuse.half_life_tokens
    return replay(
        recording, job.machine.machine(recording.all_experts), job.policy, keep=job.keep, predictor=job.predictor,
        reuse=job.reuse, half_life_tokens=half_life, warmup_tokens=warmup_tokens, name=job.name,
    )  # fmt: skip
