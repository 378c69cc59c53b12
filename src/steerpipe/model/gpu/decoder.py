"""The decoder on a GPU: captured graphs for decode, leases in waves for everything else.

Same contract as model/decoder.Decoder, over raw blocks instead of compute-ready experts. On a CPU, under Triton's
interpreter, all but the graphs works: that is how it is tested without a GPU. Legend: R rows, V valid rows, L MoE
layers, k experts per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.blocks import BlockSource
from steerpipe.core.events import RoutingRecord
from steerpipe.core.protocols import ForwardTap, RoutingSink
from steerpipe.model.gpu.branches import Predictor
from steerpipe.model.gpu.clock import Clock
from steerpipe.model.gpu.experts import Direct, Leased
from steerpipe.model.gpu.graph import StepGraphs
from steerpipe.model.gpu.limits import check_model
from steerpipe.model.gpu.lossy import Watched, watched
from steerpipe.model.gpu.network import Network
from steerpipe.model.gpu.predicted import PredictedStep
from steerpipe.model.gpu.reuse import ReuseBranch
from steerpipe.model.gpu.rows import Packing, Pass, Picked, Step, passes, routing_buffer
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.misses import MissDesk
from steerpipe.model.spec import ModelSpec
from steerpipe.model.step import StepRows
from steerpipe.model.weights import ModelWeights

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Routing:
    """What all MoE layers chose for the valid rows of one pass, on the host."""

    experts: NDArray[np.int64]  # [L, V, k]
    gates: NDArray[np.float32]  # [L, V, k]


class GpuDecoder:
    """Computes logits; owns no sequence state. One thread at a time.

    A decode step whose experts the source can serve is one graph. Its first use for a number of rows (1 or 16) and a
    context length (by powers of two) captures it, which takes a moment.
    """

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, pool: KvPool, device: torch.device, *, max_batch: int,
        tap: ForwardTap | None = None, misses: MissDesk | None = None,
    ) -> None:  # fmt: skip
        """`pool` holds the KV blocks of all sequences to come; `max_batch` sequences at most decode together.

        `tap` and `misses` as those of `model.decoder.Decoder`: a pass in which one has a say is no graph.
        """
        check_model(spec, device)
        assert pool.dtype == weights.embed.dtype, f"KV blocks are {pool.dtype}, weights {weights.embed.dtype}"
        self.spec = spec
        self.device = device
        self.forced: Tensor | None = None  # [L, R, k] int32: experts of every step to come (-1: the router's)
        self.forecaster: Predictor | None = None  # who predicts in the steps of one row to come
        self.replays = 0  # steps of one row that were graphs, so far
        self.noted: Callable[[PredictedStep], None] | None = None  # who is told what came of predicted steps
        self.clock: Clock | None = None  # who writes down when the parts of captured steps ran
        self.guess_clock: Clock | None = None  # who writes down when blocks came that they had sent for by themselves
        self.said: Tensor | None = None  # [L, h, n] int32: what it says in every step to come, instead of its own
        self.graphs = device.type == "cuda"  # off: single launches, and leases where not all is resident
        self.tap, self.misses = tap, misses  # of every pass to come
        self.reuse: ReuseBranch | None = None  # who forecasts reuse in the steps of one row to come
        self._dtype = weights.embed.dtype
        self._max_batch = max_batch
        self._top_k = max((spec.moe(layer).top_k for layer in spec.moe_layers), default=1)  # the same for all
        self._most_experts = max((spec.moe(layer).experts for layer in spec.moe_layers), default=0)  # of a layer
        self._network = Network(spec, weights, pool, device)
        self._captured: dict[int, StepGraphs] = {}
        self._captured_over: BlockSource | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def rows_device(self) -> torch.device:
        """Where StepRows are best made: they are packed on the host and sent in one copy."""
        return CPU

    @torch.inference_mode()
    def forward(
        self, rows: StepRows, experts: BlockSource, wanted: Sequence[int], sink: RoutingSink | None = None
    ) -> Tensor:
        """Logits [len(wanted), vocab], fp32, of the valid rows `wanted` (indices into `rows.valid`)."""
        assert len(rows.units) <= self._max_batch or rows.units[0].rows > 1, f"a batch of {len(rows.units)} rows"
        logits: list[Tensor] = []
        routing: list[_Routing] = []
        first = 0  # valid rows of earlier passes
        assert len(rows.ids) == rows.cell or list(wanted) == sorted(wanted), "wanted rows come in order"
        for part in passes(rows):
            own = [index - first for index in wanted if first <= index < first + len(part.valid)]
            sequences = rows.sequences[first : first + len(part.valid)]
            watch = None
            if self.misses is not None or self.tap is not None:
                watch = watched(
                    self.misses, self.tap, experts, part, sequences, self.device, decode=rows.decode
                )  # fmt: skip
            found, chosen = self._compute(part, experts, own, sink is not None, watch)
            logits.append(found)
            routing.extend(chosen)
            first += len(part.valid)
        if sink is not None:
            self._publish(rows, routing, sink)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def tell_predicted(self) -> None:
        """Tells of the last step, if somebody predicted in it and it was not told yet. Between steps."""
        graphs = self._captured.get(1)
        if self.noted is None or graphs is None:
            return
        step = graphs.take_predicted()
        if step is not None:
            self.noted(step)

    def _compute(
        self, rows: Pass, source: BlockSource, wanted: Sequence[int], publish: bool, watch: Watched | None
    ) -> tuple[Tensor, list[_Routing]]:
        places = rows.valid[list(wanted)]  # rows of the pass
        forced = self.forced
        assert forced is None or forced.shape[1:] == (rows.rows, self._top_k), f"forced is not for {rows.rows} rows"
        self.tell_predicted()  # before the eviction's trial looks at the clock
        reuse = self.reuse if self.reuse is not None and self.reuse.enter(rows) else None
        if watch is None and self._served(rows, source):
            served = self._graphs_of(rows.rows, source).run(rows, places, forced, self.said, reuse, self.forecaster)
            self.replays += rows.rows == 1
            picked, chosen, gates = served.logits, served.experts, served.gates
        else:
            step = self._eager_step(rows, watch, reuse)
            leased = not source.resident  # else nothing is read back, and the host runs ahead of the device
            experts = Leased(source, rows.valid, rows.keep_rows, self.device) if leased else Direct(source)
            picked = self._head(self._network.hidden(step, watch or experts), rows, places)
            chosen, gates = step.experts, step.gates
        return picked, [_read_routing(rows, chosen, gates)] if publish else []

    def _served(self, rows: Pass, source: BlockSource) -> bool:
        """Whether this pass is a graph: experts that are missing come while it runs."""
        if not self.graphs or rows.base is not None:
            return False
        if source.resident or (rows.rows == 1 and source.landing is not None):
            return True
        return source.serves(min(len(rows.valid) * self._top_k, self._most_experts))

    def _graphs_of(self, rows: int, source: BlockSource) -> StepGraphs:
        if self._captured_over is not source:  # a graph holds the addresses of one source's tables
            if self._captured:
                torch.cuda.synchronize(self.device)  # a router may still write into a mailbox that goes with its graph
            self._captured = {}
            self._captured_over = source
        if rows not in self._captured:
            self._captured[rows] = StepGraphs(self._network, source, rows, self.device, self.clock, self.guess_clock)
        return self._captured[rows]

    def _eager_step(self, rows: Pass, watch: Watched | None, reuse: ReuseBranch | None = None) -> Step:
        packing = Packing.of(rows)
        words = np.zeros(packing.words, dtype=np.int64)
        packing.write(rows, 0, words)
        stamp, tokens, positions, turns, blocks = packing.views(torch.from_numpy(words).to(self.device))
        layers = len(self.spec.moe_layers)
        return Step(
            stamp, tokens, positions, turns, blocks,
            routing_buffer(layers, rows.rows, self._top_k, torch.int32, self.device),
            routing_buffer(layers, rows.rows, self._top_k, torch.float32, self.device),
            base=rows.base, room=rows.keys,
            forced=None if self.forced is None else self.forced.to(self.device),
            clock=None if watch is None else self.clock, watch=watch, reuse=reuse,
        )  # fmt: skip

    def _head(self, x: Tensor, rows: Pass, places: NDArray[np.int64]) -> Tensor:
        if not len(places):
            return x.new_empty(0, self.spec.vocab, dtype=torch.float32)
        if rows.base is None:  # the whole cell: a row's bits must not depend on who else is wanted
            return self._pick(self._network.head(x), places)
        return self._network.head(self._pick(x, places))

    def _pick(self, x: Tensor, places: NDArray[np.int64]) -> Tensor:
        """A copy of some rows."""
        picked = Picked(x, places)
        picked.queue()
        return picked.rows

    def _publish(self, rows: StepRows, routing: Sequence[_Routing], sink: RoutingSink) -> None:
        positions = np.array(rows.at)[rows.real.start : rows.real.stop]
        for order, layer in enumerate(self.spec.moe_layers):
            sink.observe(
                RoutingRecord(
                    layer=layer,
                    sequences=rows.sequences,
                    positions=positions,
                    experts=np.concatenate([part.experts[order] for part in routing]),
                    weights=np.concatenate([part.gates[order] for part in routing]),
                )
            )


def _read_routing(rows: Pass, experts: Tensor, gates: Tensor) -> _Routing:
    """Waits for the device."""
    return _Routing(experts.cpu().numpy()[:, rows.valid].astype(np.int64), gates.cpu().numpy()[:, rows.valid])
