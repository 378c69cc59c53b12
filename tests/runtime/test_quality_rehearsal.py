"""A text that is rehearsed is what a decode with the same misses would have computed."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from steerpipe.core.ids import ExpertId, SequenceId
from steerpipe.core.quality import MissPolicy, QualityPlan
from steerpipe.model.decoder import Decoder
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.moe import expert_ffn
from steerpipe.model.step import decode_rows, prefill_rows
from steerpipe.model.weights import build_weights
from steerpipe.predict.lookahead import RouterLookahead
from steerpipe.predict.proposals import CommittedRoutes
from steerpipe.predict.records import Geometry
from steerpipe.predict.routers import routers_of_weights
from steerpipe.runtime.quality_rehearsal import CacheOnPaper, Rehearsal
from steerpipe.runtime.substitutes import Substitutes
from tests.support.bits import random_tokens
from tests.support.running import CPU
from tests.transfer.packs import EXPERTS, LAYERS, tiny_pack
from tests.transfer.running import resident

FAMILY, PROMPT, TEXT = "qwen2_moe", 20, 44
PACK = tiny_pack(FAMILY)
SPEC = PACK.spec
RANKS = SPEC.moe(SPEC.moe_layers[0]).top_k
GEOMETRY = Geometry(LAYERS, EXPERTS, RANKS, SPEC.hidden)
WEIGHTS = build_weights(SPEC, PACK.family.names, PACK.read_dense(), torch.float32, CPU)
EXPERT_SOURCE = resident(FAMILY, None, torch.float32)
DEFAULTS = torch.randn(LAYERS, EXPERTS, SPEC.hidden, generator=torch.Generator().manual_seed(4)) / 10
TOKENS = random_tokens(301, TEXT, 5)


def rehearsal() -> Rehearsal:
    return Rehearsal(SPEC, WEIGHTS, EXPERT_SOURCE, GEOMETRY, DEFAULTS)


class OneToken:
    """A Shelf for the token that is decoded: what is there is said, and what is not comes two layers later."""

    def __init__(self, there: np.ndarray) -> None:
        self.there = there  # [T, L, E]
        self.token = 0
        self.layer = 0

    def missing(self, layer: int, experts: np.ndarray) -> np.ndarray:
        self.layer = SPEC.moe_layers.index(layer)
        return ~self.there[self.token, self.layer][experts]

    def send_for(self, layer: int, ranks: Mapping[int, int]) -> int:
        return 0

    def compute(self, expert: ExpertId, x: Tensor) -> Tensor | None:
        if self.layer + 1 - SPEC.moe_layers.index(expert.layer) < 2:
            return None
        with EXPERT_SOURCE.lease(expert.layer, [expert.expert]) as lease:
            (wave,) = lease.waves()
            return expert_ffn(x, wave.table[expert.expert])


def decoded(plan: QualityPlan, there: np.ndarray, routes: CommittedRoutes | None) -> Tensor:
    """The same text, token by token behind an exact prompt."""
    shelf = OneToken(there)
    desk = Substitutes(plan, shelf, SPEC.moe_layers, DEFAULTS, routes)
    decoder = Decoder(SPEC, WEIGHTS, CPU, routes, desk)
    kv = KvPool(SPEC, torch.float32, CPU, 16).sequence()
    decoder.forward(prefill_rows(SequenceId(0), kv, TOKENS[:PROMPT], CPU), EXPERT_SOURCE, [0])
    rows = []
    for place in range(PROMPT, TEXT):
        shelf.token = place
        step = decode_rows([SequenceId(0)], [kv], [TOKENS[place]], CPU, cell=1)
        rows.append(decoder.forward(step, EXPERT_SOURCE, [0])[0])
    return torch.stack(rows).log_softmax(-1)


@pytest.mark.parametrize("policy", [p for p in MissPolicy if p not in (MissPolicy.CPU, MissPolicy.WAIT)])
def test_a_rehearsal_is_the_decode_with_the_same_misses(policy: MissPolicy) -> None:
    plan = QualityPlan.uniform(policy, LAYERS, RANKS)
    stage = rehearsal()
    exact = stage.exact(TOKENS, CacheOnPaper(LAYERS, EXPERTS, 9), PROMPT)
    lookahead = RouterLookahead(routers_of_weights(SPEC, WEIGHTS), shared=True)
    predictors = dict.fromkeys(range(1, LAYERS), lookahead)
    routes = None
    if policy in (MissPolicy.COMMIT, MissPolicy.COMMIT_TRUE):
        renormalise = SPEC.moe(SPEC.moe_layers[0]).renormalise
        routes = CommittedRoutes(predictors, GEOMETRY, SPEC.moe_layers, renormalise=renormalise, horizon=1)
    lossy, counts = stage.lossy(exact, plan, predictors, late=2)
    torch.testing.assert_close(lossy, decoded(plan, exact.there, routes), atol=2e-5, rtol=1e-4)
    assert counts.substituted and counts.uses == (TEXT - PROMPT) * LAYERS * RANKS
    assert float((lossy - exact.log_probabilities).abs().max()) > 1e-4  # it is lossy indeed


def test_a_plan_that_waits_is_the_exact_text() -> None:
    stage = rehearsal()
    exact = stage.exact(TOKENS, CacheOnPaper(LAYERS, EXPERTS, 9), PROMPT)
    lossy, counts = stage.lossy(exact, QualityPlan.uniform(MissPolicy.WAIT, LAYERS, RANKS), {}, late=2)
    assert torch.equal(lossy, exact.log_probabilities) and counts.substituted == 0
    stage.forget(exact)


def test_a_cache_on_paper_keeps_what_is_used_most() -> None:
    cache = CacheOnPaper(layers=1, experts=4, slots=2)
    routing = np.array([[[0]], [[1]], [[0]], [[2]], [[1]], [[0]]])
    there = cache.copy().follow(routing)[:, 0]
    assert there.astype(int).tolist() == [
        [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0],
    ]  # fmt: skip
    assert not cache.follow(routing[:1]).any()  # the copy learnt, the cache did not
