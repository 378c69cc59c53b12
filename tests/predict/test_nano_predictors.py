"""The predictors that ship with nano: small enough, of its shape, and better than its own routers on text of ours."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from steerpipe.arena.evaluation import evaluate
from steerpipe.predict.files import load
from steerpipe.predict.head import ResidualHead
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.records import PackedTrace
from steerpipe.predict.routers import Routers
from steerpipe.predict.shipped import ASSETS, ShippedPredictors, for_model
from steerpipe.trace.live import TokenSequence
from steerpipe.trace.models import load_model
from steerpipe.train.material import collect
from steerpipe.train.models import check_routers, routers_of_model

TEXT = "Do you like dogs? I do, they are my favourite.\n" + Path(__file__).read_text()


@dataclass(frozen=True)
class Nano:
    trace: PackedTrace
    routers: Routers
    shipped: ShippedPredictors


@pytest.fixture(scope="module")
def nano() -> Nano:
    loaded = load_model(None)
    tokens = loaded.codec.encode_part(TEXT)[:300]
    trace = collect(loaded.model, [TokenSequence("ours", tokens, len(tokens))])
    shipped = for_model(ASSETS / "nano")
    assert shipped is not None
    return Nano(trace, routers_of_model(loaded.model), shipped)


def test_they_take_at_most_three_megabytes() -> None:
    folder = ASSETS / "predictors" / "nano"
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= 3_000_000


def test_what_is_guessed_from_typing_takes_at_most_three_megabytes() -> None:
    files = (ASSETS / "ngram.npz", ASSETS / "predictors" / "nano" / "openings.npz")
    assert sum(file.stat().st_size for file in files) <= 3_000_000


def test_the_routers_are_nanos(nano: Nano) -> None:
    assert check_routers(nano.routers, nano.trace) > 0.98


def test_every_head_beats_the_routers(nano: Nano) -> None:
    assert set(nano.shipped.heads()) == {0, 1, 2, 3}
    lookahead = load(nano.shipped.files["lookahead"], nano.routers)
    assert isinstance(lookahead, RouterLookahead) and lookahead.defaults is not None
    for horizon, file in nano.shipped.heads().items():
        head = load(file, nano.routers)
        assert isinstance(head, ResidualHead) and head.training is not None and head.training.tokens > 1_000_000
        ours, theirs = (evaluate(each, nano.trace, horizon).overall() for each in (head, lookahead))
        assert ours.recall > theirs.recall + 0.02, f"{horizon} ahead: {ours.recall:.3f}, lookahead {theirs.recall:.3f}"
        assert ours.calibration_error < 0.02
