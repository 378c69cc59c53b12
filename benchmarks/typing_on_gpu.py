"""What typing saves on a GPU at full shape with a cold cache: recorded drafts played on live steps and transfers.

    PYTHONPATH=src:. python benchmarks/typing_on_gpu.py --passages FILE --json OUT [--format bf16] [--share 0.25]

`typing_passages.py` writes the passages. Keys come at their times; where there is nothing to do the clock is put
forward. Cells and begun answers are what `runtime.drafts` would do, with the routing that nano has for that prefix; the
forecast is the product's. Weights are made up, transfers are real (page-locked memory to slots). Every play begins with
an empty cache, but for the four experts of each layer that the passage uses least: graphs were captured on them. What
was typed long before Enter is computed in one go, its last two cells one by one. All experts lie in RAM, so there is no
promotion from a disk here: what a forecast moves is RAM to slots.

Milliseconds are from Enter on; 0 where the first token was there before the step that Enter met: it is told without the
engine. stall: the first 16 decode steps, less 16 steps whose experts are all there.
"""

import argparse
import faulthandler
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.typing_passages import Moment, Passage, Route, load
from steerpipe.bench.budgets import Ladder
from steerpipe.bench.rig import Rig
from steerpipe.bench.routing import Routing
from steerpipe.bench.shapes import Shape, make_shape
from steerpipe.intake.pauses import FORECAST
from steerpipe.model.cells import CELL
from steerpipe.predict.openings import FIRST_TOKENS, OpeningTable, find_openings
from steerpipe.runtime.draft_forecast import DraftForecast
from steerpipe.runtime.draft_routing import DraftRouting
from steerpipe.runtime.draft_session import AHEAD_TOKENS, DraftWork
from steerpipe.runtime.models import EMBEDDED
from steerpipe.store.formats import parse_expert_format
from steerpipe.transfer.cuda.backing import LayerBlocks
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.machine import slots_of_share

CONTEXT = 128
EARLY_CELLS = 2  # of what was typed long before Enter are computed one by one
HIT_STEPS = 8
ARMS = {
    "nothing": DraftWork(prefill=False, ahead_tokens=0, forecast=False, guess=False),
    "all": DraftWork(),
    "prefill": DraftWork(prefill=True, ahead_tokens=0, forecast=False, guess=False),
    "enter": DraftWork(prefill=False, forecast=False, guess=False),
    "affinity": DraftWork(prefill=False, ahead_tokens=0, forecast=True, guess=False),
    "n-gram": DraftWork(prefill=False, ahead_tokens=0, forecast=True, guess=True),
    "prefill+enter": DraftWork(forecast=False, guess=False),
}


class Stage:
    """One shape on one device. A source is opened for each play."""

    def __init__(self, shape: Shape, device: torch.device, share: float) -> None:
        self.shape, self.device = shape, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.rig = Rig(shape, device, dtype, sequences=2, tokens=512, kernels=True)
        say("dense weights are there")
        self.ladder = Ladder(shape, device)
        say("blocks are pinned")
        self.slots = slots_of_share(share, shape.all_experts)
        self.blocks = LayerBlocks(shape.moe.experts, shape.layout.form, shape.layout.block_bytes)

    def open(self) -> CudaSource:
        layers = dict.fromkeys(self.shape.spec.moe_layers, self.blocks)
        return CudaSource(layers, self.ladder.backing, slots=self.slots, device=self.device, policy="lfru")

    def routing(self, route: Route) -> NDArray[np.int64]:
        """In the shape's geometry; a smaller one (of a rehearsal) takes what fits."""
        moe = self.shape.moe
        if route.routing.shape[1:] == (self.shape.layers, moe.top_k):
            return route.routing.astype(np.int64)
        base = route.routing[:, : self.shape.layers, :1].astype(np.int64)
        return (base + np.arange(moe.top_k)) % moe.experts


@dataclass(slots=True)
class _State:
    """What is there of a draft."""

    moment: Moment
    typed: float = 0.0
    computed: int = 0
    foreseen: bool = False
    filled: int = -1  # tokens of the begun prompt that are computed
    ahead: int = 0  # tokens of its answer


