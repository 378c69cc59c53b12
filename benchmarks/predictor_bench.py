"""What the stages of train_predictors share: the material, the test, and where results go."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.predictor_material import CONTEXT, load_nano, read_text
from steerpipe.arena.evaluation import evaluate, predictions
from steerpipe.arena.metrics import Tally
from steerpipe.predict.files import save
from steerpipe.predict.protocol import RoutingPredictor
from steerpipe.predict.records import PackedTrace, States
from steerpipe.predict.sight import Decision
from steerpipe.predict.storage import Storage
from steerpipe.predict.stored import StoredPredictor, Training
from steerpipe.trace.live import windows
from steerpipe.train.fit import Schedule
from steerpipe.train.material import Material, collect, first_rows, seen_in
from steerpipe.train.models import check_routers, routers_of_model

SHARES = {"1/64": 1 / 64, "1/16": 1 / 16, "1/4": 1 / 4, "1": 1.0}  # of the training material: learning curves
TUNING = 0.05  # of the training material, the last sequences: for blends, which must not see what their parts counted
P = TypeVar("P", bound=StoredPredictor)


@dataclass
class Bench:
    material: Material  # to learn from
    tuning: Material
    test: PackedTrace
    out: Path
    scale: float
    results: dict[str, Any]
    kept: dict[str, StoredPredictor] = field(default_factory=dict)  # for later stages

    @classmethod
    def prepare(cls, options: argparse.Namespace) -> "Bench":
        start = time.monotonic()
        model, folder = load_nano(options.device)
        text = read_text(options.documents, options.chats, folder, options.tokens)
        print(f"loaded and tokenised: {time.monotonic() - start:.1f} s", flush=True)
        start = time.monotonic()
        train, test = (
            collect(model, side, max_tokens=CONTEXT, openings=text.openings, states=options.states)
            for side in (text.train, text.test)
        )
        seconds = time.monotonic() - start
        print(f"traced {train.rows:,} + {test.rows:,} tokens in {seconds:.1f} s", flush=True)
        routers = routers_of_model(model)
        seen = seen_in(windows(text.train, CONTEXT))
        whole = Material(train, len(text.train), model.config.vocab_size, routers, model, seen)
        said = {
            "model": "nano as shipped", "device": _device_name(options.device), "train_tokens": train.rows,
            "train_prompts": len(text.train), "test_tokens_held_out": test.rows, "test_prompts": len(text.test),
            "tracing_seconds": seconds, "scale": options.scale,
        }  # fmt: skip
        if options.states:
            said["router_agreement"] = check_routers(routers, test)
        test = first_rows(test, min(test.rows, options.test_tokens))
        said["test_tokens"] = test.rows
        fitting = whole.first(1 - TUNING)
        return cls(fitting, _last(whole, fitting.trace.rows), test, options.out, options.scale, {"run": said})

    def schedule(self, steps: int, rows: int, rate: float, *, half: bool = False) -> Schedule:
        """`half`: in bfloat16 where that is faster, on a GPU."""
        return Schedule(max(2, round(steps * self.scale)), rows, rate, half=half and self.test.device.type == "cuda")

    def train(self, key: str, make: Callable[[Material], P], material: Material | None = None) -> P:
        """Makes, times and remembers a predictor."""
        source = material or self.material
        start = time.monotonic()
        made = make(source)
        if source.trace.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - start
        made.training = Training(
            source.trace.rows, source.prompts, round(seconds, 2), self.results["run"]["device"], 0, "nano"
        )
        made.seen = source.seen
        self.kept[key] = made
        self.log(f"  {key}: made in {seconds:.1f} s")
        return made

    def test_at(self, key: str, predictor: RoutingPredictor, horizons: Sequence[int]) -> dict[str, Any]:
        """All target layers; into the results under `key`."""
        entry = self._entry(key, predictor)
        for horizon in horizons:
            score = evaluate(predictor, self.test, horizon)
            layers = range(self.test.geometry.layers)
            entry["horizons"][str(horizon)] = {
                "overall": score.overall().as_json(),
                "layers_0_to_2": [score.layer(layer).as_json() for layer in range(min(3, len(layers)))],
                "recall_by_layer": [round(score.layer(layer).recall, 5) for layer in layers],
            }
            self.log(f"  {key} at {horizon}: recall {score.overall().recall:.4f}")
        return entry

    def test_decision(self, key: str, predictor: RoutingPredictor, decision: Decision) -> dict[str, Any]:
        """One target layer at one horizon."""
        metrics = self.tally(predictor, decision, self.test).metrics()
        entry = self._entry(key, predictor)
        entry["decisions"][f"layer {decision.target}, {decision.horizon} ahead"] = metrics.as_json()
        self.log(f"  {key} at layer {decision.target}, {decision.horizon} ahead: recall {metrics.recall:.4f}")
        return entry

    def tally(self, predictor: RoutingPredictor, decision: Decision, trace: PackedTrace) -> Tally:
        tally = Tally(trace.device)
        for rows, said in predictions(predictor, trace, decision):
            weights = None if trace.weights is None else trace.weights[rows, decision.target]
            tally.add(said, trace.experts[rows, decision.target], weights)
        return tally

    def keep(self, key: str, folder: str, storage: Storage) -> Path:
        """Writes a trained predictor to its folder of the output."""
        file = self.out / folder / f"{key}.safetensors"
        self.results["predictors"][key]["file_bytes"] = save(self.kept[key], file, storage)
        return file

    def write(self) -> None:
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1), encoding="utf-8")

    def summary(self) -> dict[str, Any]:
        recalls = {
            key: {horizon: round(each["overall"]["recall"], 4) for horizon, each in entry["horizons"].items()}
            for key, entry in self.results.get("predictors", {}).items()
        }
        return {"run": self.results["run"], "recall": recalls}

    def log(self, line: str) -> None:
        print(line, flush=True)

    def _entry(self, key: str, predictor: RoutingPredictor) -> dict[str, Any]:
        empty = {"name": predictor.name, "cost": asdict(predictor.cost()), "horizons": {}, "decisions": {}}
        entry: dict[str, Any] = self.results.setdefault("predictors", {}).setdefault(key, empty)
        training = getattr(predictor, "training", None)
        if training is not None:
            entry["training"] = asdict(training)
        return entry


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of processes that took stages each; the text and the split must be the same."""
    together = dict(results[0])
    for each in results[1:]:
        same = ("train_tokens", "test_tokens", "train_prompts", "test_prompts")
        assert all(each["run"][key] == together["run"][key] for key in same), "runs on different text"
        parts = {key: together.get(key, {}) | each.get(key, {}) for key in ("predictors", "timings")}
        together = together | each | parts
    return together | {"run": results[0]["run"]}


