import pytest
import torch
from torch import Tensor

from steerpipe.arena.causality import check_causal, scrambled
from steerpipe.core.errors import PeekError
from steerpipe.predict.sight import Decision, Sight
from tests.arena.traces import GEOMETRY, Successor, draw, packed


class AsksForTheTruth(Successor):
    name = "asks for the truth"

    def probabilities(self, sight: Sight) -> Tensor:
        return sight.truth()


class ReachesAround(Successor):
    name = "reaches around"

    def probabilities(self, sight: Sight) -> Tensor:
        assert sight._trace.states is not None
        return torch.sigmoid(sight._trace.states.residual[sight._rows, sight.decision.target]).repeat(1, 2)


class ReadsTheNextToken(Successor):
    """The last row of a trace has no next one: there it reads what everybody may."""

    name = "reads the next token"

    def probabilities(self, sight: Sight) -> Tensor:
        following = (sight._rows + 1) % sight._trace.rows
        return sight._trace.routed(following, sight.decision.target)


class ReadsTheNextRow(Successor):
    """Of those that it is asked for at once: nothing that a sight would refuse."""

    name = "reads the next row"

    def probabilities(self, sight: Sight) -> Tensor:
        return sight.hot(0).roll(-1, dims=0)


@pytest.mark.parametrize("peeker", [AsksForTheTruth(), ReachesAround(), ReadsTheNextToken(), ReadsTheNextRow()])
def test_whoever_uses_the_future_is_named(peeker: Successor) -> None:
    trace = packed(draw(states=True))
    with pytest.raises(PeekError, match=peeker.name):
        check_causal(peeker, trace, Decision(2, 1))


@pytest.mark.parametrize("target", range(GEOMETRY.layers))
@pytest.mark.parametrize("horizon", [1, 2])
def test_an_honest_predictor_passes(target: int, horizon: int) -> None:
    check_causal(Successor(), packed(draw(states=True)), Decision(target, horizon))


def test_a_text_of_one_token_has_no_middle_and_is_still_looked_at() -> None:
    trace = packed(draw(prompts=1, tokens=1, states=True))
    check_causal(Successor(), trace, Decision(2, 1))
    with pytest.raises(PeekError, match="asks for the truth"):
        check_causal(AsksForTheTruth(), trace, Decision(2, 1))


@pytest.mark.parametrize("decision", [Decision(2, 0), Decision(2, 1), Decision(1, 2)])
def test_everything_that_a_sight_shows_is_left_as_it_was(decision: Decision) -> None:
    """And nothing else: what a sight refuses to show is all noise."""
    trace = packed(draw(states=True))
    row = torch.tensor([trace.rows - 1])
    real, noisy = (Sight(each, row, decision) for each in (trace, scrambled(trace, trace.rows - 1, decision, 0)))
    for layer in range(GEOMETRY.layers):
        for what in ("hot", "gates", "residual", "shared", "entering"):
            for back in (0, 1):
                try:
                    shown = getattr(real, what)(layer, back)
                except PeekError:
                    continue
                assert torch.equal(shown, getattr(noisy, what)(layer, back)), (what, layer, back)
    assert torch.equal(real.tokens(), noisy.tokens())
    assert not torch.equal(real.truth(), noisy.truth())
