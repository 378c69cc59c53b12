"""A predictor inside one row's graph: at each router it says what the next layers will need, on a branch of its own.

A trained head is a product of low rank beside the target's own router (predict/head.py); without one the router alone
looks ahead. A network of routing history is asked about a later layer, while this one computes.
Legend: L MoE layers, h horizons, n experts that are named, H hidden, E experts, k experts per row, r rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steerpipe.kernels.foretell import Asked, Correction, HeadInputs, foretell, look
from steerpipe.kernels.history import Kept, TransformerKernels
from steerpipe.kernels.linear import row_linear
from steerpipe.model.gpu.apart import Questions, question_seconds
from steerpipe.model.gpu.fetching import NAMED, Fetching
from steerpipe.model.gpu.mailbox import INDEX, Mailbox
from steerpipe.model.gpu.rows import Step
from steerpipe.model.moe import MoeWeights
from steerpipe.model.spec import ModelSpec
from steerpipe.model.weights import ModelWeights

PRIORITY = -2  # of its stream: its few kernels go before all others; the step's own are -1, a shared expert's 0


@dataclass(frozen=True, slots=True)
class Head:
    """A trained head of one horizon, for all target layers, and what makes probabilities of its logits."""

    down: Tensor  # [L, r, D], in the model's dtype, as are those below
    down_bias: Tensor  # [L, r]
    up: Tensor  # [L, E, r]
    up_bias: Tensor  # [L, E]
    scale: Tensor  # [L] fp32
    bias: Tensor  # [L] fp32


@dataclass(frozen=True, slots=True)
class Lookahead:
    """The target's own router on what exists at the decision."""

    scale: Tensor  # [L] fp32
    bias: Tensor  # [L] fp32


@dataclass(frozen=True, slots=True)
class History:
    """ExpertTransformers, one for each target layer, which see the token's routing alone.

    A tap asks about the layer that comes `ahead` layers later and waits for nothing; it says what an earlier one has
    asked about the next layer. What was asked in a step that is not the token before says nothing.
    """

    networks: tuple[TransformerKernels, ...]
    ahead: int = 2
    questions: Questions = field(default_factory=Questions)


@dataclass(frozen=True, slots=True)
class Sighted:
    """What there is at a tap: the layer's router has decided, and its shared expert has run."""

    order: int  # of the MoE layer
    x: Tensor  # [1, H]: after attention
    normed: Tensor  # [1, H]: through the layer's norm
    shared: Tensor | None  # [1, H]
    switch: Tensor | None  # [1, 1]
    experts: Tensor  # [1, k] int32
    gates: Tensor  # [1, k] fp32


@dataclass(frozen=True, slots=True, eq=False)
class Forecaster:
    """Who looks 1, 2 ... layers ahead. `commit`: what is named one layer ahead is computed; its router is not asked.

    `served`: by the host, also where one row could read what it misses, and send for what is named, by itself.
    """

    ways: tuple[Head | Lookahead, ...] | tuple[History]
    commit: bool = False
    served: bool = False

    @property
    def horizon(self) -> int:
        return len(self.ways)

    @property
    def history(self) -> History | None:
        return self.ways[0] if isinstance(self.ways[0], History) else None


