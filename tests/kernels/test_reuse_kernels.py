"""The arithmetic of a reuse forecast at a tap, against the forecast itself."""

import numpy as np
import torch

from steerpipe.kernels.linear import row_linear
from steerpipe.kernels.reuse import recall, tell
from steerpipe.predict.reuse import LiveReuse, ReuseConfig, ReuseForecast

LAYERS, EXPERTS, HIDDEN, RANK = 3, 15, 20, 6
ALL = LAYERS * EXPERTS  # no multiple of a program's tile


def forecast() -> ReuseForecast:
    torch.manual_seed(1)
    config = ReuseConfig(LAYERS, EXPERTS, HIDDEN, (0, 2), context_tokens=3.0, count_tokens=32.0, horizon_tokens=12.0)
    return ReuseForecast(
        config, torch.randn(2, 2 * HIDDEN, RANK), torch.randn(2, RANK), torch.randn(1, RANK, ALL), torch.randn(2, ALL),
        0.5,
    )  # fmt: skip


def scores_of(words: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(words.numpy().astype(np.uint32).view(np.float32))


def test_what_is_told_is_what_the_forecast_says_along_a_text() -> None:
    made = forecast()
    live, context, turn = LiveReuse(made), torch.zeros(2, HIDDEN), torch.zeros(1, dtype=torch.int64)
    inputs, hidden, words = torch.zeros(1, 2 * HIDDEN), torch.zeros(1, RANK), torch.zeros(ALL, dtype=torch.int64)
    here = torch.tensor([7])
    for token in range(1, 5):
        for tap, layer in enumerate(made.config.taps):
            x = 5.0 * torch.randn(1, HIDDEN)
            recall(
                x, context=context[tap], inputs=inputs, positions=here, turn=turn, kept=made.config.keeps,
                first=tap == 0,
            )  # fmt: skip
            row_linear(inputs, made.project[tap].T.contiguous(), out=hidden, bias=made.offset[tap])
            expand = (made.expand[0] / made.history).T.contiguous()
            tell(hidden, expand, made.bias[tap] / made.history, positions=here, turn=turn, words=words)
            expected = live.at(layer, x)
            assert expected is not None
            assert set((words >> 32).tolist()) == {token}
            torch.testing.assert_close(scores_of(words), expected, atol=1e-4, rtol=1e-4)


def test_a_row_that_is_not_there_leaves_no_trace() -> None:
    context, turn, nobody = torch.ones(HIDDEN), torch.tensor([3]), torch.tensor([-1])
    inputs, words = torch.zeros(1, 2 * HIDDEN), torch.full((ALL,), -5)
    recall(
        torch.randn(1, HIDDEN), context=context, inputs=inputs, positions=nobody, turn=turn, kept=0.5, first=True
    )  # fmt: skip
    tell(torch.randn(1, RANK), torch.randn(ALL, RANK), torch.randn(ALL), positions=nobody, turn=turn, words=words)
    assert (context == 1).all() and turn.item() == 3 and (words == -5).all()
