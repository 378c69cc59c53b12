"""One shape in one format on one device: how its steps and prompts are timed, and what is written down of them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steerpipe.bench.floors import ActiveBytes, active_bytes
from steerpipe.bench.forecasts import read_forecasts
from steerpipe.bench.prediction import made_up_forecaster, spoken
from steerpipe.bench.results import Run
from steerpipe.bench.rig import Rig
from steerpipe.bench.routing import Routing, curves, never_again, open_routing
from steerpipe.bench.session import Session
from steerpipe.bench.shapes import Shape
from steerpipe.bench.timing import Times
from steerpipe.model.kv_cache import KvSequence
from steerpipe.transfer.counters import LadderCounters

_LEAST_ROUTING = 600  # tokens: what the curves of a routing are drawn from


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of some steps, and what the ladder did in them; None where everything is resident."""

    times: Times
    steps: int
    spent: LadderCounters | None
    driver: str  # see Run

    def missed_bytes(self, block_bytes: int) -> float:
        """Per step: what the cache did not have when the step began, whether a guess brought it in time or not."""
        return 0.0 if self.spent is None else (self.spent.leased - self.spent.demand.hits) * block_bytes / self.steps

    @property
    def guessed_bytes(self) -> float:
        """Per step: what a guess moved, whether it was used or not."""
        return 0.0 if self.spent is None else self.spent.prefetch.read_bytes / self.steps

    @property
    def hit_rate(self) -> float | None:
        return None if self.spent is None or not self.spent.leased else self.spent.hits / self.spent.leased


