"""Lossy answers to a miss: what runs, what stands in for the rest, and what is made good later.

Numbers MoE layers from 0. V rows, k experts per row, E experts, H hidden; a pair is one (row, rank), row by row.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.errors import ConfigError
from steerpipe.core.ids import ExpertId
from steerpipe.core.protocols import Lease
from steerpipe.core.quality import OF_A_LAYER, MissPolicy, QualityPlan, Substituted
from steerpipe.model.misses import Settled
from steerpipe.model.moe import Route, StandIns, expert_ffn
from steerpipe.transfer.queue import Reason


class Fetching(Protocol):
    """An expert source whose experts come and go."""

    def ready(self, layer: int) -> NDArray[np.bool_]: ...

    def prefetch(self, experts: Iterable[ExpertId], reason: Reason, deadline: float) -> int: ...

    def lease(
        self, layer: int, routed: Sequence[int], keep: Collection[int] | None = None
    ) -> AbstractContextManager[Lease]: ...


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
    rows: Tensor  # [n]
    x: Tensor  # [n, H]: what the expert would have been given
    gates: Tensor  # [n]


class Substitutes:
    """A MissDesk. One thread, the engine's; one pass at a time."""

    def __init__(
        self, plan: QualityPlan, source: Fetching, moe_layers: Sequence[int], defaults: Tensor | None,
        proposals: Proposals | None = None, *, in_prompts: bool = False,
    ) -> None:  # fmt: skip
        """`defaults` [layers, E, H]: default vectors, for surrogate and patch. `proposals`: for commit.
        `in_prompts`: prompts are substituted as well, which only a measurement wants.
        """
        if MissPolicy.CPU in plan.used:
            raise ConfigError("the policy cpu without a GPU", fix="the experts are computed here anyway: use wait")
        if defaults is None and plan.used & {MissPolicy.SURROGATE, MissPolicy.PATCH}:
            raise ConfigError("surrogate and patch need default vectors", fix="measure them with `steerpipe calibrate`")
        assert proposals is not None or not plan.used & set(OF_A_LAYER), "commit needs somebody who proposes"
        self.plan = plan
        self._source = source
        self._layers = tuple(moe_layers)
        self._number = {layer: number for number, layer in enumerate(moe_layers)}
        self._defaults = defaults
        self._proposals = proposals
        self._in_prompts = in_prompts
        self._patches: list[_Patch] = []
        self._counts = Substituted()

    @property
    def counts(self) -> Substituted:
        """Since the start; subtract an earlier one for an interval."""
        return self._counts

    def wants(self, *, decode: bool) -> bool:
        self._patches.clear()  # of the token before: too late
        return decode or self._in_prompts

    def settle(self, layer: int, x: Tensor, route: Route) -> Settled:
        number = self._number[layer]
        policy = self.plan.policies[number]
        if policy[0] in OF_A_LAYER:
            return self._commit(number, x, route, true_weights=policy[0] is MissPolicy.COMMIT_TRUE)
        missing = torch.from_numpy(~self._source.ready(layer))[route.experts.cpu()]  # [V, k]
        lenient = torch.tensor([each is not MissPolicy.WAIT for each in policy])  # [k]
        replaced = (missing & lenient).flatten().nonzero().flatten().tolist()
        self._count(route, len(replaced))
        if not replaced:
            return Settled(route)
        experts = route.experts.flatten()[replaced]
        self._source.prefetch((ExpertId(layer, e) for e in sorted(set(experts.tolist()))), Reason.PREFETCH, math.inf)
        stand_ins = StandIns(tuple(replaced), self._vectors(number, experts, replaced, x))
        self._await(number, x, route, replaced)
        return Settled(route, stand_ins)

    def mend(self, layer: int) -> Tensor | None:
        """Adds what has come since; what is later than the plan allows stays a surrogate."""
        number = self._number[layer]
        self._patches = [each for each in self._patches if number - each.number <= self.plan.patch_layers]
        landed = [each for each in self._patches if self._source.ready(self._layers[each.number])[each.expert]]
        if not landed:
            return None
        self._patches = [each for each in self._patches if each not in landed]
        return self._differences(landed)

    def _differences(self, landed: Sequence[_Patch]) -> Tensor:
        """[V, H] fp32: gate · (expert(x) - default vector) for each patch, in the order of layers and experts."""
        assert self._defaults is not None, "a patch without a surrogate"
        added = torch.zeros(self._rows, landed[0].x.shape[1], device=landed[0].x.device)
        for patch in sorted(landed, key=lambda each: (each.number, each.expert)):
            with self._source.lease(self._layers[patch.number], [patch.expert]) as lease:
                (wave,) = lease.waves()
                out = expert_ffn(patch.x, wave.table[patch.expert]).float()
            difference = patch.gates[:, None] * (out - self._defaults[patch.number, patch.expert].to(out))
            added.index_add_(0, patch.rows, difference)
        before = self._counts
        mended = sum(len(patch.rows) for patch in landed)
        self._counts = Substituted(before.uses, before.substituted, before.patched + mended)
        return added

    def _commit(self, number: int, x: Tensor, route: Route, *, true_weights: bool) -> Settled:
        assert self._proposals is not None, "commit needs somebody who proposes"
        said = self._proposals.propose(number)
        if said is None:
            self._count(route, 0)
            return Settled(route)
        wrong = (said.experts[:, :, None] != route.experts[:, None, :]).all(dim=2).sum()
        self._count(route, int(wrong))
        gates = self._proposals.weigh(number, x, said.experts) if true_weights else said.gates
        return Settled(Route(said.experts, gates))

    def _vectors(self, number: int, experts: Tensor, replaced: Sequence[int], x: Tensor) -> Tensor:
        """[pairs, H]: default vectors; nothing where the rank's policy is drop."""
        policy = self.plan.policies[number]
        dropped = torch.tensor([policy[pair % len(policy)] is MissPolicy.DROP for pair in replaced], device=x.device)
        if self._defaults is None:
            return x.new_zeros(len(replaced), x.shape[1])
        return self._defaults[number, experts].to(x).masked_fill(dropped[:, None], 0.0)

    def _await(self, number: int, x: Tensor, route: Route, replaced: Sequence[int]) -> None:
        """Notes the pairs whose rank is patched, an expert at a time."""
        policy, ranks = self.plan.policies[number], route.experts.shape[1]
        self._rows = len(x)
        rows_of: dict[int, list[int]] = {}
        for pair in replaced:
            if policy[pair % ranks] is MissPolicy.PATCH:
                rows_of.setdefault(int(route.experts.flatten()[pair]), []).append(pair)
        for expert, pairs in rows_of.items():
            rows = torch.tensor([pair // ranks for pair in pairs], device=x.device)
            self._patches.append(_Patch(number, expert, rows, x[rows], route.gates.flatten()[pairs]))

    def _count(self, route: Route, substituted: int) -> None:
        before = self._counts
        self._counts = Substituted(
            before.uses + route.experts.numel(), before.substituted + substituted, before.patched
        )
