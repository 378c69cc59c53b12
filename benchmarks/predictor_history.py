"""Stages of train_predictors: the seed's history networks."""

from benchmarks.predictor_bench import SHARES, Bench
from steerpipe.predict.sight import Decision
from steerpipe.predict.storage import Storage
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.trajectory_networks import Architecture
from steerpipe.predict.window import STEPS, Window
from steerpipe.train.fit import Schedule
from steerpipe.train.material import Material
from steerpipe.train.trajectories import train_trajectory

SEED = Decision(target=12, horizon=2)  # the setting of the seed's table 1
ROWS = 8192
RATE = {Architecture.MLP: 1e-3, Architecture.LSTM: 2e-3, Architecture.TRANSFORMER: 1e-3}
STEPS_OF_TABLE_ONE = 1200  # 10 M decisions, 8 rounds of the training tokens


def _train(
    bench: Bench, key: str, architecture: Architecture, decisions: list[Decision], schedule: Schedule,
    material: Material | None = None, **options: object,
) -> Trajectory:  # fmt: skip
    return bench.train(
        key,
        lambda m: train_trajectory(m.trace, architecture, decisions, schedule, **options),  # type: ignore[arg-type]
        material,
    )


def table_one(bench: Bench) -> None:
    """The seed's setting with each network: learning curves over data at the same number of steps. All tokens first."""
    for label, share in reversed(SHARES.items()):
        for architecture in reversed(Architecture):
            if architecture is Architecture.LSTM and label not in ("1", "1/16"):
                continue  # the slowest to train: two points
            schedule = bench.schedule(STEPS_OF_TABLE_ONE, ROWS, RATE[architecture])
            key = f"{architecture}, layer 12, {label} of the tokens"
            made = _train(bench, key, architecture, [SEED], schedule, bench.material.first(share))
            bench.test_decision(key, made, SEED)
            if share == 1:
                bench.keep(key, "history", Storage.FLOAT16)


def windows(bench: Bench) -> None:
    """Layers, tokens, or both."""
    for architecture in (Architecture.MLP, Architecture.TRANSFORMER):
        schedule = bench.schedule(700, ROWS, RATE[architecture])
        for window in (Window.TOKENS, Window.BOTH):
            key = f"{architecture}, layer 12, window {window}"
            made = _train(bench, key, architecture, [SEED], schedule, window=window)
            bench.test_decision(key, made, SEED)


def importance(bench: Bench) -> None:
    """Is layer 0 special? All eleven layers before the decision, each left out in turn and trained anew."""
    steps = SEED.target - SEED.horizon + 1
    schedule = bench.schedule(600, ROWS, RATE[Architecture.MLP])
    for without in ((), *((layer,) for layer in range(steps))):
        key = f"mlp, layer 12, layers 0 to 10 without {without[0] if without else 'none'}"
        made = _train(bench, key, Architecture.MLP, [SEED], schedule, steps=steps, without=without)
        bench.test_decision(key, made, SEED)
    whole = _train(
        bench, "transformer, layer 12, layers 0 to 10", Architecture.TRANSFORMER, [SEED],
        bench.schedule(700, ROWS, RATE[Architecture.TRANSFORMER]), steps=steps,
    )  # fmt: skip
    bench.test_decision("transformer, layer 12, layers 0 to 10", whole, SEED)
    for layer in range(steps):
        blind = Trajectory(whole.architecture, whole.experts, whole.networks, steps=steps, without=(layer,))
        bench.test_decision(f"transformer, layer 12, layer {layer} hidden in the test", blind, SEED)


def horizons_ahead(bench: Bench) -> None:
    """Layer 12 from 1 to 10 layers before."""
    for architecture in (Architecture.MLP, Architecture.TRANSFORMER):
        schedule = bench.schedule(400, ROWS, RATE[architecture])
        for horizon in (1, 3, 6, 10):
            decision = Decision(SEED.target, horizon)
            key = f"{architecture}, layer 12, short schedule"
            bench.test_decision(key, _train(bench, key, architecture, [decision], schedule), decision)


def layers_all(bench: Bench) -> None:
    """Every target layer at horizons 1, 2 and 3."""
    layers = bench.test.geometry.layers
    for architecture in (Architecture.TRANSFORMER, Architecture.MLP):
        schedule = bench.schedule(1000, 2048, RATE[architecture])
        for horizon in (2, 1, 3):
            decisions = [Decision(target, horizon) for target in range(layers)]
            key = f"{architecture}, all layers, {STEPS} layers, {horizon} ahead"
            bench.test_at(key, _train(bench, key, architecture, decisions, schedule), (horizon,))
