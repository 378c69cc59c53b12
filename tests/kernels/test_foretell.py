"""A predictor's arithmetic at a tap, against torch and against the predictors themselves."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from steerpipe.kernels.foretell import SURE, Asked, Correction, HeadInputs, foretell, look
from steerpipe.predict.calibration import margins

HIDDEN, EXPERTS, TOP_K, NAMED = 24, 10, 3, 8
ONE, HALF = torch.tensor([1.0]), torch.tensor([0.5])


def told(
    logits: Tensor, correction: Correction | None = None, *, position: int = 4, stamp: int = 7,
    forced: Tensor | None = None, scale: Tensor = ONE, bias: Tensor = HALF, renormalise: bool = False,
    asked: Asked | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Words, experts and gates."""
    words = torch.zeros(NAMED, dtype=torch.int64)
    experts, gates = torch.full((1, TOP_K), -7, dtype=torch.int32), torch.full((1, TOP_K), torch.nan)
    foretell(
        logits, correction, top_k=TOP_K, renormalise=renormalise, scale=scale, bias=bias,
        positions=torch.tensor([position]), stamp=torch.tensor([stamp]), words=words, forced=forced, experts=experts,
        gates=gates, asked=asked,
    )  # fmt: skip
    return words, experts, gates


def parts(words: Tensor) -> tuple[list[int], list[int], Tensor]:
    """Stamps, experts, probabilities."""
    return (words >> 32).tolist(), (words & 0xFFFF).tolist(), (words >> 16 & 0x7FFF).float() / SURE


def test_the_likeliest_are_named_with_the_calibrated_probabilities() -> None:
    logits = torch.randn(1, EXPERTS)
    scale, bias = torch.tensor([1.7]), torch.tensor([-0.2])
    words, experts, gates = told(logits, scale=scale, bias=bias)
    stamps, named, likely = parts(words)
    expected = torch.sigmoid(1.7 * margins(logits, TOP_K) - 0.2)[0]
    assert stamps == [7] * NAMED
    assert named == logits[0].argsort(descending=True, stable=True)[:NAMED].tolist()
    torch.testing.assert_close(likely, expected[named], atol=2 / SURE, rtol=0)
    assert experts[0].tolist() == named[:TOP_K]
    torch.testing.assert_close(gates[0], logits[0].softmax(0)[named[:TOP_K]])


def test_a_head_corrects_the_router() -> None:
    logits, hidden = torch.randn(1, EXPERTS), torch.randn(1, 5)
    up, up_bias = torch.randn(EXPERTS, 5), torch.randn(EXPERTS)
    words, _, gates = told(logits, Correction(hidden, up, up_bias), renormalise=True)
    corrected = logits + F.silu(hidden) @ up.T + up_bias
    _, named, _ = parts(words)
    assert named == corrected[0].argsort(descending=True, stable=True)[:NAMED].tolist()
    chosen = corrected[0].softmax(0)[named[:TOP_K]]
    torch.testing.assert_close(gates[0], chosen / chosen.sum())


def test_what_is_forced_is_said_instead() -> None:
    forced = torch.full((NAMED,), -1, dtype=torch.int32)
    forced[0], forced[2] = (5 << 16) | 9, 4
    words, experts, _ = told(torch.arange(EXPERTS).float()[None], forced=forced)
    _, named, likely = parts(words)
    assert named == [9, 8, 4, 6, 5, 4, 3, 2]
    assert round(float(likely[0]) * SURE) == 5 and likely[2] == 0
    assert experts.tolist() == [[9, 8, 4]]


def test_a_row_that_is_not_there_says_nothing_and_chooses_nobody() -> None:
    words, experts, gates = told(torch.randn(1, EXPERTS), position=-1)
    stamps, _, likely = parts(words)
    assert stamps == [7] * NAMED and not likely.any()
    assert experts.tolist() == [[-1] * TOP_K] and not gates.any()


@pytest.mark.parametrize(
    ("when", "ago", "fresh"),
    [
        ([7, 4], 0, True),
        ([6, 3], 1, True),
        ([6, 4], 1, False),
        ([5, 3], 1, False),
        ([7, 4], 1, False),
        ([6, 3], 0, False),
    ],
)
def test_what_was_asked_for_another_token_says_nothing(when: list[int], ago: int, fresh: bool) -> None:
    words, _, _ = told(torch.randn(1, EXPERTS), asked=Asked(torch.tensor(when), ago))
    stamps, _, likely = parts(words)
    assert stamps == [7] * NAMED and bool(likely.any()) == fresh


def test_what_was_asked_before_there_was_a_step_says_nothing_to_the_first_one() -> None:
    """A capture is run before, at stamp 0 and position -1."""
    for position, fresh in ((-1, False), (0, True)):
        asked = Asked(torch.tensor([0, position]), 1)
        words, _, _ = told(torch.randn(1, EXPERTS), position=position + 1, stamp=1, asked=asked)
        assert bool(parts(words)[2].any()) == fresh


@pytest.mark.parametrize("shared", [False, True])
def test_a_look_gathers_what_exists_at_a_tap(shared: bool) -> None:
    x, value, normed = (torch.randn(1, HIDDEN) for _ in range(3))
    switch = torch.tensor([[0.3]])
    experts, gates = torch.tensor([[7, 0, 4]], dtype=torch.int32), torch.tensor([[0.5, 0.2, 0.1]])
    rows = torch.full((3, 2 * HIDDEN + 2 * EXPERTS), torch.nan)
    state = torch.empty_like(x)
    given = (value, switch) if shared else (None, None)
    look(x, *given, normed, experts, gates, state=state, inputs=HeadInputs(rows, own=1, target=2))
    torch.testing.assert_close(state, x + torch.sigmoid(switch) * value if shared else x)
    hot = torch.zeros(EXPERTS)
    hot[experts[0].long()] = 1.0
    weighted = torch.zeros(EXPERTS)
    weighted[experts[0].long()] = gates[0]
    assert torch.equal(rows[2, HIDDEN : HIDDEN + EXPERTS], weighted)
    assert torch.equal(rows[1, HIDDEN + EXPERTS : HIDDEN + 2 * EXPERTS], hot)
    assert torch.equal(rows[1, HIDDEN + 2 * EXPERTS :], normed[0])
    assert rows[0].isnan().all() and rows[2, :HIDDEN].isnan().all(), "nothing else is written"
