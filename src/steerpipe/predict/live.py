"""The sight of a running forward pass: the same predictors, live.

R rows of the step (one per sequence), L MoE layers, k routed experts, E experts, H hidden.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steerpipe.core.errors import PeekError
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.predict.records import Geometry
from steerpipe.predict.sight import Decision, Sight

REMEMBERED_TOKENS = 10  # what the widest window of a predictor looks back


@dataclass(slots=True)
class StepMemory:
    """What one forward pass has brought so far, by MoE layer. It keeps the tensors: nobody may write into them."""

    sequences: tuple[SequenceId, ...]  # of the rows
    tokens: Tensor  # [R]
    experts: dict[int, Tensor] = field(default_factory=dict)  # [R, k]
    weights: dict[int, Tensor] = field(default_factory=dict)  # [R, k]
    entering: dict[int, Tensor] = field(default_factory=dict)  # [R, H], as are those below
    residual: dict[int, Tensor] = field(default_factory=dict)
    shared: dict[int, Tensor] = field(default_factory=dict)


class Memory:
    """The step that runs and the steps before it, newest first. A sequence's rows are found by its name."""

    def __init__(self, geometry: Geometry, remembered_tokens: int = REMEMBERED_TOKENS) -> None:
        self.geometry = geometry
        self._steps: deque[StepMemory] = deque(maxlen=remembered_tokens + 1)

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor) -> StepMemory:
        """A forward pass starts. One that ended early is replaced by its repetition, not remembered as a token."""
        if self._steps and len(self._steps[0].experts) < self.geometry.layers:
            self._steps.popleft()
        self._steps.appendleft(StepMemory(sequences, tokens))
        return self._steps[0]

    def note(self, number: int, probe: RouterProbe) -> None:
        """The router of MoE layer `number` has decided."""
        now = self._steps[0]
        now.residual[number], now.experts[number], now.weights[number] = probe.residual, probe.experts, probe.gates
        if probe.shared is not None:
            now.shared[number] = probe.shared

    def forget(self) -> None:
        self._steps.clear()

    @property
    def now(self) -> StepMemory:
        return self._steps[0]

    def at(self, count: int) -> StepMemory | None:
        """The step so many steps ago."""
        return self._steps[count] if count < len(self._steps) else None

    def back(self, count: int) -> tuple[StepMemory, Tensor, Tensor]:
        """(step, its row for each row of now, whether it has that sequence) so many steps ago."""
        now = self._steps[0]
        device, rows = now.tokens.device, len(now.sequences)
        if count >= len(self._steps):
            return now, torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.bool, device=device)
        then = self._steps[count]
        if then.sequences == now.sequences:
            return then, torch.arange(rows, device=device), torch.ones(rows, dtype=torch.bool, device=device)
        row_of = {sequence: row for row, sequence in enumerate(then.sequences)}
        places = torch.tensor([row_of.get(sequence, 0) for sequence in now.sequences], device=device)
        there = torch.tensor([sequence in row_of for sequence in now.sequences], device=device)
        return then, places, there


class LiveSight(Sight):
    """A Sight whose present is the step that runs. Decisions of the token before are taken in the step before: for
    them (`decision.target < decision.horizon`) the step that runs is that token.
    """

    def __init__(self, memory: Memory, decision: Decision) -> None:
        self.decision = decision
        self.geometry = memory.geometry
        self._memory = memory
        self._shift, self.layer = decision.place(memory.geometry.layers)

    @property
    def rows(self) -> int:
        return len(self._memory.now.sequences)

    @property
    def device(self) -> torch.device:
        return self._memory.now.tokens.device

    def _there(self, back: int) -> Tensor:
        return self._memory.back(self._past(back))[2]

    def _truth(self) -> Tensor:
        raise PeekError("the answer does not exist yet: the model is running", fix="use an oracle on traces alone")

    def _tokens(self, back: int) -> Tensor:
        step, rows, there = self._memory.back(back)
        return step.tokens[rows] * there

    def _experts(self, layer: int, back: int) -> Tensor:
        step, rows, _ = self._memory.back(self._past(back))
        experts = step.experts.get(layer)
        return self._nothing() if experts is None else experts[rows]

    def _weights(self, layer: int, back: int) -> Tensor:
        step, rows, _ = self._memory.back(back)
        weights = step.weights.get(layer)
        return self._nothing().float() if weights is None else weights[rows]

    def _state(self, which: str, layer: int, back: int) -> Tensor:
        step, rows, there = self._memory.back(self._past(back))
        stored: Tensor | None = getattr(step, which).get(layer)
        if stored is None:  # so far back there is nothing
            return torch.zeros(self.rows, self.geometry.hidden, device=self.device)
        return stored[rows].float() * there[:, None]

    def _nothing(self) -> Tensor:
        return torch.zeros(self.rows, self.geometry.top_k, dtype=torch.int64, device=self.device)
