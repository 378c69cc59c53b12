"""A predictor beside the step, not inside it: a graph of its own on a stream of its own, launched by the host.

A network of routing history reads nothing but routing, which the host knows when a router has posted. So it can run
while the layer does, and its answer is for two layers later. Where it is slower than the layers come, it is asked less
often: never twice at once, and next about the last layer that has come. (An ExpertTransformer whose kernels are ours is
quick enough to be a branch of the step's own graph: `tap.History`.) Legend: L MoE layers, S steps of history,
E experts, k experts per row, n named.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steerpipe.core.blocks import Guessing
from steerpipe.kernels.foretell import foretell
from steerpipe.kernels.history import TransformerKernels
from steerpipe.model.gpu.collection import without_collection
from steerpipe.model.gpu.fetching import NAMED
from steerpipe.model.gpu.mailbox import Mailbox
from steerpipe.model.gpu.steer import Steer

Network = Callable[[Tensor], Tensor] | TransformerKernels  # the first: history [1, S, E] → logits [1, E]


@dataclass(slots=True)
class Questions:
    """How often the host could have asked a predictor, asked it, and was answered before its layer came."""

    possible: int = 0
    asked: int = 0
    in_time: int = 0
    seconds: float | None = None  # what one takes on the device when nothing else runs; None: nobody was asked yet


@dataclass(frozen=True, slots=True, eq=False)
class ApartForecaster:
    """One network for every target layer, `horizon` layers ahead; `steps` layers of routing are shown to it."""

    networks: tuple[Network, ...]
    experts: int
    top_k: int
    steps: int = 10
    horizon: int = 2
    dtype: torch.dtype = torch.bfloat16
    questions: Questions = field(default_factory=Questions)

    def __post_init__(self) -> None:
        window = self.steps, self.experts, self.top_k
        for each in self.networks:
            fits = not isinstance(each, TransformerKernels) or (each.steps, each.experts, each.top_k) == window
            assert fits, f"kernels for another window than {window}"

    @property
    def reads_pinned(self) -> bool:
        """Whether its kernels read the host's memory: a copy before them takes as long as one of them."""
        return all(isinstance(each, TransformerKernels) for each in self.networks)

    def answer(self, routed: Tensor, order: int, *, stamp: Tensor, words: Tensor, forced: Tensor) -> None:
        """Layer `order` has routed: what is said of the layer `horizon` later. See `shown` and kernels/foretell.py."""
        network = self.networks[(order + self.horizon) % len(self.networks)]
        if isinstance(network, TransformerKernels):
            logits = network.answer(routed, order)
        else:
            logits = network(shown(routed, order, self.steps, self.experts, self.dtype)).float()
        foretell(
            logits, None, top_k=self.top_k, renormalise=False, scale=None, bias=None, positions=stamp, stamp=stamp,
            words=words, forced=forced,
        )  # fmt: skip


def shown(routed: Tensor, order: int, steps: int, experts: int, dtype: torch.dtype) -> Tensor:
    """[L, k] experts of the layers of a token, -1 for none → [1, S, E] as predict/window.py has it in training: layer
    `order` and those before it, oldest first, zeros before the first."""
    seen = routed[max(0, order + 1 - steps) : order + 1]  # [s, k]
    hot = torch.zeros(steps, experts + 1, dtype=dtype, device=routed.device)
    hot[steps - len(seen) :].scatter_(1, seen.remainder(experts + 1), 1.0)  # -1: the last column, not shown
    return hot[None, :, :experts]


