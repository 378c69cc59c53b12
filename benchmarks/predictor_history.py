"""Stages of train_predictors: the seed's history networks, at its own setting and at every layer."""

from typing import Any

from benchmarks.predictor_bench import Bench
from steerpipe.predict.sight import Decision
from steerpipe.predict.storage import Storage
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.trajectory_networks import Architecture
from steerpipe.predict.window import STEPS, Window
from steerpipe.train.fit import Schedule
from steerpipe.train.material import Material
from steerpipe.train.trajectories import train_trajectory

SEED = Decision(target=12, horizon=2)  # the setting of the seed's table 1
ROWS, ROWS_OF_EACH = 4096, 2048  # of a step: one network, and each of 24 that learn together
MLP, LSTM, TRANSFORMER = Architecture
RATES = {MLP: (2e-3, 4e-3, 8e-3), LSTM: (2e-3, 4e-3), TRANSFORMER: (1.5e-3, 3e-3, 6e-3)}
RATE = {MLP: 4e-3, LSTM: 4e-3, TRANSFORMER: 3e-3}  # where the stage `rates` did not run
LONG = {MLP: 14_000, LSTM: 5_000, TRANSFORMER: 16_000}  # steps: 66 M decisions are 54 rounds of the training tokens
SHORT = {MLP: 3_000, LSTM: 1_500, TRANSFORMER: 1_600}
LIVE = "transformers"
EVERY_LAYER = 6_000  # steps of the ExpertTransformers of all layers, two ahead: those that the live benchmark replays
TRIED = 2_000
SHARES = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2, "1": 1.0}  # of the training tokens


def rates(bench: Bench) -> None:
    """The rate of each network, by recall on the tuning prompts; the LSTM's, which is the slowest, on layers alone."""
    for architecture, tried in RATES.items():
        window = Window.LAYERS if architecture is LSTM else Window.BOTH
        found = {}
        for rate in tried:
            schedule = bench.schedule(TRIED, ROWS, rate, half=True)
            made = train_trajectory(bench.material.trace, architecture, [SEED], schedule, window=window)
            found[rate] = round(bench.tally(made, SEED, bench.tuning.trace).metrics().recall, 5)
            bench.log(f"  {architecture} at a rate of {rate}: {found[rate]}")
        best = max(found, key=lambda rate: found[rate])
        bench.results.setdefault("rates", {})[architecture] = {"tried": found, "best": best}


def table_one(bench: Bench) -> None:
    """The seed's setting with each network: the layers before, and the tokens before as well."""
    for window in (Window.BOTH, Window.LAYERS):
        for architecture in (TRANSFORMER, MLP, LSTM):
            key = f"{architecture}, layer 12, window {window}"
            _at_the_seed(bench, key, architecture, LONG[architecture], window=window)
            bench.keep(key, "history", Storage.FLOAT16)


def curves(bench: Bench) -> None:
    """Over the data, at few steps; with table_one over the steps as well."""
    for architecture, window in ((TRANSFORMER, Window.BOTH), (MLP, Window.BOTH), (MLP, Window.LAYERS)):
        for label, share in SHARES.items():
            key = f"{architecture}, layer 12, window {window}, {label} of the tokens"
            _at_the_seed(bench, key, architecture, SHORT[architecture], bench.material.first(share), window=window)


def windows(bench: Bench) -> None:
    """The last tokens at the target layer alone."""
    for architecture in (MLP, TRANSFORMER):
        key = f"{architecture}, layer 12, window tokens"
        _at_the_seed(bench, key, architecture, SHORT[architecture], window=Window.TOKENS)


def importance(bench: Bench) -> None:
    """Is layer 0 special? All eleven layers before the decision, each left out in turn and trained anew."""
    steps = SEED.target - SEED.horizon + 1
    for without in ((), *((layer,) for layer in range(steps))):
        key = f"mlp, layer 12, layers 0 to 10 without {without[0] if without else 'none'}"
        _at_the_seed(bench, key, MLP, SHORT[MLP], steps=steps, without=without)
    whole = _at_the_seed(bench, "transformer, layer 12, layers 0 to 10", TRANSFORMER, SHORT[TRANSFORMER], steps=steps)
    for layer in range(steps):
        blind = Trajectory(whole.architecture, whole.experts, whole.networks, steps=steps, without=(layer,))
        bench.test_decision(f"transformer, layer 12, layer {layer} hidden in the test", blind, SEED)


def horizons_ahead(bench: Bench) -> None:
    """Layer 12 from 1 to 10 layers before."""
    for architecture in (MLP, TRANSFORMER):
        for horizon in (1, 3, 6, 10):
            key = f"{architecture}, layer 12, window layers, few steps"
            _at_the_seed(bench, key, architecture, SHORT[architecture], decision=Decision(SEED.target, horizon))


def layers_all(bench: Bench) -> None:
    """Every target layer at horizons 2, 1 and 3."""
    for architecture, steps in ((TRANSFORMER, 800), (MLP, 1500), (LSTM, 315)):
        rows = ROWS_OF_EACH // 2 if architecture is LSTM else ROWS_OF_EACH
        schedule = bench.schedule(steps, rows, _rate(bench, architecture), half=True)
        for horizon in (2, 1, 3):
            decisions = [Decision(target, horizon) for target in range(bench.test.geometry.layers)]
            key = f"{architecture}, all layers, {STEPS} layers, {horizon} ahead"
            entry = bench.test_at(key, _train(bench, key, architecture, decisions, schedule), (horizon,))
            entry |= _schedule_of(schedule)


def live(bench: Bench) -> None:
    """The ExpertTransformer of every layer, two ahead, at length, and kept: record_forecasts.py asks it."""
    decisions = [Decision(target, SEED.horizon) for target in range(bench.test.geometry.layers)]
    schedule = bench.schedule(EVERY_LAYER, ROWS_OF_EACH, _rate(bench, TRANSFORMER), half=True)
    made = _train(bench, LIVE, TRANSFORMER, decisions, schedule)
    bench.test_at(LIVE, made, (SEED.horizon,)).update(_schedule_of(schedule))
    bench.keep(LIVE, "history", Storage.INT8)


def _at_the_seed(
    bench: Bench, key: str, architecture: Architecture, length: int, material: Material | None = None,
    decision: Decision = SEED, **options: Any,
) -> Trajectory:  # fmt: skip
    """`length` of the training; `options` of train_trajectory."""
    schedule = bench.schedule(length, ROWS, _rate(bench, architecture), half=True)
    made = _train(bench, key, architecture, [decision], schedule, material, **options)
    entry = bench.test_decision(key, made, decision)
    entry |= _schedule_of(schedule)
    return made


def _train(
    bench: Bench, key: str, architecture: Architecture, decisions: list[Decision], schedule: Schedule,
    material: Material | None = None, **options: Any,
) -> Trajectory:  # fmt: skip
    return bench.train(key, lambda m: train_trajectory(m.trace, architecture, decisions, schedule, **options), material)


def _rate(bench: Bench, architecture: Architecture) -> float:
    found = bench.results.get("rates", {}).get(architecture, {})
    return float(found.get("best", RATE[architecture]))


def _schedule_of(schedule: Schedule) -> dict[str, Any]:
    return {"steps": schedule.steps, "rows": schedule.rows, "learning_rate": schedule.learning_rate}
