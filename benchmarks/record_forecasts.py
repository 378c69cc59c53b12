"""Routing and forecasts of nano together, for `bench decode --predict`: what it routed to in its answers, and what its
shipped predictors say of it.

    python benchmarks/record_forecasts.py --out FILE [--tokens 400] [--history FILE]
        [--documents heldout.jsonl.gz --chats chats.json]

With documents and chats the text and the split are those of train_predictors.py: no predictor was trained on the
prompts that are kept. Without them nano answers prompts of `steerpipe.trace.combinatorial`, which nobody was trained on
either. Only the answers' tokens are kept, as a decode step meets them; forecasts may look back at the prompt.
`--history`: the ExpertTransformers of train_predictors' stage `live` or of `steerpipe train transformer`, two layers
ahead, beside what is shipped; whatever their file is called, they are called "transformers".
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.predict_rows import HISTORY_SAID
from benchmarks.predictor_corpora import ANSWER_TOKENS, synthetic_chats
from benchmarks.predictor_material import CONTEXT, load_nano, read_text
from steerpipe.arena.foresee import foresee, foresee_reuse, recording_of
from steerpipe.arena.foresight import Foresight, ReuseForesight
from steerpipe.bench.forecasts import NAMED, ForecastFile, write_forecasts
from steerpipe.core.errors import InputError, SteerpipeError
from steerpipe.predict import files
from steerpipe.predict.by_horizon import ByHorizon
from steerpipe.predict.protocol import RoutingPredictor
from steerpipe.predict.records import PackedTrace, pack_traces
from steerpipe.predict.reuse_file import load_reuse
from steerpipe.predict.routers import Routers
from steerpipe.predict.shipped import ShippedPredictors, for_model
from steerpipe.predict.sight import Decision
from steerpipe.predict.trajectory import Trajectory
from steerpipe.predict.trajectory_networks import Architecture
from steerpipe.predict.window import Window
from steerpipe.runtime.models import find_model
from steerpipe.trace.live import TokenSequence, read_geometry, trace_texts
from steerpipe.train.models import routers_of_model

TEXT_TOKENS = 1_600_000  # as train_predictors reads them
HORIZONS = (1, 2, 3)
AHEAD = 2  # of an ExpertTransformer


def previous_token(trace: PackedTrace) -> Foresight:
    """The experts of the token before, in the same layer; sure by as much as they come back on average."""
    experts = trace.experts.numpy().astype(np.int16)  # [N, L, k]
    before = np.concatenate([experts[:1], experts[:-1]])
    there = (trace.place.numpy() > 0)[:, None, None]
    stays = (before[..., None] == experts[..., None, :]).any(-1)  # [N, L, k]
    sure = np.broadcast_to(np.where(there, stays[there[:, 0, 0]].mean(), 0.0), before.shape)
    return Foresight(np.stack([before] * len(HORIZONS)), np.stack([sure] * len(HORIZONS)).astype(np.float32))


def kept_rows(found: Foresight, rows: np.ndarray) -> Foresight:
    return Foresight(found.ranked[:, rows], found.probability[:, rows])


def held_out(documents: Path, chats: Path, folder: Path, tokens: int) -> list[TokenSequence]:
    """Chats with that many tokens of answers, of prompts that train_predictors.py does not learn from."""
    text = read_text(documents, chats, folder, TEXT_TOKENS)
    chosen, answered = [], 0
    for sequence in text.test:
        if sequence.prompt in text.openings and answered < tokens:
            chosen.append(sequence)
            answered += len(sequence.tokens) - sequence.prompt_tokens
    return chosen


def our_own(model: PreTrainedModel, folder: Path, tokens: int) -> list[TokenSequence]:
    """Prompts that come with the project, and as many answers as that takes: half of them may be short."""
    chats = synthetic_chats(model, folder, 1 + 2 * tokens // ANSWER_TOKENS)
    return [TokenSequence(each["id"], each["tokens"], each["prompt_tokens"]) for each in chats]


def predictors_of(shipped: ShippedPredictors, routers: Routers, history: Path | None) -> dict[str, RoutingPredictor]:
    """What is shipped, and who looks at routing history. InputError: that file holds something else."""
    heads = ByHorizon("heads", {h: files.load(file, routers) for h, file in shipped.heads().items() if h in HORIZONS})
    found = {"heads": heads, "lookahead": files.load(shipped.files["lookahead"], routers)}
    return found | ({HISTORY_SAID: load_history(history, routers)} if history else {})


def load_history(file: Path, routers: Routers) -> Trajectory:
    """InputError: rows of an ExpertTransformer, with an ExpertTransformer's cost, would tell of something else."""
    found = files.load(file, routers)
    if not isinstance(found, Trajectory) or found.architecture is not Architecture.TRANSFORMER:
        what = "no ExpertTransformer"
    elif found.window is not Window.LAYERS or found.without:
        what = "an ExpertTransformer that does not look at the last layers alone"
    elif any(Decision(layer, AHEAD) not in found.networks for layer in range(routers.layers)):
        what = f"an ExpertTransformer that does not know every layer {AHEAD} ahead"
    else:
        return found
    raise InputError(f"{file} holds {what}", fix="train one: steerpipe train transformer --window layers --horizon 2")


def report(found: ForecastFile) -> None:
    recording = found.recording
    for name, each in found.said.items():
        top = each.ranked[..., : recording.top_k]
        hit = (top[..., None] == recording.routing[None, :, :, None, :]).any(-1) & (
            each.probability[..., : top.shape[-1]] > 0
        )
        print(f"{name}: recall@{recording.top_k} {' / '.join(f'{share:.3f}' for share in hit.mean(axis=(1, 2, 3)))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path)
    parser.add_argument("--chats", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--history", type=Path)
    options = parser.parse_args()
    if (options.documents is None) != (options.chats is None):
        parser.error("--documents and --chats belong together")
    model, folder = load_nano("cpu")
    shipped = for_model(find_model(None))
    assert shipped is not None, "the package has no predictors"
    try:
        predictors = predictors_of(shipped, routers_of_model(model), options.history)
    except SteerpipeError as error:
        parser.error(str(error))
    chosen = (
        held_out(options.documents, options.chats, folder, options.tokens) if options.documents
        else our_own(model, folder, options.tokens)
    )  # fmt: skip
    traced = list(trace_texts(model, chosen, states=True, state_dtype=torch.float32, max_tokens=CONTEXT))
    trace = pack_traces(traced, read_geometry(model))
    rows = np.flatnonzero(
        np.concatenate([np.arange(len(each.tokens)) >= each.prompt_tokens for each in traced])
    )[: options.tokens]  # fmt: skip
    said = {name: foresee(each, trace, HORIZONS, NAMED) for name, each in predictors.items()}
    said["previous"] = previous_token(trace)
    reuse = foresee_reuse(load_reuse(shipped.files["reuse"]), trace)
    places = {int(row): number for number, row in enumerate(rows)}
    kept = {(places[token], layer): each for (token, layer), each in reuse.scores.items() if token in places}
    recording = recording_of(trace, "nano's answers")
    recording = replace(recording, routing=recording.routing[rows], sequence=recording.sequence[rows])
    found = ForecastFile(
        recording, {name: kept_rows(each, rows) for name, each in said.items()},
        ReuseForesight(kept, reuse.half_life_tokens),
    )  # fmt: skip
    write_forecasts(options.out, found)
    report(found)
    print(f"{recording.tokens} tokens of {len(np.unique(recording.sequence))} answers → {options.out}")


if __name__ == "__main__":
    main()
