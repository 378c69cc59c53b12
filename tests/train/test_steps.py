"""The loop of learning: its rate, and a step that is replayed on a GPU."""

import pytest
import torch
from torch import Tensor, nn

from steerpipe.train.fit import Schedule, fit_batches, rate_at
from steerpipe.train.steps import Learner


@pytest.mark.parametrize("steps", [2, 3, 9, 10, 11, 20, 100])
def test_the_rate_rises_once_and_falls_towards_nothing(steps: int) -> None:
    schedule = Schedule(steps, 8, 0.5)
    rates = [rate_at(step, schedule) for step in range(steps)]
    top = rates.index(max(rates))
    assert max(rates) == 0.5 and all(rate > 0 for rate in rates)
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert steps < 20 or rates[-1] < 0.05


def fitted(device: str, steps: int) -> Tensor:
    """A line through points, learnt on `device`."""
    x = torch.linspace(-1, 1, 64, device=device)[:, None]
    network = nn.Linear(1, 1, device=device)
    nn.init.zeros_(network.weight), nn.init.zeros_(network.bias)
    batches = [(x + 0.01 * step, 3 * (x + 0.01 * step) - 1) for step in range(steps)]
    schedule = Schedule(steps, 64, 0.2, weight_decay=0.0)
    fit_batches(
        network.parameters(), batches, lambda given, wanted: (network(given) - wanted).square().mean(), schedule,
        what="line",
    )  # fmt: skip
    return torch.cat([network.weight.detach().flatten(), network.bias.detach()]).cpu()


def test_a_line_is_learnt() -> None:
    torch.testing.assert_close(fitted("cpu", 150), torch.tensor([3.0, -1.0]), atol=0.02, rtol=0)


def test_a_step_is_as_long_as_the_rate_says() -> None:
    weight = nn.Parameter(torch.ones(1))
    learner = Learner([weight], lambda given: (weight * given).sum(), learning_rate=0.5, weight_decay=0.0)
    learner.step((torch.ones(1),), 0.0)
    assert float(weight.detach()) == 1.0
    learner.step((torch.ones(1),), 0.25)
    assert float(weight.detach()) == pytest.approx(0.75)


@pytest.mark.gpu
def test_replayed_steps_learn_what_plain_ones_do() -> None:
    torch.testing.assert_close(fitted("cuda", 40), fitted("cpu", 40), atol=1e-4, rtol=1e-4)
