"""Routes that are committed to before their layer comes: a router's word on a state that is not yet there."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.model.moe import Route
from steerpipe.predict.live import LiveSight, Memory
from steerpipe.predict.logits import LogitPredictor
from steerpipe.predict.records import Geometry
from steerpipe.predict.sight import Decision, Sight


class CommittedRoutes:
    """A ForwardTap that remembers the pass, and says the route of a layer when the one `horizon` before it has routed.

    R rows, E experts, k of them routed.
    """

    def __init__(
        self, predictors: Mapping[int, LogitPredictor], geometry: Geometry, moe_layers: Sequence[int], *,
        renormalise: bool, horizon: int, send: Callable[[int, Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        """`predictors` of the layers that are committed to, numbered from 0. `send`: told the layer and [R, k] experts
        as soon as they are known.
        """
        for predictor in predictors.values():
            assert horizon in predictor.horizons, f"{predictor.name} does not look {horizon} layers ahead"
        self._predictors = predictors
        self._memory = Memory(geometry)
        self._number = {layer: number for number, layer in enumerate(moe_layers)}
        self._layers = tuple(moe_layers)
        self._renormalise = renormalise
        self._horizon = horizon
        self._send = send
        self._said: dict[int, Route] = {}

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor, *, decode: bool) -> bool:
        """Prompts are exact: only decode steps are remembered."""
        self._said.clear()
        if decode:
            self._memory.begin(sequences, tokens)
        return decode

    def entering(self, layer: int, x: Tensor) -> None:
        self._memory.now.entering[self._number[layer]] = x

    def routed(self, probe: RouterProbe) -> None:
        number = self._number[probe.layer]
        self._memory.note(number, probe)
        target = number + self._horizon
        predictor = self._predictors.get(target)
        if predictor is None:
            return
        logits = predictor.logits(self._sight(Decision(target, self._horizon)))
        gates, experts = logits.softmax(-1).topk(predictor.routers.top_k, dim=-1)
        self._said[target] = Route(experts, self._as_family(gates))
        if self._send is not None:
            self._send(self._layers[target], experts)

    def end(self) -> None:
        pass

    def propose(self, number: int) -> Route | None:
        """Ids and weights as the target's own router gives them for the expected state; None for the first layers."""
        return self._said.get(number)

    def weigh(self, number: int, x: Tensor, experts: Tensor) -> Tensor:
        """[R, k]: the true router's weights of `experts`. x: [R, H] as the router is given it."""
        routers = self._predictors[number].routers
        probabilities = routers.logits(number, x.float()).softmax(-1)
        return self._as_family(probabilities.gather(1, experts))

    def _sight(self, decision: Decision) -> Sight:
        return LiveSight(self._memory, decision)

    def _as_family(self, gates: Tensor) -> Tensor:
        return gates / gates.sum(-1, keepdim=True) if self._renormalise else gates