class Apart:
    """The graphs of such a predictor: one for every layer at which it is asked. One thread."""

    def __init__(self, forecaster: ApartForecaster, device: torch.device) -> None:
        self.forecaster = forecaster
        layers = len(forecaster.networks)
        self.words = Mailbox(layers, NAMED, pinned=True)
        self.forced = torch.full((layers, NAMED), -1, dtype=torch.int32, device=device)
        self._history = torch.full((layers, forecaster.top_k), -1, dtype=torch.int64, pin_memory=True)
        self._stamp = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._here, self._stamped = self._history.to(device), self._stamp.to(device)  # what torch's kernels read
        self._written = self._history.numpy(), self._stamp.numpy()
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._stream_before = torch.cuda.current_stream(device)
        self._done = torch.cuda.Event()
        self._pool = torch.cuda.graph_pool_handle()  # one for all graphs: no two of them ever run at once
        self._graphs = [self._capture(order) for order in range(layers)]
        forecaster.questions.seconds = self.seconds(layers - 1)

    def begin(self) -> None:
        """A step begins, on the stream that is current now: it is looked up once, not at every question.

        A question that is open still may see no history; its answer is not heard.
        """
        self._written[0].fill(-1)
        self._stream_before = torch.cuda.current_stream()

    def show(self, order: int, routed: Sequence[int]) -> None:
        """Layer `order` has routed. A question that is open now does not look at it."""
        self._written[0][order, : len(routed)] = routed

    def ask(self, order: int, stamp: int) -> bool:
        """What comes of it? False: the last question is not answered yet, this one is not asked."""
        if not self._done.query():
            return False
        self._written[1][0] = stamp
        try:
            torch.cuda.set_stream(self._stream)
            self._graphs[order].replay()
        finally:
            torch.cuda.set_stream(self._stream_before)
        self._done.record(self._stream)
        return True

    def seconds(self, order: int) -> float:
        """What one question takes on the device when nothing else runs."""
        return seconds_of(self._graphs[order], self._stream)

    def _capture(self, order: int) -> torch.cuda.CUDAGraph:
        return captured(lambda: self._answer(order), self._stream, self._pool)

    def _answer(self, order: int) -> None:
        if self.forecaster.reads_pinned:
            routed, stamp = self._history, self._stamp
        else:
            routed, stamp = self._here.copy_(self._history, non_blocking=True), self._stamped
            stamp.copy_(self._stamp, non_blocking=True)
        self.forecaster.answer(routed, order, stamp=stamp, words=self.words.words[order], forced=self.forced[order])


def captured(ask: Callable[[], object], stream: torch.cuda.Stream, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A question as a graph; it is asked once before, which compiles its kernels."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ask()
    graph = torch.cuda.CUDAGraph()
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    with without_collection(), capture:
        ask()
    return graph


def seconds_of(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, rounds: int = 50) -> float:
    """What one replay takes on the device when nothing else runs. Waits for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        graph.replay()
        begin.record()
        for _ in range(rounds):
            graph.replay()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / rounds / 1e3


def question_seconds(network: TransformerKernels, layers: int, device: torch.device) -> float:
    """The same, of a network that is asked inside another graph."""
    routed, stream = torch.zeros(layers, network.top_k, dtype=torch.int32, device=device), torch.cuda.Stream(device)
    return seconds_of(captured(lambda: network.answer(routed, layers - 1), stream), stream)


class SteerApart(Steer):
    """As Steer, of a predictor that is asked by the host when a layer has come."""

    def __init__(self, source: Guessing, apart: Apart, layers: Sequence[int]) -> None:
        super().__init__(source, apart.words, layers, 1)
        self.apart = apart
        self._routed: Sequence[int] | None = None  # of the layer that has just come: to be asked about
        self._shown = False  # to whom will be asked
        self._pending: int | None = None  # the layer at which the open question was asked

    def begin(self, stamp: int) -> None:
        """What was said of the next token's first layers is heard still; what is open then is not answered any more."""
        self._hear()
        super().begin(stamp)
        self._routed = self._pending = None
        self.apart.begin()

    def served(self, routed: Sequence[int]) -> None:
        super().served(routed)
        self._routed, self._shown = routed, False

    @property
    def waiting(self) -> bool:
        """Nobody waits for an answer that is of a layer after the next."""
        return False

    def _listen(self) -> bool:
        heard = self._hear()
        if self._routed is not None:
            self._ask(self._served - 1, self._routed)
        return heard

    def _ask(self, order: int, routed: Sequence[int]) -> None:
        """At every look until it is asked, or the next layer has come."""
        questions = self.apart.forecaster.questions
        if not self._shown:
            self.apart.show(order, routed)
            questions.possible, self._shown = questions.possible + 1, True
        if self._pending is None and self.apart.ask(order, self._stamp):
            questions.asked += 1
            self._routed, self._pending = None, order

    def _hear(self) -> bool:
        """Whether the open question was answered, of a layer that has not come."""
        if self._pending is None:
            return False
        words = self._words.look(self._pending, self._stamp)
        if words is None:
            return False
        target = self._pending + self.apart.forecaster.horizon
        self._pending = None
        self._heard(target, words)
        self.apart.forecaster.questions.in_time += target >= self._served
        return target >= self._served
