"""What `/metrics` says of prediction: whether it runs, what it was worth, and what it cost."""

from collections.abc import Iterator
from dataclasses import asdict

from steerpipe.runtime.prediction_state import PredictionState
from steerpipe.server.exposition import Family, counter, gauge
from steerpipe.transfer.counters import LadderCounters

NAME = "steerpipe_prediction_"


def prediction_families(state: PredictionState, counters: LadderCounters | None) -> Iterator[Family]:
    yield gauge(f"{NAME}on", "1 unless somebody has switched it off.", state.on)
    scores = dict(state.scores)
    running = {name: float(name == state.predictor) for name in ("none", *scores)}
    running["none"] = float(state.predictor is None)
    yield gauge(f"{NAME}running", "Whose word counts now, by the verdict of the last trial.", running, "predictor")
    trial = dict(state.trial_seconds)
    yield gauge(f"{NAME}trial_seconds", "Per token, each way in the last trial.", trial, "predictor")
    missing = {name: float(score.missing) for name, score in scores.items()}
    foreseen = {name: float(score.foreseen) for name, score in scores.items()}
    yield counter(f"{NAME}missing_total", "Routed experts that were not in fast memory when guessed.", missing,
                  "predictor")  # fmt: skip
    yield counter(f"{NAME}foreseen_total", "Of them, those that were named.", foreseen, "predictor")
    recall = {name: score.recall for name, score in scores.items() if score.routed}
    yield gauge(f"{NAME}recall", "Named by routed.", recall, "predictor")
    on_misses = {name: score.recall_on_misses for name, score in scores.items() if score.missing}
    yield gauge(f"{NAME}recall_on_misses", "Foreseen by missing, where it is known what is missing.", on_misses,
                "predictor")  # fmt: skip
    if counters is not None:
        outcomes = asdict(state.guessed(counters))
        yield gauge(
            f"{NAME}bytes", "Moved before it was asked for: in time, late, not used so far.", outcomes, "outcome"
        )
