"""Router lookahead: the target's own norm and router, applied to the best state that exists at the decision.

With d the decision layer and t the target, r the residual of d, before its MoE:

    q = Norm_t(r + shared_d + sum over the routed experts e of g_e · default(d, e))        logits = Router_t(q)

with the shared expert's exact output where it is asked for (the family must have one), and the default vectors where
they are given. At horizon 0 the state that enters t takes the place of the sum. L layers, E experts, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from steerpipe.predict.calibration import Calibration, uncalibrated
from steerpipe.predict.logits import LogitPredictor, restore_calibration
from steerpipe.predict.protocol import Cost
from steerpipe.predict.routers import Routers
from steerpipe.predict.sight import Sight
from steerpipe.predict.stored import needed


@dataclass(frozen=True, slots=True)
class DefaultVectors:
    """default(l, e): mean unweighted output of expert e over the tokens routed to it; see train.defaults."""

    vectors: Tensor  # [L, E, H]
    counts: Tensor  # [L, E] int64: tokens behind each; 0: the layer's mean stands in

    @classmethod
    def of_sums(cls, sums: Tensor, counts: Tensor) -> Self:
        """Sums [L, E, H] over `counts` [L, E] tokens → means; unseen experts take their layer's."""
        layer_mean = sums.sum(1) / counts.sum(1).clamp_min(1)[:, None]  # [L, H]
        own = sums / counts.clamp_min(1)[..., None]
        return cls(torch.where((counts > 0)[..., None], own, layer_mean[:, None]), counts)


def quasi_state(sight: Sight, *, shared: bool, defaults: DefaultVectors | None) -> Tensor:
    """[R, H] fp32: what enters the layer after the decision's, as far as it is known."""
    if sight.decision.horizon == 0:
        return sight.entering(sight.layer)
    state = sight.residual(sight.layer)
    if shared:
        state = state + sight.shared(sight.layer)
    if defaults is not None:
        state = state + sight.gates(sight.layer) @ defaults.vectors[sight.layer].float()
    return state


class RouterLookahead(LogitPredictor):
    kind = "lookahead"

    def __init__(
        self,
        routers: Routers,
        *,
        shared: bool,
        defaults: DefaultVectors | None = None,
        horizons: Sequence[int] = (0, 1, 2, 3),
        calibration: Calibration | None = None,
    ) -> None:
        self.routers = routers
        self.shared = shared
        self.defaults = defaults
        self.horizons = tuple(horizons)
        self.calibration = calibration or uncalibrated(len(self.horizons), routers.layers)

    @property
    def name(self) -> str:
        return "lookahead" + (" + defaults" if self.defaults else "") + (" + shared" if self.shared else "")

    def logits(self, sight: Sight) -> Tensor:
        target = sight.decision.target
        state = quasi_state(sight, shared=self.shared, defaults=self.defaults)
        return self.routers.logits(target, self.routers.normed(target, state))

    def cost(self) -> Cost:
        """The routers are the model's; the shared expert's output exists anyway."""
        added = self.routers.top_k * self.routers.hidden if self.defaults else 0
        return Cost(self.parameters(), self.routers.experts * self.routers.hidden + added)

    def config(self) -> dict[str, Any]:
        return {"shared": self.shared, "defaults": self.defaults is not None, "horizons": list(self.horizons)}

    def tensors(self) -> dict[str, Tensor]:
        if self.defaults is None:
            return self.calibration_tensors()
        return self.calibration_tensors() | {"vectors": self.defaults.vectors, "counts": self.defaults.counts}

    @classmethod
    def restore(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], routers: Routers | None) -> Self:
        return cls(
            needed(routers, cls.kind),
            shared=config["shared"],
            defaults=DefaultVectors(tensors["vectors"], tensors["counts"]) if config["defaults"] else None,
            horizons=config["horizons"],
            calibration=restore_calibration(tensors),
        )
