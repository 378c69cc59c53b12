"""Prediction in the running engine: a tap in the forward pass that asks predictors and moves experts.

At every router of a decode step a predictor says what the next layers will need; the plan says what of it is worth the
link's idle time; the source moves it. The first tokens run without: they show what prediction could save at most, and
who costs more than that is not even tried. The others are tried, and what does not pay is off (`predict.trials`).
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.events import Forecast
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.predict.live import Memory
from steerpipe.predict.protocol import RoutingPredictor
from steerpipe.predict.quick import quick_of
from steerpipe.predict.records import Geometry
from steerpipe.predict.scorecard import Scorecard
from steerpipe.predict.trials import FIRST_REST_TOKENS, LONGEST_REST_TOKENS, WATCH_TOKENS, Trials, Verdict, Watch
from steerpipe.transfer.plan import Plan, PlanLimits, plan

LEAST_PROBABILITY = 0.2
COST_SAMPLES = 3  # the quickest counts: the others were disturbed
SMOOTHING = 0.05  # of the running mean of a layer's compute
DEEPEST = 3  # layers ahead: beyond that replay finds under 1.5 points
MAY_BE_LATE = 0.25  # of a layer: so little of a block is not worth another horizon


class Steerable(Protocol):
    """An expert source whose experts come and go."""

    def steer(self, plan: Plan) -> None: ...

    def ready(self, layer: int) -> NDArray[np.bool_]: ...

    @property
    def block_seconds(self) -> float: ...

    @property
    def waited_seconds(self) -> float: ...


class Steering:
    """A ForwardTap. One thread, the engine's; one step at a time."""

    def __init__(
        self, predictors: Sequence[RoutingPredictor], geometry: Geometry, moe_layers: Sequence[int], source: Steerable,
        *, most_guesses: int, trials: Trials | None = None, report: Callable[[Verdict], None] | None = None,
        past: Verdict | None = None,
    ) -> None:  # fmt: skip
        """`moe_layers`: decoder layers with experts, in order; predictors and forecasts number them from 0.
        `trials` of all predictors; None: begun when the first tokens have shown that prediction could pay, or by what
        was found in the `past`, if that was of these predictors.
        """
        self.scorecard = Scorecard(geometry.layers)
        self._predictors = tuple(predictors)
        self._quick = {each.name: quick_of(each) for each in predictors}
        self._trials = trials
        self._tried = self._predictors  # those whom the trials name, in their order
        self._watch = Watch()
        self._rest = 0  # tokens until the next watch
        self._declined: str | None = None  # why nobody was tried after the last one
        self._next_rest = FIRST_REST_TOKENS
        self.past = past if trials is None and self._begin_as(past) else None
        self._report = report
        self._source = source
        self._layers = tuple(moe_layers)
        self._number = {layer: number for number, layer in enumerate(moe_layers)}
        self._memory = Memory(geometry)
        self._most = most_guesses
        self._layer_seconds = 0.0
        self._began = self._mark = self._waited = self._waited_before = 0.0
        self._said: dict[int, _Said] = {}  # by MoE layer
        self._on = True

    def _begin_as(self, past: Verdict | None) -> bool:
        """As it was chosen then, until the next trial; False: that was among others."""
        known = {each.name: each for each in self._predictors}
        if past is None or not set(past.names[1:]) <= known.keys():
            return False
        if past.chosen:  # the next trial is of all of them: who was not tried then may pay by now
            names = ["none", *known]
            self._trials = Trials(names, chosen=names.index(past.names[past.chosen]))
        else:
            self._rest = FIRST_REST_TOKENS
        return True

    @property
    def predictor(self) -> RoutingPredictor | None:
        """Whose word counts for the token that runs."""
        way = 0 if self._trials is None else self._trials.way
        return self._tried[way - 1] if way else None

    @property
    def on(self) -> bool:
        return self._on

    def standing(self) -> str:
        """What there is to say while no trial has ended."""
        if self.past is not None and (self._rest or (self._trials is not None and not self._trials.trying)):
            return self.past.line_of_the_past()
        if self._trials is None:
            watched = f"watched for {self._watch.tokens} of {WATCH_TOKENS} tokens"
            return self._declined or f"prediction: none yet, {watched}"
        if not self._trials.trying:
            return f"prediction by {self._tried[0].name}: on, as asked for"
        names = " and ".join(each.name for each in self._tried)
        return f"prediction: {names}, tried for {self._trials.tried} of {self._trials.tried + self._trials.left} tokens"

    def switch(self, on: bool) -> None:
        """Between steps. Off: nothing is predicted or moved ahead; guesses on their way are cut."""
        self._on = on
        if not on:
            self._source.steer(Plan((), ()))
            self._said.clear()

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor, *, decode: bool) -> bool:
        """Prompts stream their layers by themselves: only decode steps are watched."""
        if not decode or not self._on:
            return False
        self._memory.begin(sequences, tokens)
        self._began = self._mark = time.perf_counter()
        self._waited = self._waited_before = self._source.waited_seconds
        return True

    def entering(self, layer: int, x: Tensor) -> None:
        self._memory.now.entering[self._number[layer]] = x

    def routed(self, probe: RouterProbe) -> None:
        number = self._number[probe.layer]
        self._memory.note(number, probe)
        self._measure()
        predictor = self.predictor
        if predictor is None:
            return
        self._settle(predictor, number, probe.experts)
        self._source.steer(self._plan(predictor, number))

    def end(self) -> None:
        """Tells the trial what the token took; a predictor that is switched off takes its guesses with it."""
        seconds, waited = time.perf_counter() - self._began, self._source.waited_seconds - self._waited_before
        if self._trials is None:
            self._look(seconds, waited)
            return
        verdict = self._trials.observe(seconds)
        if verdict is not None and self._report is not None:
            self._report(verdict)
        if self.predictor is None:
            self._source.steer(Plan((), ()))
            self._said.clear()

    def _look(self, seconds: float, waited: float) -> None:
        """Without a trial: watches a few tokens, and begins one if somebody could pay."""
        if self._rest:
            self._rest -= 1
        elif self._watch.observe(seconds, waited):
            costs = [self._cost(each) for each in self._predictors]
            pays = [self._watch.promises(cost) for cost in costs]
            self._tried = tuple(each for each, could in zip(self._predictors, pays, strict=True) if could)
            if self._tried:
                self._trials = Trials(["none", *(each.name for each in self._tried)])
            else:
                self._declined = (
                    f"prediction is off: it would take {min(costs) * 1e3:.2f} ms per token or more and save "
                    f"{self._watch.possible * 1e3:.2f} at most"
                )
            self._rest, self._watch = self._next_rest, Watch()
            self._next_rest = min(2 * self._next_rest, LONGEST_REST_TOKENS)

    def _cost(self, predictor: RoutingPredictor) -> float:
        """Seconds that a predictor takes per token, as measured now, on the token that has just run."""
        layers, horizons = len(self._layers), self._horizons(predictor)
        quick, best = self._quick[predictor.name], math.inf
        for _ in range(COST_SAMPLES):
            begin = time.perf_counter()
            for horizon in horizons:
                quick.probabilities(self._memory, layers - 1, horizon)
            best = min(best, time.perf_counter() - begin)
        return best * layers

    def _measure(self) -> None:
        """Keeps the running mean of what a layer computes, without what it waited."""
        now, waited = time.perf_counter(), self._source.waited_seconds
        computed = max(0.0, now - self._mark - (waited - self._waited))
        self._layer_seconds += (SMOOTHING if self._layer_seconds else 1.0) * (computed - self._layer_seconds)
        self._mark, self._waited = now, waited

    def _horizons(self, predictor: RoutingPredictor) -> list[int]:
        """As many layers ahead as a block takes: one that comes within a layer is early enough with one, and every
        horizon takes its time."""
        known = sorted(each for each in predictor.horizons if each)
        wanted = DEEPEST
        if self._layer_seconds:
            wanted = min(DEEPEST, math.ceil(self._source.block_seconds / self._layer_seconds - MAY_BE_LATE))
        return [each for each in known if each <= wanted] or known[:1]

    def _plan(self, predictor: RoutingPredictor, number: int) -> Plan:
        now = time.perf_counter()
        forecasts, ready = [], []
        for horizon in self._horizons(predictor):
            target = (number + horizon) % len(self._layers)
            likely = self._quick[predictor.name].probabilities(self._memory, number, horizon)  # [R, E]
            any_row = 1 - (1 - likely).prod(axis=0) if len(likely) > 1 else likely[0]
            forecasts.append(Forecast(self._layers[target], any_row, now + horizon * self._layer_seconds))
            ready.append(self._source.ready(self._layers[target]))
        limits = PlanLimits(self._source.block_seconds, self._most, LEAST_PROBABILITY)
        made = plan(forecasts, ready, limits, now)
        self._remember(forecasts, ready, made)
        return made

    def _remember(self, forecasts: Sequence[Forecast], ready: Sequence[NDArray[np.bool_]], made: Plan) -> None:
        for forecast, there in zip(forecasts, ready, strict=True):
            said = self._said.setdefault(self._number[forecast.layer], _Said(there))
            said.probability = forecast.probability
        for guess in made.send:
            self._said[self._number[guess.expert.layer]].sent[guess.expert.expert] = True

    def _settle(self, predictor: RoutingPredictor, number: int, experts: Tensor) -> None:
        """The layer has come: what was said about it is held against what it routes to."""
        said = self._said.pop(number, None)
        if said is None:
            return
        routed = np.unique(experts.numpy()) if len(experts) > 1 else experts[0].numpy()  # a row's are all different
        named = np.argsort(-said.probability, kind="stable")[: len(routed)]
        ready = self._source.ready(self._layers[number])
        self.scorecard.settle(
            predictor.name, number, routed=routed, named=named, absent=said.absent, sent=said.sent, ready=ready
        )


class _Said:
    """What a predictor has said about one layer of the token that runs."""

    __slots__ = ("absent", "probability", "sent")

    def __init__(self, ready: NDArray[np.bool_]) -> None:
        """`ready` when it was first asked."""
        self.absent = ~ready
        self.sent = np.zeros(len(ready), dtype=np.bool_)
        self.probability: NDArray[np.float32] = np.zeros(len(ready), dtype=np.float32)
