"""`steerpipe replay`: one recording, one machine, and the runs that a figure has to be read between."""

from collections.abc import Iterator
from dataclasses import dataclass

from steerpipe.store.policies import HALF_LIFE_TOKENS, make_policy
from steerpipe.transfer.forecasts import PerfectPredictor, Predictor, RecallPredictor
from steerpipe.transfer.machine import Machine
from steerpipe.transfer.recorded import Recording
from steerpipe.transfer.replay import Keep, replay
from steerpipe.transfer.replay_report import Comparison, ReplayReport


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to compare. The baselines (on demand, Belady, all resident) are always there."""

    machine: Machine
    policies: tuple[str, ...] = ("lru", "lfru")
    recalls: tuple[float, ...] = ()  # of a predictor, 1, 2 ... layers ahead; () leaves prediction out
    perfect_horizon: int = 0  # layers that a perfect predictor looks ahead; 0 leaves it out
    half_life_tokens: float = HALF_LIFE_TOKENS
    warmup_tokens: int = 0  # not measured
    seed: int = 0  # of the predictor's mistakes

    def __post_init__(self) -> None:
        for policy in self.policies:  # an unknown name is an error here, not after the first runs
            make_policy(policy, 1, half_life_tokens=self.half_life_tokens, uses=())


def compare(recording: Recording, options: ReplayOptions) -> Comparison:
    """Every run of `options`. About 20 s for 20,000 tokens of 24 layers with top-4, per run."""
    runs = tuple(_runs(recording, options))
    return Comparison(recording.name, options.machine, recording.all_experts, recording.tokens - runs[0].tokens, runs)


def _runs(recording: Recording, options: ReplayOptions) -> Iterator[ReplayReport]:
    predictors: dict[str, Predictor] = {}
    if options.recalls:
        label = "/".join(f"{recall:.0%}" for recall in options.recalls)
        predictors[f"recall {label}"] = RecallPredictor(
            recording.routing, recording.experts, options.recalls, options.seed
        )
    if options.perfect_horizon:
        predictors["perfect"] = PerfectPredictor(recording.routing, options.perfect_horizon)

    def run(
        policy: str, name: str, *, keep: Keep = Keep.CACHE, predictor: Predictor | None = None,
        by_cpu: bool = False,
    ) -> ReplayReport:  # fmt: skip
        return replay(
            recording, options.machine, policy, keep=keep, predictor=predictor, throttled=True, by_cpu=by_cpu,
            name=name, half_life_tokens=options.half_life_tokens, warmup_tokens=options.warmup_tokens,
        )  # fmt: skip

    yield run("lru", "on demand", keep=Keep.NOTHING)
    for policy in (*options.policies, *(("belady",) if "belady" not in options.policies else ())):
        yield run(policy, policy)
        for name, predictor in predictors.items():
            yield run(policy, f"{policy} + {name}", predictor=predictor)
        if options.machine.cpu_seconds is not None:
            yield run(policy, f"{policy} + cpu", by_cpu=True)
    yield run("lru", "all resident", keep=Keep.ALL)