class Play:
    """One passage, one way of working, one cold source."""

    def __init__(
        self, stage: Stage, passage: Passage, routes: list[Route], work: DraftWork, table: OpeningTable
    ) -> None:
        self.stage, self.passage, self.work, self.table = stage, passage, work, table
        self.routes = routes
        self.routing = {
            number: Routing("recorded", stage.routing(routes[number]))
            for moment in passage.moments
            for number in (moment.route, moment.complete)
            if number >= 0
        }
        self._skipped = 0.0
        self._known = 0  # tokens of the answer before the newest step
        self.steps = 0

    def run(self) -> dict[str, Any]:
        stage, rig = self.stage, self.stage.rig
        with stage.open() as source:
            shape = stage.shape
            routing = DraftRouting(shape.spec.moe_layers, shape.moe.experts)
            self.source, self.kv = source, rig.sequence(CONTEXT)
            self.forecast = DraftForecast(source, self.table, routing)
            unused = Routing("least used", self._least_used()[None])
            for length in (CONTEXT, CONTEXT + 1, CONTEXT + FIRST_TOKENS + HIT_STEPS):
                rig.check(source, [self.kv], unused, length)
            self.kv.truncate(CONTEXT)
            try:
                return self._type()
            finally:
                self.kv.free()
                rig.forget()

    def _type(self) -> dict[str, Any]:
        first, *later = self.passage.moments
        self.state = _State(first, self.now())
        early = max(0, first.stable // CELL - EARLY_CELLS) * CELL if self.work.prefill else 0
        if early:
            self.stage.rig.prefill(self.source, self.routing[first.route], 0, early)
            self.state.computed = early
        while self._work():  # it was typed in more time than the work on it takes
            pass
        begin = self.now()
        for moment in later:
            self._work_until(begin + moment.seconds)
            self._edit(moment, begin + moment.seconds)
        entered = begin + self.passage.enter_seconds
        self._known = 0
        self._work_until(entered)
        return self._enter(entered)

    def _enter(self, entered: float) -> dict[str, Any]:
        state, route, rig = self.state, self.routes[self.state.moment.complete], self.stage.rig
        routing, before = self.routing[state.moment.complete], self.source.counters()
        ahead = state.ahead if state.filled == route.prompt else 0
        told = {"ahead": ahead, "known": self._known, "computed": state.computed, "prompt": route.prompt,
                "steps": self.steps}  # fmt: skip
        if not ahead:
            done = max(state.computed, state.filled)
            rig.prefill(self.source, routing, done, route.prompt - done)
        first = 0.0 if self._known else self.now() - entered
        prefilled = self.source.counters() - before
        done = max(0, ahead - 1)  # the prompt's last row gave the first token
        spent = rig.decode(self.source, [self.kv], routing, route.prompt + done, FIRST_TOKENS - done)
        decoded = self.source.counters() - before
        last = route.prompt + FIRST_TOKENS - 1
        again = Routing("again", routing.ids[last : last + 1])
        hits = rig.decode(self.source, [self.kv], again, 0, HIT_STEPS)
        return told | {
            "first_token_ms": first * 1e3, "decode_ms": sum(spent) * 1e3, "hit_step_ms": min(hits) * 1e3,
            "misses": decoded.misses - prefilled.misses, "prompt_misses": prefilled.misses,
        }  # fmt: skip

    def _edit(self, moment: Moment, at: float) -> None:
        state, old = self.state, self.routes[self.state.moment.route].ids
        new = self.routes[moment.route].ids[: moment.stable]
        common = min(len(old), len(new))
        differing = np.flatnonzero(old[:common] != new[:common])
        kept = int(differing[0]) if len(differing) else common
        self.state = _State(moment, at, min(state.computed, kept // CELL * CELL))
        self.kv.truncate(CONTEXT)  # an answer that was begun is dropped

    def _work_until(self, moment: float) -> None:
        while (now := self.now()) < moment:
            if self._work():
                continue
            wakes = (
                [self.state.typed + FORECAST.quiet_seconds] if self.work.forecast and not self.state.foreseen else []
            )
            if self._may_begin:
                wakes.append(self.state.typed + self.state.moment.quiet_seconds)
            self._skipped += max(0.0, min([*wakes, moment]) - now)

    def _work(self) -> bool:
        """One step of what there is to do; False: nothing now."""
        state, rig = self.state, self.stage.rig
        self._known = state.ahead
        self._forecast()
        if self.work.prefill and state.computed + CELL <= state.moment.stable:
            rig.prefill(self.source, self.routing[state.moment.route], state.computed, CELL)
            state.computed += CELL
            state.foreseen = False
        elif self._may_begin and self.now() >= state.typed + state.moment.quiet_seconds:
            self._begin_more()
        else:
            return self.forecast.pending
        self.steps += 1
        return True

    @property
    def _may_begin(self) -> bool:
        state = self.state
        return bool(self.work.ahead_tokens) and state.moment.complete >= 0 and state.ahead < AHEAD_TOKENS

    def _begin_more(self) -> None:
        """A cell of the begun prompt, or a token of its answer; the prompt's last row gives the first."""
        state, rig, route = self.state, self.stage.rig, self.routes[self.state.moment.complete]
        routing = self.routing[state.moment.complete]
        state.filled = max(state.filled, state.computed)
        if state.filled < route.prompt:
            count = min(CELL, route.prompt - state.filled)
            rig.prefill(self.source, routing, state.filled, count)
            state.filled += count
            state.ahead = int(state.filled == route.prompt)
        else:
            rig.decode(self.source, [self.kv], routing, route.prompt + state.ahead - 1, 1)
            state.ahead += 1

    def _forecast(self) -> None:
        """As `runtime.draft_foresight` does."""
        state = self.state
        if not self.work.forecast or self.now() < state.typed + FORECAST.quiet_seconds:
            return
        if state.foreseen:
            self.forecast.go_on()
        else:
            state.foreseen = True
            self.forecast.expect([self._uses()], self._tail(), state.computed)
        self._wait()

    def _wait(self) -> None:
        """Until what was sent for has come: it takes the link's time, and Enter may come meanwhile."""
        if self.stage.device.type == "cuda":
            torch.cuda.synchronize()

    def _uses(self) -> NDArray[np.uint16]:
        """[L, E]: of the tokens that are computed."""
        uses = np.zeros(self.table.answer.shape, dtype=np.uint16)
        layers = np.arange(len(uses))[:, None]
        for row in self.routing[self.state.moment.route].ids[: self.state.computed]:
            uses[layers, row] += 1
        return uses

    def _tail(self) -> dict[int, float]:
        """The others: those that are certain, and those that the end may become."""
        moment = self.state.moment
        tail: dict[int, float] = dict(moment.guessed) if self.work.guess else {}
        for token in self.routes[moment.route].ids[self.state.computed : moment.stable].tolist():
            tail[token] = tail.get(token, 0.0) + 1.0
        return tail

    def _least_used(self) -> NDArray[np.int64]:
        """[L, k]"""
        shape = self.stage.shape
        uses = np.zeros((shape.layers, shape.moe.experts))
        for routing in self.routing.values():
            for row in routing.ids:
                uses[np.arange(shape.layers)[:, None], row] += 1
        return np.argsort(uses, axis=1, kind="stable")[:, : shape.moe.top_k]

    def now(self) -> float:
        return time.perf_counter() + self._skipped


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGUN:6.1f} s  {text}", flush=True)


BEGUN = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shape", default="qwen1.5-moe")
    parser.add_argument("--format", default="bf16", help="bf16, int8 or int4")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--skip", type=int, default=0, help="so many first: to measure in parts")
    parser.add_argument("--seconds", type=float, default=130.0, help="no prompt is begun later than that")
    given = parser.parse_args()
    faulthandler.dump_traceback_later(given.seconds + 30, exit=True)
    form = parse_expert_format(given.format)
    assert form is not None, "a benchmark has no native format"
    shape = make_shape(given.shape, form, 1024)
    passages, routes = load(given.passages)
    table = find_openings(EMBEDDED)
    assert table is not None, "nano has a table of openings"
    if table.answer.shape != (shape.layers, shape.moe.experts):  # a rehearsal
        table = OpeningTable.unknown(shape.layers, shape.moe.experts)
    stage = Stage(shape, torch.device("cuda" if torch.cuda.is_available() else "cpu"), given.share)
    link = stage.ladder.measure_link()
    say(f"the link moves {link / 1e9:.1f} GB/s; {stage.slots} slots of {shape.layout.block_bytes / 1e6:.2f} MB")
    lines: list[dict[str, Any]] = []
    arms = given.arms.split(",")
    Play(stage, passages[0], routes, ARMS[arms[0]], table).run()  # compiles the kernels, and is not counted
    say("kernels are compiled")
    for number, passage in list(enumerate(passages))[given.skip :][: given.prompts]:
        if time.perf_counter() - BEGUN > given.seconds:
            break
        for arm in arms:
            played = Play(stage, passage, routes, ARMS[arm], table).run()
            pause = passage.enter_seconds - passage.moments[-1].seconds
            lines.append({"arm": arm, "prompt_number": number, "pause_seconds": pause} | played)
            say(
                f"{number} {arm:14} first {played['first_token_ms']:7.1f} ms, begun {played['ahead']}, "
                f"decode {played['decode_ms']:7.1f} ms, misses {played['misses']}"
            )
            hit_step_ms = min(line["hit_step_ms"] for line in lines)
            found = {
                "shape": given.shape, "format": given.format, "share": given.share, "link": link,
                "block_bytes": shape.layout.block_bytes, "hit_step_ms": hit_step_ms,
                "table": summary(lines, hit_step_ms), "lines": lines,
                "work": {name: asdict(work) for name, work in ARMS.items()},
            }  # fmt: skip
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    for row in summary(lines, min(line["hit_step_ms"] for line in lines)):
        print(json.dumps(row), flush=True)
    say("done")


def summary(lines: list[dict[str, Any]], hit_step_ms: float) -> list[dict[str, Any]]:
    """Over the prompts: median of the first token, means of the rest. `hit_step_ms`: the least of all lines; in one
    line alone, experts of the last token may have had to come back in every step."""
    rows = []
    for arm in dict.fromkeys(line["arm"] for line in lines):
        own = [line for line in lines if line["arm"] == arm]
        rows.append({
            "arm": arm, "prompts": len(own), "begun": sum(line["ahead"] > 0 for line in own),
            "first_token_ms": statistics.median(line["first_token_ms"] for line in own),
            "stall_ms": statistics.fmean(line["decode_ms"] - _decoded(line) * hit_step_ms for line in own),
            **{name: statistics.fmean(line[name] for line in own) for name in ("decode_ms", "misses")},
        })  # fmt: skip
    return rows


def _decoded(line: dict[str, Any]) -> int:
    """Steps in its `decode_ms`."""
    return FIRST_TOKENS - max(0, int(line["ahead"]) - 1)


if __name__ == "__main__":
    main()