class Stage:
    def __init__(self, session: Session, shape: Shape) -> None:
        options = session.options
        self.session, self.options, self.shape = session, options, shape
        wanted = max(_LEAST_ROUTING, options.warmup + options.repeats * options.tokens, options.prefill)
        self.routing = open_routing(session.routing, shape, wanted)
        if self.routing is not None and not session.findings.curves:
            session.findings.curves = curves(self.routing, shape)
        self.rig = Rig(
            shape, session.device, session.dtype, sequences=max(options.batches), tokens=options.longest,
            kernels=session.kernels, seed=options.seed,
        )  # fmt: skip

    def predict(self, residency: float) -> str:
        """Lets the forecasts that were asked for speak in the steps to come; whose they are, or "none"."""
        options, device = self.options, self.session.device
        if options.predict == "none" or residency == 0:
            return "none"
        file = read_forecasts(Path(options.routing), self.shape.moe.experts)
        said = file.foresight(options.predict, options.horizon)
        arithmetic = "lookahead" if options.predict == "lookahead" else "heads"
        made = made_up_forecaster(self.shape, arithmetic, options.horizon, self.session.dtype, device)
        self.rig.predict(made, spoken(said, file.recording))
        return f"{options.predict}, {options.horizon} ahead"

    def cases(self) -> Iterator[tuple[int, int]]:
        """(context, batch)."""
        return ((context, batch) for context in self.options.contexts for batch in self.options.batches)

    def routing_for(self, residency: float) -> Routing | None:
        """Residency 0 means that nothing is ever there: a routing of its own."""
        return never_again(self.shape, _LEAST_ROUTING) if residency == 0 else self.routing

    @contextmanager
    def sequences(self, context: int, batch: int) -> Iterator[list[KvSequence]]:
        with ExitStack() as stack:
            kvs = []
            for _ in range(batch):
                kvs.append(self.rig.sequence(context))
                stack.callback(kvs[-1].free)
            yield kvs

    def warm_up(self, source: Any, residency: float) -> None:
        with self.sequences(0, 1) as kvs:
            self.rig.decode(source, kvs, self.routing_for(residency), 0, self.options.warmup)

    def time_decode(self, source: Any, residency: float, context: int, batch: int) -> Measured:
        """Warm-up, then the repeats, each from the same context on; the routing goes on from repeat to repeat."""
        options, routing, repeats = self.options, self.routing_for(residency), []
        with self.sequences(context, batch) as kvs:
            for length in _lengths(context, options.tokens):
                self.rig.check(source, kvs, routing, length)
            for kv in kvs:
                kv.truncate(context)
            self.rig.decode(source, kvs, routing, 0, options.warmup)
            before = _counters(source)
            for repeat in range(options.repeats):
                for kv in kvs:
                    kv.truncate(context)
                first = options.warmup + repeat * options.tokens
                repeats.append(self.rig.decode(source, kvs, routing, first, options.tokens))
        driver = self._driver(source, batch)
        return Measured(Times.of(repeats), options.repeats * options.tokens, _spent(source, before), driver)

    def time_prefill(self, source: Any, residency: float) -> Measured:
        """Forward passes over prompts, after one that is not counted. Their experts are of consecutive tokens."""
        tokens, routing, repeats = self.options.prefill, self.routing_for(residency), self.options.repeats
        self.rig.prefill(source, routing, 0, tokens)
        before = _counters(source)
        times = [[self.rig.prefill(source, routing, (1 + repeat) * tokens, tokens)] for repeat in range(repeats)]
        return Measured(Times.of(times), repeats, _spent(source, before), self._driver(source, None))

    def _driver(self, source: Any, batch: int | None) -> str:
        """Who brings experts to a step of so many rows, or (None) to a prompt: as the decoder chooses it."""
        if not self.session.kernels:
            return "cpu"
        if source.resident:
            return "resident"
        if batch is None or not self.rig.graphs:
            return "leased"
        if batch == 1 and source.landing is not None:
            return "direct"
        moe = self.shape.moe
        return "served" if source.serves(min(batch * moe.top_k, moe.experts)) else "leased"

    def active(self, context: int, batch: int, experts_per_layer: float) -> ActiveBytes:
        """On a CPU experts are computed with in the model's dtype, whatever they were packed as."""
        item = self.session.dtype.itemsize
        expert = None if self.session.kernels else self.shape.layout.weights * item
        return active_bytes(self.shape, item, context, batch, experts_per_layer, expert)

    def union(self, batch: int, residency: float = 100.0) -> float:
        """Distinct experts per layer and step; where the model routes, what chance gives."""
        routing = self.routing_for(residency)
        experts, top_k = self.shape.moe.experts, self.shape.moe.top_k
        return routing.union(64, batch) if routing else experts * (1 - (1 - top_k / experts) ** batch)

    def prompt_union(self, residency: float = 100.0) -> float:
        """Distinct experts per layer of one prompt."""
        routing = self.routing_for(residency)
        if routing is None:
            return float(self.shape.moe.experts)
        ids = routing.ids[: self.options.prefill]
        return float(np.mean([len(np.unique(ids[:, layer])) for layer in range(self.shape.layers)]))

    def decode_line(
        self, found: Measured, residency: float, slots: int, context: int, batch: int, **figures: Any
    ) -> Run:  # fmt: skip
        test = f"tg{self.options.tokens}" + (f" @ d{context}" if context else "")
        union = self.union(batch, residency)
        return self._line(test, found, residency, slots, context, batch, batch, union, figures)

    def prefill_line(self, found: Measured, residency: float, slots: int, **figures: Any) -> Run:
        tokens, union = self.options.prefill, self.prompt_union(residency)
        return self._line(f"pp{tokens}", found, residency, slots, 0, 1, tokens, union, figures)

    def _line(
        self, test: str, found: Measured, residency: float, slots: int, context: int, batch: int, tokens: int,
        union: float, figures: dict[str, Any],
    ) -> Run:  # fmt: skip
        routing = self.routing_for(residency)
        return Run(
            test=test, format=self.shape.layout.format.value, residency=residency, slots=slots, context=context,
            batch=batch, routing=routing.name if routing else "model", driver=found.driver, times=found.times,
            active=self.active(context, batch, union), experts_per_layer=union,
            tokens_per_second=1e3 * tokens / found.times.median_ms, hit_rate=found.hit_rate,
            missed_bytes=found.missed_bytes(self.shape.layout.block_bytes), **figures,
        )  # fmt: skip


def _lengths(context: int, tokens: int) -> list[int]:
    """So many tokens before a step that every graph of a run is captured before it is timed: by powers of two."""
    last = context + tokens - 1
    return sorted({context, last, *(1 << n for n in range(last.bit_length()) if context < 1 << n < last)})


def _counters(source: Any) -> LadderCounters | None:
    return source.counters() if hasattr(source, "counters") else None


def _spent(source: Any, before: LadderCounters | None) -> LadderCounters | None:
    now = _counters(source)
    return None if now is None or before is None else now - before
