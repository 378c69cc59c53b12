"""What is learnt about a model while it answers: default vectors, and how answers begin and where tokens are routed.

Only where nobody has trained the same, on a CPU, and in exact answers. What one run learns the next one starts with;
it changes which experts are moved early, never what is computed.
"""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steerpipe.core.errors import SteerpipeError
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.model.spec import ModelSpec
from steerpipe.model.weights import ModelWeights
from steerpipe.predict import files
from steerpipe.predict.lookahead import DefaultVectors, RouterLookahead
from steerpipe.predict.mark import ModelMark
from steerpipe.predict.openings import FIRST_TOKENS, OpeningTable, find_openings
from steerpipe.predict.records import Geometry
from steerpipe.predict.routers import Routers, routers_of_weights
from steerpipe.predict.running_defaults import RunningDefaults
from steerpipe.predict.running_openings import MOST_AT_ONCE, RunningOpenings
from steerpipe.predict.shipped import for_model
from steerpipe.predict.storage import Storage
from steerpipe.runtime.prediction import geometry_of

MOST_VECTOR_BYTES = 64 << 20  # of sums; Qwen3-30B's take 50 MB
LEAST_TOKENS = 256  # before vectors are used: from there on they are nearly what a long training gives
ENOUGH_TOKENS = 1 << 13  # from there on vectors gain nothing more
EVERY = 2  # steps of decoding, of which one teaches vectors: 2 % of a step that takes 11 ms, as nano's
SELDOM = 8  # ... of which one teaches where tokens go, behind an answer's beginning
_ANSWERS = 1024  # whose beginning is remembered at once


class DefaultsLearner:
    """An OutputSink that hears decoding alone: a vector of one token tells which token that was."""

    def __init__(self, running: RunningDefaults, moe_layers: Sequence[int], top_k: int) -> None:
        self.running = running
        self._number = {layer: number for number, layer in enumerate(moe_layers)}
        self._top_k = top_k
        self._steps = 0
        self._listens = False
        self.learnt = False  # anything at all

    def observe(self, layer: int, experts: Tensor, outputs: Tensor, *, decode: bool) -> None:
        number = self._number[layer]
        if number == 0:
            self._steps += decode
            due = decode and self._steps % EVERY == 0
            self._listens = due and self.tokens < ENOUGH_TOKENS
        if self._listens:
            self.running.add(number, experts, outputs)
            self.learnt = True

    @property
    def tokens(self) -> int:
        return self.running.tokens(self._top_k)


class OpeningsLearner:
    """A ForwardTap that sees how answers begin and some steps of the rest: what is typed counts nowhere."""

    def __init__(self, running: RunningOpenings) -> None:
        self.running = running
        self._steps = 0
        self._of_answer: OrderedDict[SequenceId, int] = OrderedDict()  # steps
        self._tokens: list[int] = []
        self._begin: list[bool] = []
        self._routed: list[NDArray[np.int64]] = []  # by layer: [V, k]
        self.learnt = False

    def begin(self, sequences: tuple[SequenceId, ...], tokens: Tensor, *, decode: bool) -> bool:
        if not decode or len(sequences) > MOST_AT_ONCE:
            return False
        known = self._of_answer
        for sequence in sequences:
            known[sequence] = known.pop(sequence, 0) + 1
        while len(known) > _ANSWERS:
            known.popitem(last=False)
        self._steps += 1
        self._begin = [known[sequence] <= FIRST_TOKENS for sequence in sequences]
        self._tokens, self._routed = tokens.tolist(), []
        return any(self._begin) or self._steps % SELDOM == 0

    def entering(self, layer: int, x: Tensor) -> None:
        pass

    def routed(self, probe: RouterProbe) -> None:
        self._routed.append(probe.experts.numpy())

    def end(self) -> None:
        self.running.add(self._tokens, np.stack(self._routed), np.array(self._begin))
        self.learnt = True


@dataclass(frozen=True, slots=True)
class Learning:
    """Beside a profile. None: somebody has trained it, or there would be too much of it."""

    defaults: DefaultsLearner | None
    openings: OpeningsLearner | None
    vectors: DefaultVectors | None  # of the runs before: what to predict by
    table: OpeningTable | None  # likewise
    _profile: Path
    _source: str
    _routers: Routers
    _mark: ModelMark

    def keep(self) -> None:
        """Beside the profile, which was kept just now. What cannot be written is no reason to fail."""
        with suppress(OSError):
            if self.defaults is not None and self.defaults.learnt:
                self._keep_vectors(self.defaults.running.often())
            if self.openings is not None and self.openings.learnt:
                self.openings.running.save(openings_file(self._profile), self._source)

    def _keep_vectors(self, means: DefaultVectors) -> None:
        """Numbers that 16 bits do not hold are not kept: the next run starts with what was there before."""
        if torch.isfinite(means.vectors.half()).all():
            made = RouterLookahead(self._routers, shared=False, defaults=means)
            made.mark = self._mark
            files.save(made, vectors_file(self._profile), Storage.FLOAT16)


def vectors_file(profile: Path) -> Path:
    return profile.with_name(f"{profile.stem}.lookahead.safetensors")


def openings_file(profile: Path) -> Path:
    return profile.with_name(f"{profile.stem}.openings.npz")


def open_learning(profile: Path, source: str, folder: Path, spec: ModelSpec, weights: ModelWeights) -> Learning | None:
    """Goes on where the last run ended. `profile`: the file beside which it lies; `source`: the pack's identity.

    None: layers differ in their experts, and nobody predicts here.
    """
    geometry = geometry_of(spec)
    if geometry is None:
        return None
    routers, mark = routers_of_weights(spec, weights).to("cpu"), ModelMark.of(geometry, source)
    defaults = _defaults_learner(profile, folder, spec, geometry, mark, routers)
    known = None if defaults is None or defaults.tokens < LEAST_TOKENS else defaults.running.drawn()
    openings, table = None, None
    if find_openings(folder) is None:
        counts = RunningOpenings.load(openings_file(profile), source, geometry.layers, geometry.experts)
        openings, table = OpeningsLearner(counts), counts.table()
    return Learning(defaults, openings, known, table, profile, source, routers, mark)


def _defaults_learner(
    profile: Path, folder: Path, spec: ModelSpec, geometry: Geometry, mark: ModelMark, routers: Routers
) -> DefaultsLearner | None:
    """None: somebody has measured them, or there would be too much to keep."""
    shipped = for_model(folder)
    if shipped is not None and "lookahead" in shipped.files:
        return None
    if geometry.layers * geometry.experts * geometry.hidden * 4 > MOST_VECTOR_BYTES:
        return None
    known = _vectors_in(vectors_file(profile), mark, routers)
    running = RunningDefaults.nothing(geometry) if known is None else RunningDefaults.of(known)
    return DefaultsLearner(running, spec.moe_layers, geometry.top_k)


def _vectors_in(file: Path, mark: ModelMark, routers: Routers) -> DefaultVectors | None:
    """None: there are none yet, or what lies there is damaged or of another model."""
    try:
        found = files.load(file, routers, here=mark)
    except SteerpipeError:
        return None
    told, shape = found.defaults if isinstance(found, RouterLookahead) else None, (routers.layers, routers.experts)
    if told is None or told.vectors.shape != (*shape, routers.hidden) or told.counts.shape != shape:
        return None
    whole = not told.counts.is_floating_point() and bool((told.counts >= 0).all())
    return told if whole and bool(torch.isfinite(told.vectors).all()) else None
