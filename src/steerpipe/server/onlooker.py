"""Looks at the engine for those who look at the page. Costs a step nothing while nobody does."""

import time

from steerpipe.runtime.pipeline import Pipeline
from steerpipe.runtime.prediction_state import PredictionState, prediction_state
from steerpipe.runtime.view import LastStep, draw_map

_WATCH_SECONDS = 2.0  # routing is noted for so long after the last look


class Onlooker:
    """In the engine's process, between its steps."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._last = LastStep()
        self._until: float | None = None  # routing is noted; None: it is not

    def watch(self) -> None:
        """Somebody looks at the map: from the next step on it shows who is used."""
        if self._until is None:
            self._pipe.engine.publish_routing(self._last)
        self._until = time.monotonic() + _WATCH_SECONDS

    def rest(self) -> None:
        """Called between steps: ends what `watch` began when nobody looks any more."""
        if self._until is not None and time.monotonic() > self._until:
            self._until = None
            self._pipe.engine.publish_routing(None)
            self._last.clear()

    def map(self) -> tuple[str, ...]:
        return draw_map(self._pipe.spec, self._pipe.experts, self._last)

    def prediction(self) -> PredictionState | None:
        return prediction_state(self._pipe.prediction)

    def switch(self, on: bool) -> None:
        prediction = self._pipe.prediction
        if prediction is not None and prediction.steering is not None:
            prediction.steering.switch(on)
