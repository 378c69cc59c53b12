"""Prediction on a GPU, as far as the host decides it: who speaks in the next step of one row, and whether it pays.

Predictors are branches of captured graphs, and the throttle of the transfer lets who is wrong rest. Which of them is
quickest here, or whether nobody is, is found out by taking turns (`predict.trials`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from steerpipe.predict.scorecard import Scorecard
from steerpipe.predict.trials import Trials, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from steerpipe.core.blocks import BlockSource
    from steerpipe.core.protocols import RoutingSink
    from steerpipe.model.spec import ModelSpec
    from steerpipe.model.step import StepRows

FIRST_REST_TOKENS = 512  # between two trials; the policy of eviction has its own, and waits while one is on


@dataclass(frozen=True, slots=True)
class Speaker:
    """A predictor that graphs can carry."""

    name: str
    predictor: Any  # model.gpu.branches.Predictor


class Scores(Protocol):
    """Who counts what became of predicted steps."""

    @property
    def card(self) -> Scorecard:
        """Of all steps so far."""
        ...


class Choice:
    """Says who predicts in the next step of one row, and is told what it took. One thread, the engine's."""

    def __init__(
        self, speakers: Sequence[Speaker], scores: Scores, report: Callable[[Verdict], None],
        trials: Trials | None = None, past: Verdict | None = None,
    ) -> None:  # fmt: skip
        """`trials`: of nobody and of the speakers, in this order. `past`: how they ended in an earlier run."""
        names = ("none", *(each.name for each in speakers))
        self.past = past if trials is None and past is not None and past.names == names else None
        chosen = None if self.past is None else self.past.chosen
        self.trials = trials or Trials(names, first_rest_tokens=FIRST_REST_TOKENS, chosen=chosen)
        self._speakers = tuple(speakers)
        self._scores, self._report = scores, report
        self._on = True
        self._steps = 0

    @property
    def predictor(self) -> Speaker | None:
        """Who speaks in the next step."""
        way = self.trials.way if self._on else 0
        return self._speakers[way - 1] if way else None

    @property
    def on(self) -> bool:
        return self._on

    def switch(self, on: bool) -> None:
        """Between steps. Off: nobody speaks, and nothing is tried."""
        self._on = on

    @property
    def scorecard(self) -> Scorecard:
        return self._scores.card

    @property
    def timed(self) -> bool:
        """Whether it counts what the next step takes."""
        return self._on and self.trials.trying

    def observe(self, seconds: float) -> None:
        """A step of one row took so long; what it took does not count unless it was `timed`."""
        if not self._on:
            return
        self._steps += 1
        verdict = self.trials.observe(seconds)
        if verdict is not None:
            self._report(verdict)

    def standing(self) -> str | None:
        """Before the first verdict."""
        if not self._on:
            return "prediction: switched off"
        if self.past is not None and not self.trials.trying:
            return self.past.line_of_the_past()
        if not self._steps:
            return "prediction: none yet; on a GPU it is for answers decoded one at a time (serve --max-batch 1)"
        if not self.trials.trying:
            return f"prediction by {self._speakers[0].name}: on, as asked for"
        names = " and ".join(each.name for each in self._speakers)
        return f"prediction: {names}, tried for {self._steps} of {self._steps + self.trials.left} tokens"


class Replaying(Protocol):
    """A decoder whose steps of one row are graphs: `model.gpu.decoder.GpuDecoder`."""

    forecaster: Any  # who predicts in the steps of one row to come

    @property
    def spec(self) -> "ModelSpec": ...

    @property
    def rows_device(self) -> torch.device: ...

    @property
    def replays(self) -> int:
        """Steps of one row that were graphs, so far."""
        ...

    def forward(
        self, rows: "StepRows", experts: "BlockSource", wanted: Sequence[int], sink: "RoutingSink | None" = None
    ) -> "Tensor": ...


class PredictingDecoder:
    """A StepDecoder: another one, in whose steps of one row somebody predicts."""

    def __init__(
        self, decoder: Replaying, choice: Choice, wait: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`wait`: until the step has been computed; copies for the next one may go on."""
        wait = wait or (lambda: torch.cuda.current_stream().synchronize())
        self._decoder, self._choice, self._wait, self._clock = decoder, choice, wait, clock

    @property
    def spec(self) -> "ModelSpec":
        return self._decoder.spec

    @property
    def rows_device(self) -> torch.device:
        return self._decoder.rows_device

    @property
    def trying(self) -> bool:
        """Whether predictors are on trial in the next step."""
        return self._choice.timed

    def forward(
        self, rows: "StepRows", experts: "BlockSource", wanted: Sequence[int], sink: "RoutingSink | None" = None
    ) -> "Tensor":
        """See StepDecoder. A step that counts is waited for, as whoever reads its logits would."""
        decoder, choice = self._decoder, self._choice
        before, speaker = decoder.replays, choice.predictor
        decoder.forecaster = None if speaker is None else speaker.predictor
        began = self._clock()
        logits = decoder.forward(rows, experts, wanted, sink)
        if decoder.replays > before:
            if choice.timed:
                self._wait()
            choice.observe(self._clock() - began)
        return logits
