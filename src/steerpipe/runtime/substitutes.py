"""Lossy answers to a miss: what runs, what stands in for the rest, and what is made good later.

Numbers MoE layers from 0. V rows, k experts per row, E experts, H hidden; a pair is one (row, rank), row by row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.errors import ConfigError
from steerpipe.core.ids import ExpertId, SequenceId
from steerpipe.core.quality import OF_A_LAYER, Allowance, MissPolicy, QualityPlan
from steerpipe.model.misses import Settled
from steerpipe.model.moe import Nearby, Route, StandIns
from steerpipe.runtime.quality_accounts import Accounts


class Shelf(Protocol):
    """Experts for whoever does not wait; `transfer.impatient` in a running engine."""

    def missing(self, layer: int, experts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[V, k] of `experts` [V, k]."""
        ...

    def send_for(self, layer: int, ranks: Mapping[int, int]) -> int:
        """Experts that are missing, and the best rank that a row has given each."""
        ...

    def compute(self, expert: ExpertId, x: Tensor) -> Tensor | None:
        """Its output for x [n, H]; None: it has not come."""
        ...


class NearbyExperts(Protocol):
    """Experts that the CPU can compute where they lie; `transfer.nearby` in a running engine."""

    def take(self, layer: int, experts: Sequence[int]) -> Nearby | None:
        """Those of `experts` that are computed so while the link brings the others, the first before the last."""
        ...


class Proposals(Protocol):
    """What the layers before have said a layer would route to: the basis of `commit`."""

    def propose(self, number: int) -> Route | None:
        """Ids and weights for the rows of the pass; None: nothing was said."""
        ...

    def weigh(self, number: int, x: Tensor, experts: Tensor) -> Tensor:
        """[V, k]: the true router's weights of `experts` [V, k], as the family gives them."""
        ...


@dataclass(frozen=True, slots=True)
class _Patch:
    """A surrogate that may be made good: rows of the pass that wait for one expert."""

    number: int  # its layer
    expert: int
    pairs: tuple[tuple[int, int], ...]  # (row, rank) [n]
    rows: Tensor  # [n]
    x: Tensor  # [n, H]: what the expert would have been given
    gates: Tensor  # [n]


def best_ranks(experts: NDArray[np.int64], among: NDArray[np.bool_]) -> dict[int, int]:
    """The experts [V, k] that are marked in `among` [V, k] → the best rank that each has there."""
    ranks: dict[int, int] = {}
    for pair in np.flatnonzero(among).tolist():
        expert, rank = int(experts.flat[pair]), pair % experts.shape[1]
        ranks[expert] = min(rank, ranks.get(expert, rank))
    return ranks


