"""The data questions of trajectory prediction, at the paper's own setting (layer 12, two layers ahead, window 10):

    python benchmarks/predictor_data.py --chats chats.json --out FILE [--device cuda] [--scale 1] [--limit 1000]

1. Synthetic or real: the 1,000 combinatorial prompts and prompts that people typed (`generate_chats.py` made chats.json
   of them), both with the first 32 tokens of nano's answers; trained on one, tested on both, with equal numbers of
   tokens.
2. The leak: the same predictors, trained and tested on as many tokens, split by prompt, by token, and (synthetic) by
   template, so that no test prompt has a template of the training.

The opening of the chat template, the same in all chats, is neither learnt nor tested. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmarks.predictor_corpora import Corpus, draw, real_chats, synthetic_chats, taken, trace_chats
from benchmarks.predictor_material import load_nano
from steerpipe.arena.metrics import Tally
from steerpipe.predict.calibration import margins, uncalibrated
from steerpipe.predict.head import HeadNetwork, ResidualHead
from steerpipe.predict.protocol import RoutingPredictor
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Decision, Sight
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.trajectory_networks import Architecture, build
from steerpipe.predict.window import STEPS as HISTORY
from steerpipe.predict.window import Window, read_window, window_length
from steerpipe.trace.split import split_prompts
from steerpipe.train.counts import count_affinity, count_frequency, count_transition
from steerpipe.train.fit import Schedule, fit
from steerpipe.train.models import routers_of_model
from steerpipe.train.recipes import HEAD_INPUTS

SEED = Decision(target=12, horizon=2)
HELD_OUT = 0.15
NETWORKS = {  # as many steps in every cell, so that data alone differs
    Architecture.MLP: Schedule(600, 512, 1e-3),
    Architecture.TRANSFORMER: Schedule(600, 512, 3e-3),
}
HEAD = Schedule(300, 512, 2e-3)


@dataclass(frozen=True)
class Learner:
    """Trains every predictor on some rows of a corpus."""

    model: PreTrainedModel
    scale: float

    def learn(self, corpus: Corpus, rows: Tensor) -> Iterator[tuple[str, RoutingPredictor]]:
        trace = corpus.trace
        part = taken(trace, rows)  # counting needs no neighbours at this decision
        yield "frequency", count_frequency(part, [SEED.horizon])
        yield "affinity", count_affinity(part, int(self.model.config.vocab_size), crossing=1, horizons=[SEED.horizon])
        yield "transition", count_transition(part, [SEED.horizon])
        for architecture, schedule in NETWORKS.items():
            for window in (Window.LAYERS, Window.BOTH):
                made = train_history(trace, rows, architecture, window, self._scaled(schedule))
                yield f"{architecture} ({window})", made
        yield "head (hidden state)", train_state_head(trace, rows, routers_of_model(self.model), self._scaled(HEAD))

    def _scaled(self, schedule: Schedule) -> Schedule:
        return replace(schedule, steps=max(2, round(schedule.steps * self.scale)))


def train_history(
    trace: PackedTrace, rows: Tensor, architecture: Architecture, window: Window, schedule: Schedule
) -> Trajectory:
    """As steerpipe.train.trajectories does it, from these rows alone; the tokens before them are seen as history."""
    experts = trace.geometry.experts
    torch.manual_seed(schedule.seed)
    network = build(architecture, experts, window_length(window, HISTORY)).to(trace.device).train()

    def loss_of(drawn: Tensor) -> Tensor:
        sight = Sight(trace, drawn, SEED)
        return F.binary_cross_entropy_with_logits(network(read_window(sight, window)), sight.truth())

    fit(network.parameters(), loss_of, rows, schedule, what=architecture)
    return Trajectory(architecture, experts, {SEED: network}, window=window)


def train_state_head(trace: PackedTrace, rows: Tensor, routers: Routers, schedule: Schedule) -> ResidualHead:
    """The low-rank head of one layer, by cross entropy."""
    torch.manual_seed(schedule.seed)
    network = HeadNetwork(routers, rank=32, shared=True, inputs=HEAD_INPUTS)

    def loss_of(drawn: Tensor) -> Tensor:
        sight = Sight(trace, drawn, SEED)
        gathered = tuple(each[None] for each in network.gather(sight))
        said = network(gathered, slice(SEED.target, SEED.target + 1))[0]
        return F.binary_cross_entropy_with_logits(margins(said, routers.top_k), sight.truth())

    fit(network.parameters(), loss_of, rows, schedule, what="head")
    return ResidualHead(network, routers, SEED.horizon, uncalibrated(1, routers.layers))


@torch.no_grad()
def test(predictor: RoutingPredictor, corpus: Corpus, rows: Tensor) -> dict[str, float]:
    tally = Tally(rows.device)
    for piece in rows.split(8192):
        tally.add(predictor.probabilities(Sight(corpus.trace, piece, SEED)), corpus.trace.experts[piece, SEED.target])
    found = tally.metrics()
    shown = ("top_1", "recall", "jaccard", "perfect")
    return {name: round(getattr(found, name), 4) for name in shown}


def cross_table(corpora: Mapping[str, Corpus], learner: Learner, log: Callable[[str], None]) -> dict[str, Any]:
    sides = {name: split_prompts(corpus.names, HELD_OUT) for name, corpus in corpora.items()}
    most = {
        side: min(len(corpus.rows_of(sides[name][side], 1 << 60, 0)) for name, corpus in corpora.items())
        for side in (0, 1)
    }
    found: dict[str, Any] = {"train_tokens": most[0], "test_tokens": most[1]}
    for source, corpus in corpora.items():
        for name, predictor in learner.learn(corpus, corpus.rows_of(sides[source][0], most[0], 0)):
            for target, other in corpora.items():
                rows = other.rows_of(sides[target][1], most[1], 1)
                found.setdefault(name, {})[f"{source} → {target}"] = test(predictor, other, rows)
            log(f"{name}, trained on {source}")
    return found


def leak_table(corpora: Mapping[str, Corpus], learner: Learner, log: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for source, corpus in corpora.items():
        splits = dict(_splits(source, corpus))
        train_tokens, test_tokens = (min(len(sides[side]) for sides in splits.values()) for side in (0, 1))
        cell = found[source] = {"train_tokens": train_tokens, "test_tokens": test_tokens}
        for split, (train, held) in splits.items():
            train, held = draw(train, train_tokens, 0), draw(held, test_tokens, 1)
            for name, predictor in learner.learn(corpus, train):
                cell.setdefault(name, {})[split] = test(predictor, corpus, held)
            log(f"{source}, split {split}")
    return found


def _splits(source: str, corpus: Corpus) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    every = 1 << 60
    train, held = split_prompts(corpus.names, HELD_OUT)
    yield "by prompt", (corpus.rows_of(train, every, 0), corpus.rows_of(held, every, 0))
    random = torch.rand(corpus.trace.rows, generator=torch.Generator().manual_seed(7)).to(corpus.trace.device)
    yield "by token", tuple(torch.nonzero(side).flatten() for side in (random >= HELD_OUT, random < HELD_OUT))  # type: ignore[misc]
    if source == "synthetic":
        template = {name: name.split("-")[1] for name in corpus.names}
        train, held = split_prompts(sorted(set(template.values())), HELD_OUT, seed=0)
        sides = ([name for name in corpus.names if template[name] in side] for side in (train, held))
        yield "by template", tuple(corpus.rows_of(side, every, 0) for side in sides)  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="of the networks' steps")
    parser.add_argument("--limit", type=int, default=1000, help="combinatorial prompts; as many tokens of real chats")
    options = parser.parse_args()
    start = time.monotonic()

    def log(what: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {what}", flush=True)

    model, folder = load_nano(options.device)
    made = synthetic_chats(model, folder, options.limit)
    log(f"{len(made)} combinatorial prompts answered")
    size = sum(len(each["tokens"]) - each["opening_tokens"] for each in made)
    chats = {"synthetic": made, "real": real_chats(options.chats, size)}
    corpora = {name: trace_chats(model, each) for name, each in chats.items()}
    sizes = {name: {"prompts": len(each.names), "tokens": each.trace.rows} for name, each in corpora.items()}
    log(f"traced {sizes}")
    learner = Learner(model, options.scale)
    found = {"decision": {"target": SEED.target, "horizon": SEED.horizon}, "corpora": sizes, "scale": options.scale}
    for name, make in (("leak", leak_table), ("cross", cross_table)):
        found[name] = make(corpora, learner, log)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
