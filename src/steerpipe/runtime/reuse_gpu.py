"""Eviction by the reuse forecast on a GPU: the forecast is a branch of one row's graph, the policy hears what it says.

Whether it beats LFRU is measured here, in turns of some tokens (predict/trials.py): it is off where it is the slower.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from steerpipe.predict.reuse import ReuseForecast
from steerpipe.predict.trials import Trials, Verdict
from steerpipe.runtime.prediction import settle_policy
from steerpipe.store.policies import Policy, Reuse

if TYPE_CHECKING:
    from steerpipe.model.gpu.decoder import GpuDecoder
    from steerpipe.model.gpu.reuse import ReuseBranch

WARM_TOKENS = 128  # before the first trial: slots fill, and predictors have their own trials
TURN_TOKENS, SETTLE_TOKENS, ROUNDS, REST_TOKENS = 32, 8, 4, 1024
WAYS = ("the reuse forecast", "LFRU")


class ListeningReuse(Reuse):
    """The policy `reuse` and a ReuseListener. At every use it hears what was said since; nothing waits."""

    def __init__(
        self, experts: int, layers: int, half_life_tokens: float, clock: Callable[[], float] = time.perf_counter, *,
        tried: bool = True,
    ) -> None:  # fmt: skip
        """`experts` of `layers` even layers. `tried`: against LFRU; else it is always on."""
        super().__init__(experts, half_life_tokens)
        self.newest: Callable[[], NDArray[np.float32] | None] = lambda: None
        self.disturbed: Callable[[], bool] = lambda: False  # while somebody else is on trial, steps take what he takes
        self.verdict: Verdict | None = None
        self._clock, self._tried = clock, tried
        self._last_layer = experts - experts // layers  # number of its first expert
        self._trials = Trials(
            WAYS, turn_tokens=TURN_TOKENS, settle_tokens=SETTLE_TOKENS, rounds=ROUNDS, first_rest_tokens=REST_TOKENS
        )
        self._steps = 0
        self._listens = False
        self._begun = 0.0
        self._spent: float | None = None  # in the step, up to the last layer's uses; None: they have not come

    @property
    def on(self) -> bool:
        """Whether victims are chosen by the forecast now."""
        return self._trials.way == 0

    def begin(self, *, again: bool) -> bool:
        """The time of the step before, up to its last router: what is done between two steps is not the policy's.

        While ways take turns the branch stays, which costs nothing that can be measured: a graph without it would have
        to be captured in the middle of an answer.
        """
        if self._tried and again and self._spent is not None and self._steps > WARM_TOKENS and not self.disturbed():
            self.verdict = self._trials.observe(self._spent) or self.verdict
        self._steps += 1
        self._spent, self._begun = None, self._clock()
        if not again or not self.on:
            self.forget()
        self._listens = self.on
        return self.on or self._trials.trying

    def forget(self) -> None:
        super().forget()
        self._listens = False

    def touch_many(self, numbers: Sequence[int], now: float) -> None:
        super().touch_many(numbers, now)
        if self._listens and (said := self.newest()) is not None:
            self.expect(said, now)
        if self._spent is None and numbers and numbers[0] >= self._last_layer:
            self._spent = self._clock() - self._begun

    def line(self) -> str | None:
        """What the last trial found; None: there was none yet."""
        if self.verdict is None:
            return None
        own, other = self.verdict.seconds
        found = f"{own * 1e3:.2f} ms per token, LFRU {other * 1e3:.2f}"
        return f"eviction by the reuse forecast: {found}: {'off' if self.verdict.chosen else 'on'}"


def policy_on_gpu(asked: str, forecast: ReuseForecast | None) -> Policy | str:
    """The eviction policy of a source on a GPU. Who asks for reuse by name has it, whether it pays or not."""
    settled = settle_policy(asked, forecast)
    if settled != "reuse" or forecast is None:
        return settled
    config = forecast.config
    return ListeningReuse(config.layers * config.experts, config.layers, config.count_tokens, tried=asked == "auto")


def attach_reuse(decoder: "GpuDecoder", policy: Policy, forecast: ReuseForecast | None) -> None:
    """`decoder` forecasts reuse for a `policy` that listens."""
    if forecast is not None and isinstance(policy, ListeningReuse):
        decoder.reuse = reuse_branch(forecast, policy, decoder.device)


def reuse_branch(forecast: ReuseForecast, policy: ListeningReuse, device: torch.device) -> "ReuseBranch":
    """The forecast as kernels read it; `policy` hears it from now on."""
    from steerpipe.model.gpu.reuse import ReuseBranch, ReuseMap  # Triton: only where there is a GPU

    on_device = forecast.to(device)
    branch = ReuseBranch(
        ReuseMap(
            forecast.config.taps,
            on_device.project.transpose(1, 2).contiguous().half(),
            on_device.offset.half(),
            (on_device.expand / forecast.history).transpose(1, 2).contiguous().half(),
            on_device.bias / forecast.history,
            forecast.config.keeps,
        ),
        device,
        policy,
    )
    policy.newest = branch.newest
    return branch
