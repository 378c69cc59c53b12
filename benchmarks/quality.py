"""What lossy answers to a miss cost nano: policies by horizon and layers, the dial on other texts, two tasks.

    python -m benchmarks.quality plans TEXTS.jsonl OUT.json [windows] [dtype]
    python -m benchmarks.quality recalls TEXTS.jsonl OUT.json [windows] [dtype]
    python -m benchmarks.quality tasks TEXTS.jsonl OUT.json [items] [dtype]

TEXTS: {"id": "source-…", "text": …} per line, none of them used for the calibration. 25 % of the experts are resident.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.quality_tasks import TASKS, Item
from steerpipe.core.config import EngineConfig
from steerpipe.core.quality import Dial, MissPolicy, QualityPlan
from steerpipe.predict import files
from steerpipe.predict.logits import LogitPredictor
from steerpipe.predict.routers import routers_of_weights
from steerpipe.predict.shipped import for_model
from steerpipe.runtime.calibrating import Subject, open_subject
from steerpipe.runtime.calibration import Meter, only
from steerpipe.runtime.quality_profile import load_profile, profile_of
from steerpipe.runtime.quality_rehearsal import CacheOnPaper, Exact

WINDOW, RESIDENCY, NEVER = 144, 0.25, 99
IN_TASKS = (
    "drop, layers all", "surrogate, layers all", "patch after 2, layers all", "--quality",
    "commit by the router, 1 ahead, layers all", "commit-true by the head, 1 ahead, layers all",
)  # fmt: skip
SPANS = {"all": (0, 23), "0-2": (0, 2), "3-23": (3, 23)}


@dataclass
class Case:
    """One plan under one name, and what became of it text by text."""

    name: str
    plan: QualityPlan
    late: int = 2
    head: bool | None = None  # who commits: a trained head, the router; None: whoever the engine asks
    nats: list[float] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)


class Bench:
    def __init__(self, dtype: str = "float32") -> None:
        self.subject: Subject = open_subject(None, EngineConfig(dtype=dtype, threads=1))
        spec, weights = self.subject.rehearsal.spec, self.subject.weights
        shipped, file = for_model(self.subject.folder), profile_of(self.subject.folder)
        assert shipped is not None and file is not None, "nano has both"
        routers = routers_of_weights(spec, weights)
        self.heads = {h: files.load(path, routers) for h, path in shipped.heads().items()}
        self.profile = load_profile(file, self.subject.identity)

    def predictors(self, case: Case) -> dict[int, LogitPredictor]:
        if case.head is None:
            return dict(self.subject.predictors(case.plan))
        own = self.heads[case.plan.horizon] if case.head else self.subject.lookahead
        assert isinstance(own, LogitPredictor), "heads rank by logits"
        committed = (MissPolicy.COMMIT, MissPolicy.COMMIT_TRUE)
        return {n: own for n, ranks in case.plan.rows() if ranks[0] in committed and n >= case.plan.horizon}

    def cache(self) -> CacheOnPaper:
        geometry = self.subject.rehearsal.geometry
        return CacheOnPaper(geometry.layers, geometry.experts, round(RESIDENCY * geometry.layers * geometry.experts))

    def compare(self, case: Case, exact: Exact) -> None:
        lossy, counts = self.subject.rehearsal.lossy(exact, case.plan, self.predictors(case), case.late)
        own = Meter()
        for meter in (case.meter, own):
            meter.add_text(exact, lossy, counts)
        case.nats.append(own.nats / own.tokens)

    def answers(self, item: Item, listed: Sequence[Case]) -> list[int]:
        """Which of the four continuations is likeliest per token: to the exact model, then under each plan."""
        cache = self.cache()
        means = np.zeros((1 + len(listed), len(item.choices)))
        for number, continuation in enumerate(item.choices):
            exact = self.subject.rehearsal.exact([*item.context, *continuation], cache.copy(), len(item.context) - 1)
            lossy = [
                self.subject.rehearsal.lossy(exact, each.plan, self.predictors(each), each.late)[0] for each in listed
            ]
            told = [exact.log_probabilities, *lossy]
            means[:, number] = [float(each[:-1].gather(1, following(exact)).mean()) for each in told]
            self.subject.rehearsal.forget(exact)
        found: list[int] = means.argmax(1).tolist()
        return found


def following(exact: Exact) -> Tensor:
    """[M - 1, 1]: what came after each token behind the prompt."""
    return torch.tensor(exact.tokens[exact.prompt_tokens + 1 :])[:, None]


def cases(bench: Bench) -> Iterator[Case]:
    def plan(policy: MissPolicy, span: tuple[int, int], rank: int | None = None, horizon: int = 1) -> QualityPlan:
        first = max(span[0], horizon) if policy in (MissPolicy.COMMIT, MissPolicy.COMMIT_TRUE) else span[0]
        made = only(policy, (first, span[1]), rank, 24, 4)
        return QualityPlan(made.policies, 4, horizon)

    for name, span in SPANS.items():
        yield Case(f"drop, layers {name}", plan(MissPolicy.DROP, span))
        yield Case(f"surrogate, layers {name}", plan(MissPolicy.SURROGATE, span))
        for late in (1, 2, 3):
            yield Case(f"patch after {late}, layers {name}", plan(MissPolicy.PATCH, span), late)
        for horizon in (1, 2, 3):
            for head in (False, True):
                for policy in (MissPolicy.COMMIT, MissPolicy.COMMIT_TRUE):
                    who = "head" if head else "router"
                    called = f"{policy} by the {who}, {horizon} ahead, layers {name}"
                    yield Case(called, plan(policy, span, horizon=horizon), head=head)
    for rank in range(4):
        yield Case(f"surrogate, rank {rank}", plan(MissPolicy.SURROGATE, SPANS["all"], rank))
    for dial in (Dial.HIGH, Dial.BALANCED, Dial.FAST):
        setting = bench.profile.setting(dial)
        yield Case(f"--quality {dial}", setting.plan)
        yield Case(f"--quality {dial}, nothing comes in time", setting.plan, NEVER)


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % by bootstrap over the values."""
    random, held = np.random.default_rng(seed), np.array(values)
    means = held[random.integers(len(held), size=(2000, len(held)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def texts(bench: Bench, file: Path, windows: int) -> list[list[int]]:
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        ids = bench.subject.codec.encode(json.loads(line)["text"], False)[:WINDOW]
        if len(ids) == WINDOW:
            found.append(ids)
        if len(found) == windows:
            break
    return found


def measure(bench: Bench, listed: list[Case], file: Path, windows: int) -> dict[str, Any]:
    cache, own = bench.cache(), Meter()
    for text in texts(bench, file, windows):
        exact = bench.subject.rehearsal.exact(text, cache)
        own.add_text(exact, exact.log_probabilities)
        for case in listed:
            bench.compare(case, exact)
        bench.subject.rehearsal.forget(exact)
    rows = {}
    for case in listed:
        loss = case.meter.loss()
        rows[case.name] = {
            "kl": loss.kl, "interval": interval(case.nats), "perplexity": loss.perplexity, "top1": loss.top1,
            "substituted": loss.share,
        }  # fmt: skip
    return {"tokens": own.tokens, "exact_perplexity": own.loss().perplexity, "rows": rows}


def recalls(bench: Bench, file: Path, windows: int) -> dict[str, list[float]]:
    """How often the expert of each rank is among the four that were named for its layer, layers 3 to 23."""
    found = {}
    for who, predictor, horizon in (
        ("router", bench.subject.lookahead, 1),
        *(("head", bench.heads[h], h) for h in (1, 2, 3)),
    ):
        assert isinstance(predictor, LogitPredictor), "heads rank by logits"
        hits, seen, cache = np.zeros(4), 0, bench.cache()
        for text in texts(bench, file, windows):
            exact = bench.subject.rehearsal.exact(text, cache)
            said = bench.subject.rehearsal.foresee(exact, dict.fromkeys(range(3, 24), predictor), horizon)
            for layer, named in said.items():
                true = exact.routing[exact.prompt_tokens :, layer]
                hits += (true[:, :, None] == named.numpy()[:, None, :]).any(-1).sum(0)
                seen += len(true)
            bench.subject.rehearsal.forget(exact)
        found[f"{who}, {horizon} ahead"] = (hits / seen).tolist()
    return found


def tasks(bench: Bench, listed: list[Case], file: Path, items: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    told: dict[str, Any] = {}
    for name, make in TASKS.items():
        made = make(lines, bench.subject.codec, items)
        given = np.array([bench.answers(item, listed) for item in made])  # [items, 1 + cases]
        hits = given == np.array([item.answer for item in made])[:, None]
        right = dict(zip(["exact", *(case.name for case in listed)], hits.T.tolist(), strict=True))
        base = np.array(right["exact"], dtype=float)
        told[name] = {
            "items": len(made),
            **{
                key: {
                    "accuracy": float(np.mean(own)),
                    "interval": interval([float(each) for each in own]),
                    "difference": float(np.mean(own) - base.mean()),
                    "difference_interval": interval((np.array(own, dtype=float) - base).tolist()),
                }
                for key, own in right.items()
            },
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plans", "recalls", "tasks"))
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("count", nargs="?", type=int, default=12)
    parser.add_argument("dtype", nargs="?", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args()
    begin, bench = time.perf_counter(), Bench(given.dtype)
    listed = list(cases(bench))
    if given.what == "plans":
        told: dict[str, Any] = measure(bench, listed, given.texts, given.count)
    elif given.what == "recalls":
        told = dict(recalls(bench, given.texts, given.count))
    else:
        chosen = [case for case in listed if case.name.startswith(IN_TASKS) and "in time" not in case.name]
        told = tasks(bench, chosen, given.texts, given.count)
    told["seconds"] = time.perf_counter() - begin
    given.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
