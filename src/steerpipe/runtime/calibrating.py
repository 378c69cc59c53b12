"""A model opened for a calibration: everything that a rehearsal needs, and default vectors where it has none yet."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from steerpipe.core.config import EngineConfig, cache_folder
from steerpipe.core.protocols import ExpertSource
from steerpipe.core.quality import QualityPlan
from steerpipe.core.resolve import resolve
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.model.checkpoint import read_folder_spec
from steerpipe.model.moe import expert_ffn
from steerpipe.model.weights import ModelWeights, build_weights
from steerpipe.predict.logits import LogitPredictor
from steerpipe.predict.lookahead import DefaultVectors, RouterLookahead
from steerpipe.runtime.experts import Ladder, expert_facts, open_experts, settle_budget
from steerpipe.runtime.facts import gather_facts
from steerpipe.runtime.models import find_model, open_model
from steerpipe.runtime.prediction import geometry_of
from steerpipe.runtime.quality import committing, find_lookahead, identity_of, mark_for, uncalibrated
from steerpipe.runtime.quality_rehearsal import CPU, CacheOnPaper, Rehearsal
from steerpipe.store.progress import Progress


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to be measured. `close` it."""

    folder: Path
    identity: str
    codec: TextCodec
    context: int  # most tokens of a text
    rehearsal: Rehearsal
    lookahead: RouterLookahead
    weights: ModelWeights
    source: ExpertSource
    ladder: Ladder | None

    def predictors(self, plan: QualityPlan) -> Mapping[int, LogitPredictor]:
        """Who says the routes that a plan commits to."""
        spec = self.rehearsal.spec
        return committing(plan, spec, self.weights, self.folder, self.lookahead, mark_for(spec, self.identity))

    def close(self) -> None:
        if self.ladder is not None:
            self.ladder.close()


def open_subject(model: str | Path | None, config: EngineConfig, progress: Progress | None = None) -> Subject:
    """On the CPU, whatever the machine has; experts in memory if they fit, else as a ladder brings them."""
    folder = find_model(model)
    _, spec = read_folder_spec(folder)
    geometry = geometry_of(spec)
    if geometry is None:
        raise uncalibrated(spec)
    facts = gather_facts(spec, folder)
    resolved = resolve(config, facts)
    pack = open_model(folder, cache_folder(config), progress)
    torch.set_num_threads(resolved.threads)
    dtype = getattr(torch, resolved.dtype)
    budget = settle_budget(config, resolved, facts, expert_facts(pack, dtype, "cpu"))
    weights = build_weights(spec, pack.family.names, pack.dense(dtype), dtype, CPU)
    opened = open_experts(pack, budget, "lfru", dtype, CPU, progress)
    lookahead = find_lookahead(spec, weights, mark_for(spec, identity_of(pack)), folder)
    vectors = None if lookahead.defaults is None else lookahead.defaults.vectors
    rehearsal = Rehearsal(spec, weights, opened.source, geometry, vectors)
    return Subject(
        folder, identity_of(pack), TextCodec.load(folder), resolved.max_context, rehearsal, lookahead, weights,
        opened.source, opened.ladder,
    )  # fmt: skip


@torch.no_grad()
def measure_defaults(
    subject: Subject, texts: Sequence[Sequence[int]], progress: Callable[[int, int], None] | None = None
) -> DefaultVectors:
    """Mean unweighted output of every expert over the tokens of `texts` that are routed to it."""
    rehearsal, routers = subject.rehearsal, subject.lookahead.routers
    geometry, layers = rehearsal.geometry, rehearsal.spec.moe_layers
    sums = torch.zeros(geometry.layers, geometry.experts, geometry.hidden)
    counts = torch.zeros(geometry.layers, geometry.experts, dtype=torch.int64)
    for done, text in enumerate(texts):
        exact = rehearsal.exact(text, CacheOnPaper(geometry.layers, geometry.experts, geometry.top_k))
        for number, layer in enumerate(layers):
            x = routers.normed(number, exact.residuals[number]).to(subject.weights.embed.dtype)
            routed = torch.from_numpy(exact.routing[:, number])
            with subject.source.lease(layer, routed.unique().tolist()) as lease:
                for wave in lease.waves():
                    for expert in wave.experts:
                        rows = x[(routed == expert).any(1)]
                        sums[number, expert] += expert_ffn(rows, wave.table[expert]).float().sum(0)
                        counts[number, expert] += len(rows)
        rehearsal.forget(exact)
        if progress is not None:
            progress(done + 1, len(texts))
    return DefaultVectors.of_sums(sums, counts)
