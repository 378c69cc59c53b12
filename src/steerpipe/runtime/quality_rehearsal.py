"""What a plan would do to a text, without an answer being written: the text is fed in, and what a cache would lack is
substituted. The first tokens are the prompt and exact; the others are computed together, a layer at a time, each with
the misses that it would have had.

T tokens of a text, P of its prompt, M of the others, L MoE layers, k routed experts, E experts, H hidden.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.ids import ExpertId, SequenceId
from steerpipe.core.protocols import ExpertSource, ForwardTap, RouterProbe
from steerpipe.core.quality import OF_A_LAYER, MissPolicy, QualityPlan, Substituted
from steerpipe.model.decoder import Decoder
from steerpipe.model.kv_cache import KvPool, KvSequence
from steerpipe.model.moe import expert_ffn
from steerpipe.model.spec import ModelSpec
from steerpipe.model.step import prefill_rows
from steerpipe.model.weights import ModelWeights
from steerpipe.predict.live import LiveSight, Memory
from steerpipe.predict.logits import LogitPredictor
from steerpipe.predict.proposals import CommittedRoutes
from steerpipe.predict.records import Geometry
from steerpipe.predict.sight import Decision, Sight
from steerpipe.runtime.substitutes import Substitutes
from steerpipe.runtime.taps import Taps
from steerpipe.store.policies import Lfru

Output = Callable[[ExpertId, Tensor], Tensor]  # x [n, H] → [n, H]
PROMPT_TOKENS = 32
CPU = torch.device("cpu")
_ID = SequenceId(0)


class CacheOnPaper:
    """An LFRU cache of so many experts of a model, told of routing alone."""

    def __init__(self, layers: int, experts: int, slots: int) -> None:
        self._shape = (layers, experts)
        self._slots = slots
        self._policy = Lfru(layers * experts)
        self._there: NDArray[np.bool_] = np.zeros(layers * experts, dtype=np.bool_)
        self._now = 0

    def copy(self) -> "CacheOnPaper":
        """Another one that goes on from here."""
        return copy.deepcopy(self)

    def follow(self, routing: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[T, L, k] → [T, L, E]: who is there when each layer of each token has routed."""
        layers, experts = self._shape
        seen = np.empty((len(routing), layers, experts), dtype=np.bool_)
        for token, row in enumerate(routing):
            self._now += 1
            for layer in range(layers):
                own = slice(layer * experts, (layer + 1) * experts)
                seen[token, layer] = self._there[own]
                self._use(row[layer] + layer * experts)
        return seen

    def _use(self, numbers: NDArray[np.int64]) -> None:
        self._policy.touch_many(numbers.tolist(), self._now)
        self._there[numbers] = True
        excess = int(self._there.sum()) - self._slots
        if excess > 0:
            others = self._there.copy()
            others[numbers] = False
            self._there[self._policy.victims(np.flatnonzero(others), excess, self._now)] = False


@dataclass
class _Watched:
    """A ForwardTap that keeps routing and residuals of one pass."""

    experts: list[NDArray[np.int64]] = field(default_factory=list)
    residuals: list[Tensor] = field(default_factory=list)

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor, *, decode: bool) -> bool:
        return True

    def entering(self, layer: int, x: Tensor) -> None: ...

    def routed(self, probe: RouterProbe) -> None:
        self.experts.append(probe.experts.cpu().numpy())
        self.residuals.append(probe.residual)

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Exact:
    """A text as the exact model has it."""

    tokens: Sequence[int]
    prompt_tokens: int  # P
    prompt: KvSequence
    log_probabilities: Tensor  # [M, vocab] fp32
    residuals: Tensor  # [L, T, H]
    routing: NDArray[np.int64]  # [T, L, k]
    there: NDArray[np.bool_]  # [T, L, E]


class OnPaper:
    """A Shelf for the tokens of a text after its prompt. What was missed has come so many layers later.

    Also a ForwardTap: it has to know which layer runs.
    """

    def __init__(self, there: NDArray[np.bool_], output: Output, moe_layers: Sequence[int], late: int) -> None:
        """`there` [M, L, E]. `output` of an expert that has come."""
        self._there = there
        self._output = output
        self._number = {layer: number for number, layer in enumerate(moe_layers)}
        self._late = late
        self._newest = 0  # layer that has routed

    def missing(self, layer: int, experts: NDArray[np.int64]) -> NDArray[np.bool_]:
        return ~np.take_along_axis(self._there[:, self._number[layer]], experts, axis=1)

    def send_for(self, layer: int, ranks: Mapping[int, int]) -> int:
        return len(ranks)

    def compute(self, expert: ExpertId, x: Tensor) -> Tensor | None:
        come = self._newest + 1 - self._number[expert.layer] >= self._late
        return self._output(expert, x) if come else None

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor, *, decode: bool) -> bool:
        return True

    def entering(self, layer: int, x: Tensor) -> None: ...

    def routed(self, probe: RouterProbe) -> None:
        self._newest = self._number[probe.layer]

    def end(self) -> None: ...


