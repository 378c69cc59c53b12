"""What became of prediction so far, in figures that leave the engine's process."""

from dataclasses import dataclass

from steerpipe.predict.scorecard import Score
from steerpipe.runtime.prediction import Prediction
from steerpipe.transfer.counters import LadderCounters


@dataclass(frozen=True, slots=True)
class GuessedBytes:
    """Blocks that were moved before they were asked for, by predictors, ahead of a prompt's layers or at a start: there
    in time; on their way when their layer came; not used so far."""

    useful: int
    late: int
    wasted: int


@dataclass(frozen=True, slots=True)
class PredictionState:
    """At one moment. `predictor`: whose word counts now; None while nothing is predicted."""

    on: bool
    predictor: str | None
    line: str | None  # the verdict of the last trial, for people
    eviction: str | None  # the same of a policy of eviction that is measured
    beside: str | None  # what a predictor beside the steps takes
    trial_seconds: tuple[tuple[str, float], ...]  # per token, of each way in the last trial
    scores: tuple[tuple[str, Score], ...]  # by predictor
    layers: tuple[tuple[Score, ...], ...]  # of each of them, by layer
    block_bytes: float  # of an expert, on average
    miss_seconds: float | None  # what one waits, on average; None: nobody knows

    def guessed(self, counters: LadderCounters) -> GuessedBytes:
        """What was cut on its way counts as it was moved, the rest by whole blocks."""
        own = counters.prefetch
        unused = max(0, own.transfers - own.hits - own.late)  # one that is late has not arrived yet
        size = self.block_bytes
        wasted = round(unused * size) + own.cancelled_bytes
        return GuessedBytes(round(own.hits * size), round(own.late * size), wasted)


def prediction_state(prediction: Prediction | None) -> PredictionState | None:
    """None: nothing is ever predicted here."""
    steering = None if prediction is None else prediction.steering
    if prediction is None or steering is None:
        return None
    verdict = prediction.verdicts[-1] if prediction.verdicts else None
    card, running = steering.scorecard, steering.predictor if steering.on else None
    return PredictionState(
        on=steering.on,
        predictor=None if running is None else running.name,
        line=prediction.line(),
        eviction=prediction.eviction(),
        beside=prediction.beside(),
        trial_seconds=tuple(zip(verdict.names, verdict.seconds, strict=True)) if verdict else (),
        scores=tuple((name, card.total(name)) for name in card.names),
        layers=tuple(tuple(card.layers(name)) for name in card.names),
        block_bytes=prediction.block_bytes,
        miss_seconds=prediction.miss_seconds(),
    )
