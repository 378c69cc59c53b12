"""Stages of train_predictors: counted baselines, and everything that looks at hidden states."""

from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.predictor_bench import SHARES, Bench
from steerpipe.predict.blend import Blend
from steerpipe.predict.bounds import Oracle, Random
from steerpipe.predict.estimator import Estimator
from steerpipe.predict.files import load
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.preattention import Architecture
from steerpipe.predict.shipped import ASSETS, FOLDER
from steerpipe.predict.storage import Storage
from steerpipe.predict.stored import StoredPredictor
from steerpipe.train.blending import train_blend
from steerpipe.train.counts import count_affinity, count_frequency, count_previous, count_transition
from steerpipe.train.losses import ranking_loss, weighted_loss
from steerpipe.train.material import Material
from steerpipe.train.recipes import (
    make_hybrid,
    train_defaults,
    train_estimator,
    train_head,
    train_lookahead,
    train_preattention,
)
from steerpipe.train.rounding import settle

RANKS, LARGE_RANK = {1: 56, 0: 56, 2: 76, 3: 64}, 256  # by horizon: what 3 MB hold
AHEAD = (1, 2, 3)
HEAD_STEPS, HEAD_ROWS, HEAD_RATE, LARGE_RATE = 6000, 2048, 6e-3, 5e-3
SETTLING_STEPS, SETTLING_RATE = 3000, 2e-3
ESTIMATOR_STEPS, PREATTENTION_STEPS = 1600, 700
SHIPPED = ASSETS / FOLDER / "nano"


def counted(bench: Bench) -> None:
    made = {
        "frequency": bench.train("frequency", lambda m: count_frequency(m.trace)),
        **{name: bench.train(name, _PARTS[name]) for name in ("previous", "affinity", "transition")},
    }
    for key, predictor in made.items():
        bench.test_at(key, predictor, AHEAD if key == "transition" else (0, *AHEAD))
        if key != "affinity":  # 26 MB
            bench.keep(key, "small", Storage.FLOAT16)
    for bound in (Oracle(), Random()):
        bench.test_at(bound.name, bound, (0, *AHEAD))


def lookaheads(bench: Bench) -> None:
    """The gain of default vectors and of the shared expert by layer; learning curve of the vectors."""
    defaults = train_defaults(bench.material)
    counts = defaults.counts
    bench.results["default_vectors"] = {
        "tokens": bench.material.trace.rows, "unseen_experts": int((counts == 0).sum()),
        "least_tokens": int(counts.min()), "median_tokens": int(counts.median()),
    }  # fmt: skip
    for key, vectors, shared in (
        ("lookahead", None, False),
        ("lookahead-defaults", defaults, False),
        ("lookahead-shared", None, True),
        ("lookahead-defaults-shared", defaults, True),
    ):
        made = bench.train(key, partial(train_lookahead, defaults=vectors, shared=shared))
        bench.test_at(key, made, (0, *AHEAD) if key == "lookahead" else AHEAD)
    bench.keep("lookahead-defaults-shared", "shipped", Storage.INT8)
    for label, share in SHARES.items():
        if share < 1:
            part = bench.material.first(share)
            routers, vectors = part.needed_routers("lookahead"), train_defaults(part)
            fewer = RouterLookahead(routers, shared=False, defaults=vectors).to(bench.test.device)
            bench.test_at(f"lookahead-defaults, {label} of the tokens", fewer, (1,))


def heads(bench: Bench) -> None:
    """The ones that ship: trained, settled in four bits, loaded again; with learning curves over the data."""
    schedule = bench.schedule(HEAD_STEPS, HEAD_ROWS, HEAD_RATE)
    settling = bench.schedule(SETTLING_STEPS, HEAD_ROWS, SETTLING_RATE)
    for horizon, rank in RANKS.items():
        key = f"head-{horizon}"
        made = bench.train(f"{key}, full precision", partial(train_head, horizon=horizon, schedule=schedule, rank=rank))
        bench.test_at(f"{key}, full precision", made, (horizon,))
        settled = bench.train(key, lambda material, head=made: settle(head, material, settling))
        bench.test_at(key, settled, (horizon,))
        file = bench.keep(key, "shipped", Storage.INT4)
        bench.test_at(f"{key}, as shipped", load(file, made.routers, bench.test.device), (horizon,))
    _curve(bench, "head-1", RANKS[1], HEAD_RATE)


