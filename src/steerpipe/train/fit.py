"""The loop that every network learns in: AdamW, one cycle of the learning rate, rows drawn without replacement.

What a network is given is read for many steps at once (a pool): one decision after the other is many small reads, which
take longer than the learning. The same seed gives the same result on a CPU; on a GPU sums differ in their last bits.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from steerpipe.core.errors import ConfigError
from steerpipe.train.progress import Progress, silent
from steerpipe.train.steps import Learner

POOL_STEPS = 16  # without pools a step of nano's heads took 29 ms on an H200


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to learn."""

    steps: int
    rows: int  # of a step
    learning_rate: float
    weight_decay: float = 0.01
    seed: int = 0
    passes: int = 1  # over a pool before the next is read: more where reading takes longer than learning
    half: bool = False  # products in bfloat16: for a GPU, and what does not start at the true router's own logits

    def __post_init__(self) -> None:
        if self.steps < 2 or self.rows < 1:
            raise ConfigError(
                f"{self.steps} steps of {self.rows} rows", fix="ask for at least 2 steps of 1 row: it is training"
            )


def fit(
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[[Tensor], Tensor],
    rows: Tensor,
    schedule: Schedule,
    *,
    what: str,
    progress: Progress = silent,
) -> None:
    """Lowers `loss_of(rows of a step)` in place; for what is quickly read. `rows` [N]: all that may be drawn."""
    batches = batches_of(rows, schedule, lambda drawn: (drawn,), axis=0)
    fit_batches(parameters, batches, loss_of, schedule, what=what, progress=progress)


def fit_batches(
    parameters: Iterable[nn.Parameter],
    batches: Iterable[tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor],
    schedule: Schedule,
    *,
    what: str,
    progress: Progress = silent,
) -> None:
    """Lowers `loss_of(*batch)` in place, over `schedule.steps` batches."""
    learner = Learner(list(parameters), loss_of, schedule.learning_rate, schedule.weight_decay)
    for step, batch in enumerate(batches):
        learner.step(batch, rate_at(step, schedule))
        progress(what, step + 1, schedule.steps)


def rate_at(step: int, schedule: Schedule) -> float:
    """Up for a tenth of the steps, then down to nothing along a cosine."""
    rise = max(1, schedule.steps // 10)
    if step < rise:
        return schedule.learning_rate * (step + 1) / rise
    return schedule.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - rise) / (schedule.steps - rise)))


@torch.no_grad()
def batches_of(
    rows: Tensor, schedule: Schedule, gather: Callable[[Tensor], tuple[Tensor, ...]], *, axis: int
) -> Iterator[tuple[Tensor, ...]]:
    """`schedule.steps` batches of what `gather(rows)` reads; `axis` of it counts the rows."""
    size = min(schedule.rows, len(rows))
    pools = drawn_pools(rows, size, schedule.seed)
    left = schedule.steps
    while left:
        read = gather(next(pools))
        fitting = read[0].shape[axis] // size
        here = min(left, fitting * schedule.passes)
        for step in range(here):
            yield tuple(each.narrow(axis, step % fitting * size, size) for each in read)
        left -= here


def drawn_pools(rows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Pieces of up to POOL_STEPS x size rows, for ever; every row comes once before any comes again, but for the
    remainder that fills no step."""
    generator = torch.Generator(rows.device).manual_seed(seed)
    whole = len(rows) // size * size
    while True:
        order = rows[torch.randperm(len(rows), generator=generator, device=rows.device)]
        yield from order[:whole].split(size * POOL_STEPS)