def brief(results: dict[str, Any]) -> dict[str, Any]:
    """What a note keeps: four digits, by layer the recall alone."""
    entries = {key: _brief_entry(entry) for key, entry in results["predictors"].items()}
    said: dict[str, Any] = _short(results | {"predictors": entries})
    return said


def _brief_entry(entry: dict[str, Any]) -> dict[str, Any]:
    horizons = {
        horizon: {"overall": _brief_metrics(found["overall"]), "recall_by_layer": found["recall_by_layer"]}
        for horizon, found in entry["horizons"].items()
    }
    decisions = {decision: _brief_metrics(found) for decision, found in entry["decisions"].items()}
    return {key: value for key, value in (entry | {"horizons": horizons, "decisions": decisions}).items() if value}


def _brief_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    left_out = ("decisions", "missed", "recall_on_misses")  # no cache is followed here
    return {key: value for key, value in metrics.items() if key not in left_out}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, list) else value


def _last(whole: Material, first: int) -> Material:
    """The rows that come after the first ones, numbered anew."""
    trace = whole.trace

    def cut(tensor: Tensor) -> Tensor:
        return tensor[first:]

    assert trace.weights is not None, "collected with them"
    states = trace.states
    if states is not None:
        shared = None if states.shared is None else cut(states.shared)
        states = States(cut(states.entering), cut(states.residual), shared)
    kept = PackedTrace(
        trace.geometry, cut(trace.tokens), cut(trace.sequence) - trace.sequence[first], cut(trace.place),
        cut(trace.experts), cut(trace.weights), states,
    )  # fmt: skip
    return replace(whole, trace=kept, prompts=max(1, round(whole.prompts * TUNING)))


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
