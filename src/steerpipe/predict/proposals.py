"""Routes that are committed to before their layer comes: a router's word on a state that is not yet there."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.model.moe import Route
from steerpipe.predict.live import LiveSight, Memory
from steerpipe.predict.logits import LogitPredictor
from steerpipe.predict.records import Geometry
from steerpipe.predict.sight import Decision


class CommittedRoutes:
    """A ForwardTap that remembers the pass, and proposes a layer's route from what was there `horizon` layers before.

    R rows, E experts, k of them routed.
    """

    def __init__(
        self,
        predictor: LogitPredictor,
        geometry: Geometry,
        moe_layers: Sequence[int],
        *,
        renormalise: bool,
        horizon: int,
    ) -> None:
        assert horizon in predictor.horizons, f"{predictor.name} does not look {horizon} layers ahead"
        self._predictor = predictor
        self._memory = Memory(geometry)
        self._number = {layer: number for number, layer in enumerate(moe_layers)}
        self._renormalise = renormalise
        self._horizon = horizon

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor, *, decode: bool) -> bool:
        self._memory.begin(sequences, tokens)
        return True

    def entering(self, layer: int, x: Tensor) -> None:
        self._memory.now.entering[self._number[layer]] = x

    def routed(self, probe: RouterProbe) -> None:
        self._memory.note(self._number[probe.layer], probe)

    def end(self) -> None:
        pass

    def propose(self, number: int) -> Route | None:
        """Ids and weights as the target's own router gives them for the expected state; None for the first layers."""
        if number < self._horizon:
            return None
        logits = self._predictor.logits(LiveSight(self._memory, Decision(number, self._horizon)))
        gates, experts = logits.softmax(-1).topk(self._predictor.routers.top_k, dim=-1)
        return Route(experts, self._as_family(gates))

    def weigh(self, number: int, x: Tensor, experts: Tensor) -> Tensor:
        """[R, k]: the true router's weights of `experts`. x: [R, H] as the router is given it."""
        routers = self._predictor.routers
        bias = None if routers.biases is None else routers.biases[number].float()
        probabilities = F.linear(x.float(), routers.weights[number].float(), bias).softmax(-1)
        return self._as_family(probabilities.gather(1, experts))

    def _as_family(self, gates: Tensor) -> Tensor:
        return gates / gates.sum(-1, keepdim=True) if self._renormalise else gates
