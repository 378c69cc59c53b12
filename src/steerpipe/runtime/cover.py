"""Cover tokens (`--cover`): an answer's first tokens do not wait for experts, which come meanwhile. Changes text.

A covered token is the dial's `fast` for one token: what is there runs, default vectors stand in for the rest and are
made good where an expert comes in time. Behind the last covered token every miss is waited for again.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.config import EngineConfig
from steerpipe.core.cover import AUTO, MOST_AUTO_TOKENS, Covered
from steerpipe.core.errors import ConfigError
from steerpipe.core.ids import ExpertId, SequenceId
from steerpipe.core.quality import OF_A_LAYER, Allowance, Dial, MissPolicy, QualityPlan
from steerpipe.model.misses import Settled
from steerpipe.model.moe import Route
from steerpipe.model.spec import ModelSpec
from steerpipe.model.weights import ModelWeights
from steerpipe.runtime.planner import Link, cover
from steerpipe.runtime.quality import find_lookahead, mark_for, vectors_for
from steerpipe.runtime.quality_profile import load_profile, profile_of
from steerpipe.runtime.substitutes import Shelf, Substitutes
from steerpipe.transfer.source import LadderSource


def covering_tokens(experts: int, block_seconds: float, token_seconds: float) -> int:
    """So many tokens last as long as the transfer of the experts that the first of them missed; 1 is that first one."""
    if not experts or block_seconds <= 0 or token_seconds <= 0:
        return 1
    needed = cover(experts, Link("experts", 1 / block_seconds), 1 / token_seconds).tokens
    return min(MOST_AUTO_TOKENS, max(1, math.ceil(needed)))


@dataclass(slots=True)
class _Answer:
    """One whose first tokens are covered. `span` None: not known before its second token."""

    span: int | None
    tokens: int = 0
    began: float = 0.0  # its first token
    missed: set[ExpertId] = field(default_factory=set)


class _CoverShelf:
    """A Shelf on which only covered rows miss anything, and which notes what they miss."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self.rows: list[_Answer | None] = []  # of the pass; None: an answer that waits

    def missing(self, layer: int, experts: NDArray[np.int64]) -> NDArray[np.bool_]:
        covered = np.array([answer is not None for answer in self.rows])
        missing: NDArray[np.bool_] = self._shelf.missing(layer, experts) & covered[:, None]
        for answer, routed, gone in zip(self.rows, experts, missing, strict=True):
            if answer is not None:
                answer.missed.update(ExpertId(layer, int(expert)) for expert in routed[gone])
        return missing

    def send_for(self, layer: int, ranks: Mapping[int, int]) -> int:
        return self._shelf.send_for(layer, ranks)

    def compute(self, expert: ExpertId, x: Tensor) -> Tensor | None:
        return self._shelf.compute(expert, x)


class CoverDesk:
    """A MissDesk that has a say in the first tokens of those answers that it was told of. One thread."""

    def __init__(
        self, plan: QualityPlan, shelf: Shelf, moe_layers: tuple[int, ...], defaults: Tensor | None,
        allowance: Allowance | None, span: int | None, block_seconds: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`span` None: as many tokens as the transfers of what the first one misses take (`covering_tokens`)."""
        self._shelf = _CoverShelf(shelf)
        self._desk = Substitutes(plan, self._shelf, moe_layers, defaults, allowance=allowance)
        self._last_layer = moe_layers[-1]
        self._calibrated = allowance is not None
        self._span = span
        self._block_seconds = block_seconds
        self._clock = clock
        self._answers: dict[SequenceId, _Answer] = {}

    def cover(self, sequence: SequenceId) -> None:
        """The first tokens that it decodes from now on do not wait."""
        self._answers[sequence] = _Answer(self._span)

    def take(self, sequence: SequenceId) -> Covered:
        """What became of it, once; it is not covered any more."""
        answer = self._answers.pop(sequence, None) or _Answer(0)
        seconds = len(answer.missed) * self._block_seconds()
        uses = self._desk.accounts.take(sequence)
        return Covered(answer.tokens, seconds, len(answer.missed), uses, self._calibrated)

    def begin(self, sequences: tuple[SequenceId, ...], *, decode: bool) -> bool:
        if not decode:
            return False
        rows = self._shelf.rows = [self._due(sequence) for sequence in sequences]
        covered = tuple(sequence if row else None for sequence, row in zip(sequences, rows, strict=True))
        return any(rows) and self._desk.begin(covered, decode=True)

    def settle(self, layer: int, x: Tensor, route: Route) -> Settled:
        if layer == self._last_layer:  # a token that failed before is decoded again, and covered again
            for answer in self._shelf.rows:
                if answer is not None:
                    answer.tokens += 1
        return self._desk.settle(layer, x, route)

    def mend(self, layer: int) -> Tensor | None:
        return self._desk.mend(layer)

    def _due(self, sequence: SequenceId) -> _Answer | None:
        answer = self._answers.get(sequence)
        if answer is None:
            return None
        now = self._clock()
        if not answer.tokens:
            answer.began = now
        elif answer.span is None:
            answer.span = covering_tokens(len(answer.missed), self._block_seconds(), now - answer.began)
        if answer.span is not None and answer.tokens >= answer.span:
            return None
        return answer


def check_cover(config: EngineConfig, spec: ModelSpec, *, device: str) -> None:
    """Before anything is loaded."""
    if config.cover is None:
        return
    if config.quality not in (Dial.EXACT, MissPolicy.WAIT):
        raise ConfigError(
            f"cover tokens with quality {config.quality}: that answers misses without waiting in every token",
            fix="give --cover or --quality, not both",
        )
    if device == "cuda":
        raise ConfigError(
            "cover tokens on a GPU: its engine does not have them yet", fix="give --quality instead, or --device cpu"
        )
    if len({spec.moe(layer).top_k for layer in spec.moe_layers}) > 1:
        raise ConfigError("layers differ in how many experts a token uses", fix="drop --cover")


def open_cover(
    config: EngineConfig, spec: ModelSpec, weights: ModelWeights, folder: Path, source: LadderSource, identity: str
) -> CoverDesk | None:
    """None: nobody asked for it. ConfigError where the model has no default vectors."""
    if config.cover is None:
        return None
    plan, allowance = _plan(config, spec, folder, identity)
    home = folder if config.quality_profile is None else Path(config.quality_profile).parent
    lookahead = find_lookahead(spec, weights, mark_for(spec, identity), folder, home)
    vectors = vectors_for(plan, spec, lookahead)
    span = None if config.cover == AUTO else int(config.cover)
    return CoverDesk(plan, source.impatient(), spec.moe_layers, vectors, allowance, span, lambda: source.block_seconds)


def _plan(config: EngineConfig, spec: ModelSpec, folder: Path, identity: str) -> tuple[QualityPlan, Allowance | None]:
    """As the profile's `fast` has it, which also says what it costs; without a profile every miss is a patch."""
    named = config.quality_profile
    file = profile_of(folder) if named is None else Path(named)
    profile = None if file is None else load_profile(file, identity)
    setting = None if profile is None else profile.settings.get(Dial.FAST)
    if setting is not None and not setting.plan.used & set(OF_A_LAYER):
        return setting.plan, Allowance(setting.allowance.costs, setting.allowance.mended, None)
    layers = spec.moe_layers
    return QualityPlan.uniform(MissPolicy.PATCH, len(layers), spec.moe(layers[0]).top_k), None
