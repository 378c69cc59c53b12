"""Who may predict in the graphs of one row: each has a branch of them, and one of them, or nobody, speaks in a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from steerpipe.core.blocks import BlockSource, Guessing, GuessLanding
from steerpipe.model.gpu.apart import Apart, ApartForecaster, SteerApart
from steerpipe.model.gpu.clock import Clock
from steerpipe.model.gpu.direct import ReadThrough, sends_by_itself
from steerpipe.model.gpu.experts import Held
from steerpipe.model.gpu.fetching import Fetching
from steerpipe.model.gpu.network import ExpertRun, Network
from steerpipe.model.gpu.steer import Steer
from steerpipe.model.gpu.tap import Forecaster, Tap
from steerpipe.model.gpu.timed import TimedFetching

Predictor = Forecaster | ApartForecaster


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """What one predictor has in the graphs of one row."""

    number: int
    forecaster: Predictor
    run: ExpertRun  # of its steps
    tap: Tap | None = None
    steer: Steer | None = None
    fetching: Fetching | None = None  # the same for all

    @property
    def resting(self) -> bool:
        """Whether nobody predicts in the next step: who is throttled rests, and costs nothing."""
        if self.steer is not None:
            return self.steer.resting
        return self.fetching is not None and self.fetching.slots.resting

    @property
    def named(self) -> tuple[Tensor, int]:
        """What it says [L, n] of the nearest layer that it speaks of, and how many layers ahead that is."""
        if self.tap is not None:
            return self.tap.words.words[:: self.tap.forecaster.horizon], 1
        assert isinstance(self.steer, SteerApart), "who has no tap is asked by the host"
        return self.steer.apart.words.words, self.steer.apart.forecaster.horizon

    def say(self, said: Tensor) -> None:
        """`said` [L, h, n] instead of what it finds itself."""
        if self.tap is not None:
            self.tap.forced.copy_(said[:, : self.tap.forecaster.horizon], non_blocking=True)
        elif isinstance(self.steer, SteerApart):
            self.steer.apart.forced.copy_(said[:, -1], non_blocking=True)


class Branches:
    """Of one StepGraphs of one row. A branch is made when its predictor first speaks, and kept."""

    def __init__(
        self, network: Network, source: BlockSource, stamp: Tensor, top_k: int, device: torch.device,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """`stamp` [1]: of the step; `clock`: who writes down when what was sent for came."""
        self._network, self._source, self._stamp, self._top_k, self._device = network, source, stamp, top_k, device
        self._clock = clock
        self._all: dict[Predictor, Branch | None] = {}
        self._last: Branch | None = None  # of the step before
        self.fetching: Fetching | None = None  # None: nobody has sent for anything by itself

    def of(self, predictor: Predictor | None) -> Branch | None:
        """None: nobody predicts, or nobody could over this source."""
        if predictor is None or self._source.resident:
            return None
        if predictor not in self._all:
            self._all[predictor] = self._make(predictor, len(self._all))
        return self._all[predictor]

    def turn_to(self, branch: Branch | None) -> None:
        """Between two steps. What the host sent for is given up where nobody speaks to it any more."""
        if branch is not self._last and isinstance(self._source, Guessing):
            if self._last is not None and self._last.steer is not None and (branch is None or branch.steer is None):
                self._source.expect(())
            if branch is not None:
                self._source.attend(branch.number)
        self._last = branch

    def _make(self, predictor: Predictor, number: int) -> Branch | None:
        source, layers = self._source, self._network.spec.moe_layers
        if source.landing is not None and not (isinstance(predictor, ApartForecaster) or predictor.served):
            guesses, ahead = sends_by_itself(source.landing, predictor)
            if self.fetching is None:
                self.fetching = self._fetch_into(guesses)
            run = ReadThrough(source, source.landing, self._top_k, self._device, self.fetching)
            return Branch(number, predictor, run, self._network.tap(ahead, self.fetching), fetching=self.fetching)
        held = Held(source, self._top_k, self._device)
        if isinstance(predictor, ApartForecaster):
            if not isinstance(source, Guessing):
                return None
            return Branch(number, predictor, held, steer=SteerApart(source, Apart(predictor, self._device), layers))
        assert not predictor.commit or source.serves(2 * self._top_k), "two layers that overlap do not fit the slots"
        tap, steer = self._network.tap(predictor), None
        if isinstance(source, Guessing) and not predictor.commit:
            steer = Steer(source, tap.words, layers, predictor.horizon)
        return Branch(number, predictor, held, tap, steer)

    def _fetch_into(self, slots: GuessLanding) -> Fetching:
        layers = self._network.spec.moe_layers
        tables, forms = [self._source.table(layer) for layer in layers], [self._source.form(each) for each in layers]
        if self._clock is None:
            return Fetching(slots, tables, forms, layers, self._top_k, self._stamp)
        return TimedFetching(slots, tables, forms, layers, self._top_k, self._stamp, self._clock)