def large_heads(bench: Bench) -> None:
    """What the rank costs: the same heads, wider."""
    schedule = bench.schedule(HEAD_STEPS, HEAD_ROWS, LARGE_RATE)
    for horizon in (1, 2, 3, 0):
        key = f"head-{horizon}-rank-{LARGE_RANK}"
        made = bench.train(key, partial(train_head, horizon=horizon, schedule=schedule, rank=LARGE_RANK))
        bench.test_at(key, made, (horizon,))
        bench.keep(key, "large", Storage.INT8)
    _curve(bench, f"head-1-rank-{LARGE_RANK}", LARGE_RANK, LARGE_RATE)


def _curve(bench: Bench, key: str, rank: int, rate: float) -> None:
    """One ahead, over shares of the tokens, a quarter of the steps each."""
    schedule = bench.schedule(HEAD_STEPS // 4, HEAD_ROWS, rate)
    for label, share in SHARES.items():
        make = partial(train_head, horizon=1, schedule=schedule, rank=rank)
        name = f"{key}, {label} of the tokens"
        bench.test_at(name, bench.train(name, make, bench.material.first(share)), (1,))


def estimators(bench: Bench) -> None:
    """As published: on the quasi state with default vectors and the exact shared expert; the first over the steps."""
    lookahead = _part(bench, "lookahead-defaults-shared")
    assert isinstance(lookahead, RouterLookahead)
    for key, horizon, steps in (
        ("estimator-1, a quarter of the steps", 1, ESTIMATOR_STEPS // 4),
        *((f"estimator-{horizon}", horizon, ESTIMATOR_STEPS) for horizon in AHEAD),
    ):
        schedule = bench.schedule(steps, 4096, 2e-3, half=True)
        make = partial(train_estimator, horizon=horizon, schedule=schedule, width=1024, defaults=lookahead.defaults)
        estimator: Estimator = bench.train(key, make)
        bench.test_at(key, estimator, (horizon,))["steps"] = schedule.steps
        if steps == ESTIMATOR_STEPS:
            hybrid = bench.train(f"hybrid-{horizon}", partial(make_hybrid, estimator), bench.tuning)
            entry = bench.test_at(f"hybrid-{horizon}", hybrid, (horizon,))
            entry["drifting_layers"] = list(hybrid.drifting)


def preattention(bench: Bench) -> None:
    """Both published architectures with both losses."""
    schedule = bench.schedule(PREATTENTION_STEPS, 4096, 1e-3, half=True)
    for architecture in Architecture:
        for name, loss in (("ranking", ranking_loss), ("weighted", weighted_loss)):
            key = f"preattention-{architecture}-{name}"
            make = partial(train_preattention, schedule=schedule, architecture=architecture, loss=loss)
            bench.test_at(key, bench.train(key, make), (0,))["steps"] = schedule.steps


def blends(bench: Bench) -> None:
    """Head, lookahead, and what history and the token alone say; the weights are learnt on the tuning part."""
    for horizon in AHEAD:
        names = (f"head-{horizon}", "lookahead-defaults-shared", "previous", "affinity", "transition")
        parts = [_part(bench, name) for name in names]
        for key, used in ((f"blend-{horizon}", slice(None)), (f"blend-{horizon}, without the head", slice(1, None))):
            make = partial(_blend, parts=parts[used], horizon=horizon)
            blend = bench.train(key, make, bench.tuning)
            entry = bench.test_at(key, blend, (horizon,))
            entry["parts"] = list(names[used])
            entry["weights"] = [[round(float(w), 4) for w in row] for row in blend.weights]
        bench.test_at(f"head-{horizon}, as a part", parts[0], (horizon,))


def _blend(material: Material, parts: list[StoredPredictor], horizon: int) -> Blend:
    return train_blend(parts, material.trace, horizon)


def _part(bench: Bench, name: str) -> StoredPredictor:
    """What an earlier stage made; else it is made here, and of the heads the shipped one is taken."""
    if name not in bench.kept:
        if name.startswith("head-"):
            routers = bench.material.needed_routers("head")
            bench.kept[name] = load(SHIPPED / f"{name}.safetensors", routers, bench.test.device)
        else:
            bench.train(name, _PARTS[name])
    return bench.kept[name]


_PARTS: Mapping[str, Callable[[Material], StoredPredictor]] = {
    "previous": lambda m: count_previous(m.trace),
    "affinity": lambda m: count_affinity(m.trace, m.vocab),
    "transition": lambda m: count_transition(m.trace),
    "lookahead-defaults-shared": lambda m: train_lookahead(m, defaults=train_defaults(m), shared=True),
}