class Substitutes:
    """A MissDesk. One thread, the engine's; one pass at a time."""

    def __init__(
        self, plan: QualityPlan, shelf: Shelf, moe_layers: Sequence[int], defaults: Tensor | None,
        proposals: Proposals | None = None, *, nearby: NearbyExperts | None = None,
        allowance: Allowance | None = None, in_prompts: bool = False,
    ) -> None:  # fmt: skip
        """`defaults` [layers, E, H]: default vectors, for surrogate and patch. `proposals`: for commit. `nearby`: for
        cpu.
        `allowance`: where a layer's substitutions would cost more than is left of it, the layer waits.
        `in_prompts`: prompts are substituted as well, which only a measurement wants.
        """
        if defaults is None and plan.used & {MissPolicy.SURROGATE, MissPolicy.PATCH}:
            raise ConfigError("surrogate and patch need default vectors", fix="measure them with `steerpipe calibrate`")
        assert proposals is not None or not plan.used & set(OF_A_LAYER), "commit needs somebody who proposes"
        if nearby is None and MissPolicy.CPU in plan.used:
            raise ConfigError("the policy cpu, and nobody computes experts where they lie", fix="use patch or drop")
        self.plan = plan
        self.accounts = Accounts(allowance)
        self._shelf = shelf
        self._layers = tuple(moe_layers)
        self._number = {layer: number for number, layer in enumerate(moe_layers)}
        waiting = (MissPolicy.WAIT, MissPolicy.CPU)
        self._lenient = np.array([[each not in waiting for each in ranks] for ranks in plan.policies])
        self._by_cpu = np.array([[each is MissPolicy.CPU for each in ranks] for ranks in plan.policies])
        self._nearby = nearby
        self._taken: Nearby | None = None  # of the newest layer
        self._defaults = defaults
        self._proposals = proposals
        self._in_prompts = in_prompts
        self._patches: list[_Patch] = []
        self._rows = 0  # of the pass

    def begin(self, sequences: tuple[SequenceId | None, ...], *, decode: bool) -> bool:
        """None: a row in which nothing is ever missing; it keeps no account."""
        self._patches.clear()  # of the token before: too late
        self._let_go()  # a pass that failed before it had computed them
        if not decode and not self._in_prompts:
            return False
        self._rows = len(sequences)
        self.accounts.begin(sequences)
        return True

    def settle(self, layer: int, x: Tensor, route: Route) -> Settled:
        number = self._number[layer]
        policy = self.plan.policies[number]
        if policy[0] in OF_A_LAYER:
            return self._commit(number, x, route, true_weights=policy[0] is MissPolicy.COMMIT_TRUE)
        lenient, by_cpu = self._lenient[number], self._by_cpu[number]
        if not lenient.any() and not by_cpu.any():
            self.accounts.note(number, np.zeros(route.experts.shape, dtype=np.bool_))
            return Settled(route)
        experts = route.experts.cpu().numpy()
        missing = self._shelf.missing(layer, experts)  # [V, k]
        nearby = self._take(layer, experts, missing & by_cpu) if by_cpu.any() else None
        computed = missing & np.isin(experts, [] if nearby is None else list(nearby.experts))
        replaced = missing & lenient & ~computed
        allowed = self.accounts.note(number, replaced)
        self.accounts.computed(computed)
        if not allowed or not replaced.any():
            return Settled(route, nearby=nearby)
        pairs = np.flatnonzero(replaced)
        self._shelf.send_for(layer, best_ranks(experts, replaced))
        stand_ins = StandIns(tuple(pairs.tolist()), self._vectors(number, route, pairs, x))
        self._await(number, x, route, pairs)
        return Settled(route, stand_ins, nearby)

    def mend(self, layer: int) -> Tensor | None:
        """Adds gate · (expert(x) - default vector) for what has come since; what is later than the plan allows stays a
        surrogate. In the order of layers and experts, fp32.
        """
        number = self._number[layer]
        self._patches = [each for each in self._patches if number - each.number <= self.plan.patch_layers]
        added: Tensor | None = None
        left = []
        for patch in sorted(self._patches, key=lambda each: (each.number, each.expert)):
            found = self._shelf.compute(ExpertId(self._layers[patch.number], patch.expert), patch.x)
            if found is None:
                left.append(patch)
                continue
            out = found.float()
            assert self._defaults is not None, "a patch without a surrogate"
            difference = patch.gates[:, None] * (out - self._defaults[patch.number, patch.expert].to(out))
            if added is None:
                added = torch.zeros(self._rows, out.shape[1], device=out.device)
            added.index_add_(0, patch.rows, difference)
            self.accounts.mended(patch.number, patch.pairs)
        self._patches = left
        return added

    def _take(self, layer: int, experts: NDArray[np.int64], missed: NDArray[np.bool_]) -> Nearby | None:
        """Who of the missed is computed where it lies: the weakest choices first, the others come and are kept."""
        assert self._nearby is not None, "cpu needs experts in RAM"
        self._let_go()
        ranks = best_ranks(experts, missed)
        self._taken = self._nearby.take(layer, sorted(ranks, key=lambda each: (-ranks[each], each))) if ranks else None
        return self._taken

    def _let_go(self) -> None:
        if self._taken is not None:
            self._taken.let_go()
            self._taken = None

    def _commit(self, number: int, x: Tensor, route: Route, *, true_weights: bool) -> Settled:
        assert self._proposals is not None, "commit needs somebody who proposes"
        said = self._proposals.propose(number)
        if said is None:
            self.accounts.note(number, np.zeros(route.experts.shape, dtype=np.bool_))
            return Settled(route)
        wrong = (said.experts[:, :, None] != route.experts[:, None, :]).all(dim=2)
        self.accounts.note(number, wrong.cpu().numpy(), free=True)
        gates = self._proposals.weigh(number, x, said.experts) if true_weights else said.gates
        return Settled(Route(said.experts, gates))

    def _vectors(self, number: int, route: Route, pairs: NDArray[np.int64], x: Tensor) -> Tensor:
        """[pairs, H]: default vectors; nothing where the rank's policy is drop."""
        policy = self.plan.policies[number]
        if self._defaults is None:
            return x.new_zeros(len(pairs), x.shape[1])
        dropped = torch.tensor([policy[pair % len(policy)] is MissPolicy.DROP for pair in pairs], device=x.device)
        experts = route.experts.flatten()[pairs]
        return self._defaults[number, experts].to(x).masked_fill(dropped[:, None], 0.0)

    def _await(self, number: int, x: Tensor, route: Route, pairs: NDArray[np.int64]) -> None:
        """Notes the pairs whose rank is patched, an expert at a time."""
        policy, ranks = self.plan.policies[number], route.experts.shape[1]
        routed, gates = route.experts.flatten().tolist(), route.gates.flatten()
        pairs_of: dict[int, list[int]] = {}
        for pair in pairs.tolist():
            if policy[pair % ranks] is MissPolicy.PATCH:
                pairs_of.setdefault(routed[pair], []).append(pair)
        for expert, own in pairs_of.items():
            placed = tuple(divmod(pair, ranks) for pair in own)
            rows = torch.tensor([row for row, _ in placed], device=x.device)
            self._patches.append(_Patch(number, expert, placed, rows, x[rows], gates[own]))