@dataclass(slots=True)
class Tap:
    """The branch of one graph. Its buffers stay where they are; `words` row (order, horizon - 1) gets its answer."""

    spec: ModelSpec
    weights: ModelWeights
    forecaster: Forecaster
    dtype: torch.dtype
    device: torch.device
    fetching: Fetching | None = None  # who sends for what is named; None: the host, if anybody
    words: Mailbox = field(init=False)
    forced: Tensor = field(init=False)  # [L, h, n] int32: what is said instead; -1: its own
    _inputs: list[Tensor | None] = field(init=False)  # by horizon: [L, D]
    _answers: list[tuple[Tensor, Tensor]] = field(
        init=False, default_factory=list
    )  # by target: see kernels.history.Kept
    _held: list[Tensor] = field(init=False, default_factory=list)  # until the branch is joined: nobody may write there
    _said: torch.cuda.Event | None = field(init=False, default=None)
    _stream: torch.cuda.Stream | None = field(init=False, default=None)  # on a CPU there is none

    def __post_init__(self) -> None:
        layers, horizon = len(self.spec.moe_layers), self.forecaster.horizon
        self.words = Mailbox(layers * horizon, NAMED, pinned=self.device.type == "cuda")
        self.forced = torch.full((layers, horizon, NAMED), -1, dtype=torch.int32, device=self.device)
        self._inputs = [
            torch.zeros(layers, way.down.shape[2], dtype=self.dtype, device=self.device)
            if isinstance(way, Head) else None
            for way in self.forecaster.ways
        ]  # fmt: skip
        if (history := self.forecaster.history) is not None:
            assert not self.forecaster.commit, "history does not say exactly what is next"
            assert 1 < history.ahead <= layers + 1, "too late, or one answer would take the place of another"
            self._answers = [
                (
                    torch.zeros(1, history.networks[0].experts, dtype=torch.float32, device=self.device),
                    torch.full((2,), -2, dtype=torch.int64, device=self.device),
                )
                for _ in range(layers)
            ]
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device, priority=PRIORITY)
            if history is not None and history.questions.seconds is None:
                history.questions.seconds = question_seconds(history.networks[-1], layers, self.device)

    def decides(self, order: int) -> bool:
        """Whether that layer computes what was named for it."""
        return self.forecaster.commit and order > 0

    def take_decided(self, order: int, stamp: int, finished: Callable[[], bool]) -> list[int]:
        """Waits for what was named for a layer that the tap decides: its experts, ascending."""
        words = self.words.wait((order - 1) * self.forecaster.horizon, stamp, finished)
        top_k = self.spec.moe(self.spec.moe_layers[order]).top_k
        return sorted({word & INDEX for word in words[:top_k]})

    def look(self, seen: Sighted, step: Step) -> None:
        """Queues the tap on its branch, behind what is queued now on the current stream and on the step's side."""
        if self._stream is None:
            self._look(seen, step)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        if seen.shared is not None and step.side is not None and self.forecaster.history is None:
            self._stream.wait_stream(step.side)
        with torch.cuda.stream(self._stream):
            self._look(seen, step)

    def await_said(self) -> None:
        """What is queued from now on comes after what the last tap said of the next layer."""
        if self._said is not None:
            torch.cuda.current_stream().wait_event(self._said)

    def join(self) -> None:
        """The end of a step."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._held.clear()
        self._said = None

    def _look(self, seen: Sighted, step: Step) -> None:
        layers = len(self.spec.moe_layers)
        if (history := self.forecaster.history) is not None:
            self._recall(history, seen.order, step)
            return
        state = torch.empty_like(seen.x)
        self._held += [each for each in (seen.x, seen.normed, seen.shared, seen.switch, state) if each is not None]
        for number, way in enumerate(self.forecaster.ways):
            assert not isinstance(way, History), "it is alone"
            target = (seen.order + number + 1) % layers
            rows = self._inputs[number]
            inputs = None if rows is None else HeadInputs(rows, seen.order, target)
            if inputs is not None or number == 0:
                look(
                    seen.x, seen.shared, seen.switch, seen.normed, seen.experts, seen.gates, state=state, inputs=inputs
                )  # fmt: skip
            self._foretell(number, way, target, seen.order, state, step)
            if number == 0:
                self._mark_said()

    def _recall(self, history: History, order: int, step: Step) -> None:
        """Says what is known of the next layer, then asks about a later one."""
        layers = len(self.spec.moe_layers)
        target, asked = (order + 1) % layers, (order + history.ahead) % layers
        logits, when = self._answers[target]
        ago = -((order + 1 - history.ahead) // layers)  # 1: by a tap of the token before
        self._post(0, target, order, step, logits, asked=Asked(when, ago))
        self._mark_said()
        logits, when = self._answers[asked]
        history.networks[asked].answer(step.experts[:, 0], order, Kept(logits, when, step.stamp, step.positions))

    def _mark_said(self) -> None:
        """What the next layer will need is said."""
        if self._stream is not None:
            self._said = torch.cuda.Event()
            self._said.record(self._stream)
            if self.fetching is not None:
                self.fetching.said = self._said

    def _foretell(
        self, number: int, way: Head | Lookahead, target: int, order: int, state: Tensor, step: Step
    ) -> None:  # fmt: skip
        layer = self.spec.moe_layers[target]
        own, moe = self.weights.layers[layer], self.spec.moe(layer)
        assert isinstance(own.mlp, MoeWeights), "a MoE layer"
        rows, correction = self._inputs[number], None
        logits = state.new_empty(1, moe.experts, dtype=torch.float32)
        quasi = torch.empty_like(state) if rows is None else rows[target : target + 1, : state.shape[1]]
        row_linear(state, own.mlp.router, out=logits, norm=own.mlp_norm, eps=self.spec.norm_eps, normed=quasi)
        if isinstance(way, Head) and rows is not None:
            hidden = state.new_empty(1, way.down.shape[1])
            row_linear(rows[target : target + 1], way.down[target], out=hidden, bias=way.down_bias[target])
            correction = Correction(hidden, way.up[target], way.up_bias[target])
        self._post(number, target, order, step, logits, correction, way)

    def _post(
        self, number: int, target: int, order: int, step: Step, logits: Tensor, correction: Correction | None = None,
        way: Head | Lookahead | None = None, asked: Asked | None = None,
    ) -> None:  # fmt: skip
        """What `logits` [1, E] say of layer `target`; `way`: what makes probabilities of them, unless sigmoids do."""
        moe = self.spec.moe(self.spec.moe_layers[target])
        decided = number == 0 and self.decides(target)
        own = slice(target, target + 1)
        foretell(
            logits, correction, top_k=moe.top_k, renormalise=moe.renormalise,
            scale=None if way is None else way.scale[own], bias=None if way is None else way.bias[own],
            positions=step.positions, stamp=step.stamp,
            words=self.words.words[order * self.forecaster.horizon + number], forced=self.forced[order, number],
            experts=step.experts[target] if decided else None, gates=step.gates[target] if decided else None,
            sending=self.fetching.sending(order) if self.fetching is not None and number == 0 else None, asked=asked,
        )  # fmt: skip
