"""What a predictor may see: a horizon is defined by what exists when the decision is taken.

Horizon h >= 1 for layer t: the router of layer d = t - h has just decided. There are the residual of layer d (and of
every layer before it), its routing and gates, the shared expert's output of layer d, but no output of its routed
experts, so nothing that enters layer d + 1. With d < 0 the decision is taken at layer L + d of the token before, and
the token itself is not known yet.
Horizon 0 (pre-attention): layer t is about to begin. There is what enters layer t, and everything of layers before it.
Of earlier tokens of the same sequence everything is there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from steerpipe.core.errors import InputError, PeekError
from steerpipe.predict.records import PackedTrace


@dataclass(frozen=True, slots=True)
class Decision:
    """Which experts will layer `target` route to, asked `horizon` layers before?"""

    target: int
    horizon: int

    def place(self, layers: int) -> tuple[int, int]:
        """(tokens back, layer) where the decision is taken."""
        back, layer = divmod(self.target - self.horizon, layers)
        return -back, layer


class Sight:
    """The past of R rows as it stands at one decision. Asking for what does not exist yet is a PeekError.

    `back` counts tokens before the one in which the decision is taken; rows without such a token give zeros.
    """

    def __init__(self, trace: PackedTrace, rows: Tensor, decision: Decision) -> None:
        """`rows` [R]: the tokens whose routing at `decision.target` is asked for; see `rows_for`."""
        self.decision = decision
        self.geometry = trace.geometry
        self._trace = trace
        self._shift, self.layer = decision.place(trace.geometry.layers)
        assert bool((trace.place[rows] >= self._shift).all()), "a row has no token in which the decision could be taken"
        self._rows = rows - self._shift

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def crosses(self) -> bool:
        """The decision is taken in the token before: the token to be routed is not known."""
        return self._shift > 0

    @property
    def device(self) -> torch.device:
        return self._trace.device

    def tokens(self, back: int = 0) -> Tensor:
        """[R] ids; 0 where there is none so far back."""
        return self._tokens(self._past(back))

    def experts(self, layer: int) -> Tensor:
        """[R, k] in rank order, of the token in which the decision is taken."""
        self._check(layer, 0, entering=False)
        return self._experts(layer, 0)

    def hot(self, layer: int, back: int = 0) -> Tensor:
        """[R, E] fp32: 1 for each routed expert."""
        self._check(layer, back, entering=False)
        return self._spread(self._experts(layer, back), self._there(back)[:, None].float())

    def gates(self, layer: int, back: int = 0) -> Tensor:
        """[R, E] fp32: the router's weight of each routed expert, 0 for the others."""
        self._check(layer, back, entering=False)
        return self._spread(self._experts(layer, back), self._weights(layer, back) * self._there(back)[:, None])

    def residual(self, layer: int, back: int = 0) -> Tensor:
        """[R, H] fp32, after the attention of `layer`, before the norm in front of its MoE."""
        self._check(layer, back, entering=False)
        return self._state("residual", layer, back)

    def shared(self, layer: int, back: int = 0) -> Tensor:
        """[R, H] fp32: output of the shared expert of `layer`."""
        self._check(layer, back, entering=False)
        return self._state("shared", layer, back)

    def entering(self, layer: int, back: int = 0) -> Tensor:
        """[R, H] fp32: the residual stream before the attention of `layer`."""
        self._check(layer, back, entering=True)
        return self._state("entering", layer, back)

    def truth(self) -> Tensor:
        """[R, E] fp32: the answer. For the oracle alone: whoever else asks for it predicts nothing."""
        return self._truth()

    def _check(self, layer: int, back: int, *, entering: bool) -> None:
        first_unseen = self.layer + (1 if self.decision.horizon or entering else 0)
        if back == 0 and layer >= first_unseen:
            raise PeekError(
                f"layer {layer} does not exist yet when layer {self.decision.target} is predicted at horizon "
                f"{self.decision.horizon}",
                fix=f"ask for layers below {first_unseen}, or for an earlier token with back=1",
            )

    def _spread(self, experts: Tensor, values: Tensor) -> Tensor:
        """[R, k] numbers and [R, k] or [R, 1] values → [R, E]."""
        hot = torch.zeros(len(experts), self.geometry.experts, device=self.device)
        return hot.scatter_(1, experts, values.expand(experts.shape))

    # --- where the past is read: a LiveSight reads a running forward pass instead

    def _past(self, back: int) -> int:
        if back < 0:
            raise PeekError(f"{-back} tokens ahead of the decision", fix="`back` counts tokens into the past")
        return back

    def _there(self, back: int) -> Tensor:
        """[R] bool: the sequence has a token so far back."""
        return self._trace.place[self._rows] >= self._past(back)

    def _at(self, back: int) -> Tensor:
        """[R]: rows of the trace; where there is none so far back, some row of the same sequence."""
        return torch.where(self._there(back), self._rows - back, self._rows)

    def _truth(self) -> Tensor:
        return self._trace.routed(self._rows + self._shift, self.decision.target)

    def _tokens(self, back: int) -> Tensor:
        return self._trace.tokens[self._at(back)] * self._there(back)

    def _experts(self, layer: int, back: int) -> Tensor:
        return self._trace.experts[self._at(back), layer].long()

    def _weights(self, layer: int, back: int) -> Tensor:
        if self._trace.weights is None:
            raise InputError("this trace has no router weights", fix="trace with weights, or give model and prompts")
        return self._trace.weights[self._at(back), layer].float()

    def _state(self, which: str, layer: int, back: int) -> Tensor:
        stored = None if self._trace.states is None else getattr(self._trace.states, which)
        if stored is None:
            raise InputError(f"this trace has no {which} states", fix="trace with states, or give model and prompts")
        taken: Tensor = stored[self._at(back), layer].float() * self._there(back)[:, None]
        return taken


def rows_for(trace: PackedTrace, decision: Decision) -> Tensor:
    """[R]: every row that has a token in which `decision` could be taken."""
    back, _ = decision.place(trace.geometry.layers)
    return torch.nonzero(trace.place >= back).flatten()
