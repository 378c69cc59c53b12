"""Prediction at full shape: a predictor's arithmetic with made-up weights, and recorded answers instead of its own.

Legend: T tokens, L MoE layers, h horizons, n experts that are named, E experts, r rank.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from steerpipe.arena.foresight import Foresight, ReuseForesight
from steerpipe.bench.forecasts import NAMED
from steerpipe.bench.shapes import Shape
from steerpipe.predict.trajectory_networks import ExpertTransformer
from steerpipe.predict.window import STEPS
from steerpipe.store.policies import Belady, Reuse
from steerpipe.transfer.recorded import Recording

if TYPE_CHECKING:
    from steerpipe.kernels.history import TransformerKernels
    from steerpipe.model.gpu.apart import ApartForecaster
    from steerpipe.model.gpu.tap import Forecaster

RANK = 256  # of a head: the best that was trained (docs/predictors.md)
_SURE = 0x7FFF  # kernels/foretell.py


def made_up_forecaster(
    shape: Shape, arithmetic: str, horizon: int, dtype: torch.dtype, device: torch.device, *, commit: bool = False,
    served: bool = False,
) -> "Forecaster":  # fmt: skip
    """`arithmetic`: "heads" (low-rank corrections beside the routers) or "lookahead" (the routers alone).

    `commit`, `served`: as Forecaster has them.
    """
    from steerpipe.model.gpu.tap import Forecaster, Head, Lookahead  # Triton

    layers, experts, hidden = shape.layers, shape.moe.experts, shape.spec.hidden
    ones, zeros = torch.ones(layers, device=device), torch.zeros(layers, device=device)
    if arithmetic == "lookahead":
        return Forecaster((Lookahead(ones, zeros),) * horizon, commit, served)
    random = torch.Generator(device).manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device).normal_(0.0, sizes[-1] ** -0.5, generator=random)

    ways = [
        Head(
            drawn(layers, RANK, 2 * hidden + 2 * experts), drawn(layers, RANK), drawn(layers, experts, RANK),
            drawn(layers, experts), ones, zeros,
        )
        for _ in range(horizon)
    ]  # fmt: skip
    return Forecaster(tuple(ways), commit, served)


def made_up_network(
    shape: Shape, arithmetic: str, device: torch.device, *, served: bool = False
) -> "Forecaster | ApartForecaster":
    """The seed's ExpertTransformer at its full size, one for every layer, two layers ahead; weights as initialised.

    `arithmetic`: "history", inside one row's graph (`served`: by the host, also over a source that lands), or
    "transformers", beside the step, where the host serves in any case.
    """
    from steerpipe.model.gpu.apart import ApartForecaster  # Triton
    from steerpipe.model.gpu.tap import Forecaster, History

    networks = _transformers(shape, device)
    if arithmetic == "history":
        return Forecaster((History(networks),), served=served)
    assert arithmetic == "transformers", f"no network is called {arithmetic}"
    return ApartForecaster(networks, shape.moe.experts, shape.moe.top_k)


def _transformers(shape: Shape, device: torch.device) -> "tuple[TransformerKernels, ...]":
    from steerpipe.kernels.history import TransformerKernels  # Triton

    torch.manual_seed(0)
    states = [ExpertTransformer(shape.moe.experts).to(device, torch.bfloat16).state_dict() for _ in range(shape.layers)]
    return tuple(TransformerKernels(each, STEPS, shape.moe.top_k) for each in states)


def held(said: Foresight, horizon: int) -> Foresight:
    """What was said of a layer from as far as `said` goes, as if it were said 1 to `horizon` layers before it."""
    farthest = [-1] * horizon
    return Foresight(said.ranked[farthest], said.probability[farthest])


def spoken(said: Foresight, recording: Recording) -> NDArray[np.int32]:
    """[T, L, h, n]: the words of each token's taps (kernels/foretell.py); probability 0 beyond the end of a text."""
    tokens, layers, horizon = recording.tokens, recording.layers, said.horizon
    words = np.zeros((tokens, layers, horizon, NAMED), dtype=np.int32)
    named = min(NAMED, said.ranked.shape[-1])
    told = (np.round(said.probability * _SURE).astype(np.int32) << 16) | said.ranked  # [h, T, L, m]
    for ahead in range(1, horizon + 1):
        for layer in range(layers):
            later, target = divmod(layer + ahead, layers)
            reached = tokens - later
            same = recording.sequence[later:] == recording.sequence[:reached]
            answer = told[ahead - 1, later:, target, :named] * same[:, None]
            words[:reached, layer, ahead - 1, :named] = answer
    return words


def belady(recording: Recording, before: int) -> Belady:
    """Knows the future of a run that decodes `recording` after `before` other steps."""
    return Belady(recording.all_experts, _uses(recording, before))


def _uses(recording: Recording, before: int) -> Iterator[tuple[int, float]]:
    for token, rows in enumerate(recording.routing.tolist()):
        for layer, experts in enumerate(rows):
            yield from ((layer * recording.experts + each, float(before + 1 + token)) for each in experts)


class ToldReuse(Reuse):
    """The policy `reuse`, told what was recorded when the uses of a tap's layer have come: the scores are given, what
    they are added to is not."""

    def __init__(self, recording: Recording, scores: ReuseForesight, before: int) -> None:
        """As `belady`: the first token comes after `before` other steps."""
        super().__init__(recording.all_experts, scores.half_life_tokens)
        self._scores, self._first, self._per_layer = scores, before + 1, recording.experts

    def touch_many(self, numbers: Sequence[int], now: float) -> None:
        super().touch_many(numbers, now)
        said = self._scores.at(int(now) - self._first, numbers[0] // self._per_layer) if numbers else None
        if said is not None:
            self.expect(said, now)