class _TextSight(LiveSight):
    """The past of a row is in the rows before it; what of it has not been computed in this pass is the exact one's."""

    def __init__(self, memory: Memory, decision: Decision, exact: Exact) -> None:
        super().__init__(memory, decision)
        self._exact = exact

    def _state(self, which: str, layer: int, back: int) -> Tensor:
        if not back:
            return super()._state(which, layer, back)
        assert which == "residual", "only residuals of earlier tokens are kept"
        first = len(self._exact.tokens) - self.rows - back
        return self._exact.residuals[layer, first : first + self.rows].float()


class _TextRoutes(CommittedRoutes):
    exact: Exact

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor, *, decode: bool) -> bool:
        super().begin(sequences, tokens, decode=True)
        return True

    def _sight(self, decision: Decision) -> Sight:
        return _TextSight(self._memory, decision, self.exact)


class Rehearsal:
    """A model that texts are fed to. One thread."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, source: ExpertSource, geometry: Geometry, defaults: Tensor | None
    ) -> None:
        self.spec = spec
        self.geometry = geometry
        self.defaults = defaults  # [L, E, H]
        self._weights = weights
        self._source = source
        self._pool = KvPool(spec, weights.embed.dtype, CPU, capacity_blocks=1 << 20)

    def exact(self, tokens: Sequence[int], cache: CacheOnPaper, prompt_tokens: int = PROMPT_TOKENS) -> Exact:
        """The text as it is; `forget` it afterwards."""
        watched = [_Watched(), _Watched()]
        prompt = self._pool.sequence()
        self.run(prompt, tokens[:prompt_tokens], watched[0])
        whole = prompt.fork()
        logits = self.run(whole, tokens[prompt_tokens:], watched[1])
        whole.free()
        routing = np.concatenate([np.stack(each.experts, axis=1) for each in watched])  # [T, L, k]
        residuals = torch.cat([torch.stack(each.residuals) for each in watched], dim=1)
        return Exact(tokens, prompt_tokens, prompt, logits.log_softmax(-1), residuals, routing, cache.follow(routing))

    def lossy(
        self, exact: Exact, plan: QualityPlan, predictors: Mapping[int, LogitPredictor], late: int
    ) -> tuple[Tensor, Substituted]:
        """([M, vocab] log probabilities under the plan, what was substituted). `late`: layers until a miss has come."""
        layers = self.spec.moe_layers
        shelf = OnPaper(exact.there[exact.prompt_tokens :], self.output, layers, late)
        routes = self._routes(exact, plan, predictors)
        desk = Substitutes(plan, shelf, layers, self.defaults, routes, in_prompts=True)
        whole = exact.prompt.fork()
        tap = shelf if routes is None else Taps(shelf, routes)
        logits = self.run(whole, exact.tokens[exact.prompt_tokens :], tap, desk)
        whole.free()
        return logits.log_softmax(-1), desk.accounts.total

    def foresee(self, exact: Exact, predictors: Mapping[int, LogitPredictor], horizon: int) -> dict[int, Tensor]:
        """The experts [M, k] named for each layer of `predictors`, so many layers before, on the exact text."""
        policies = [[MissPolicy.COMMIT if n in predictors else MissPolicy.WAIT] for n in range(self.geometry.layers)]
        plan = QualityPlan(tuple(tuple(ranks) * self.geometry.top_k for ranks in policies), horizon=horizon)
        routes, whole = self._routes(exact, plan, predictors), exact.prompt.fork()
        assert routes is not None, "nothing to foresee"
        self.run(whole, exact.tokens[exact.prompt_tokens :], routes)
        whole.free()
        said = {number: routes.propose(number) for number in predictors}
        return {number: route.experts for number, route in said.items() if route is not None}

    def output(self, expert: ExpertId, x: Tensor) -> Tensor:
        """x: [n, H] → [n, H]."""
        with self._source.lease(expert.layer, [expert.expert]) as lease:
            (wave,) = lease.waves()
            return expert_ffn(x, wave.table[expert.expert])

    def forget(self, exact: Exact) -> None:
        exact.prompt.free()

    def _routes(
        self, exact: Exact, plan: QualityPlan, predictors: Mapping[int, LogitPredictor]
    ) -> CommittedRoutes | None:
        if not plan.used & set(OF_A_LAYER):
            return None
        moe_layers = self.spec.moe_layers
        renormalise = self.spec.moe(moe_layers[0]).renormalise
        routes = _TextRoutes(predictors, self.geometry, moe_layers, renormalise=renormalise, horizon=plan.horizon)
        routes.exact = exact
        return routes

    def run(
        self, kv: KvSequence, tokens: Sequence[int], tap: ForwardTap | None = None, desk: Substitutes | None = None
    ) -> Tensor:
        """Logits [T, vocab] of tokens that follow what `kv` holds, all computed together."""
        decoder = Decoder(self.spec, self._weights, CPU, tap, desk)
        return decoder.forward(prefill_rows(_ID, kv, tokens, CPU), self._source, range(len(tokens)))
