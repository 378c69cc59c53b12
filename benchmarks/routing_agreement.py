"""Does a model in int4 route as its bf16 parent does? Both over the same held-out text, layer by layer.

    python benchmarks/routing_agreement.py --parent FOLDER --documents heldout.jsonl.gz [--tokens 36000] [--json]

FOLDER is the checkpoint that the shipped model was packed from. Both are computed in float32, so that the weights alone
differ; a third run, the parent computed in bf16, shows what arithmetic alone changes. The last line is JSON.
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from steerpipe.arena.evaluation import evaluate
from steerpipe.predict.records import PackedTrace, TracedSequence, pack_traces
from steerpipe.trace.live import TokenSequence, read_geometry, trace_texts
from steerpipe.trace.models import LoadedModel, load_model
from steerpipe.trace.split import split_prompts
from steerpipe.train.counts import count_affinity, count_transition

LONGEST = 512  # tokens of a document: many documents say more than few long ones
HORIZON = 2


def read_documents(file: Path, model: LoadedModel, tokens: int) -> Iterator[TokenSequence]:
    taken = 0
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if taken >= tokens:
                return
            ids = model.codec.encode(json.loads(line)["text"], add_special=False)[:LONGEST]
            if len(ids) > 1:
                taken += len(ids)
                yield TokenSequence(f"document-{number}", ids, len(ids))


def routed(model: LoadedModel, texts: list[TokenSequence]) -> dict[str, TracedSequence]:
    return {each.prompt: each for each in trace_texts(model.model, texts)}


def agreement(one: dict[str, TracedSequence], other: dict[str, TracedSequence]) -> dict[str, Any]:
    """Share of the experts in common, of equal sets, and of the applied weight that falls on experts in common."""
    first, second = (np.concatenate([each[name].experts for name in one]) for each in (one, other))  # [N, L, k]
    weights = np.concatenate([_weights(one[name]) for name in one]).astype(np.float64)
    common = (first[..., :, None] == second[..., None, :]).any(-1)  # [N, L, k]
    by_layer = common.mean((0, 2))
    return {
        "tokens": len(first),
        "experts_in_common": float(common.mean()),
        "equal_sets": float(common.all(-1).mean()),
        "first_expert_equal": float((first[..., 0] == second[..., 0]).mean()),
        "weight_in_common": float(((weights * common).sum(-1) / weights.sum(-1)).mean()),
        "experts_in_common_by_layer": [round(float(each), 4) for each in by_layer],
    }


def _weights(sequence: TracedSequence) -> np.ndarray:
    assert sequence.weights is not None, "trace_texts keeps weights"
    return sequence.weights


def transfer(
    parent: dict[str, TracedSequence], shipped: dict[str, TracedSequence], model: LoadedModel
) -> dict[str, Any]:
    """Recall two layers ahead of predictors counted on one model's routing and tested on the other's, by prompt."""
    geometry, vocab = read_geometry(model.model), int(model.model.config.vocab_size)
    train, test = split_prompts(parent)
    found: dict[str, Any] = {}
    for learnt, source in (("bf16", parent), ("int4", shipped)):
        material = pack_traces([source[name] for name in train], geometry)
        for predictor in (
            count_transition(material, [HORIZON]), count_affinity(material, vocab, horizons=[HORIZON]),
        ):  # fmt: skip
            for tested, sequences in (("bf16", parent), ("int4", shipped)):
                held: PackedTrace = pack_traces([sequences[name] for name in test], geometry)
                score = evaluate(predictor, held, HORIZON).overall()
                assert score is not None, "both answer for every layer"
                found[f"{predictor.name}, learnt on {learnt}, tested on {tested}"] = round(score.recall, 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", required=True)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=36_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shipped, parent = load_model(None), load_model(options.parent)
    texts = list(read_documents(options.documents, shipped, options.tokens))
    runs = {"int4": routed(shipped, texts), "bf16": routed(parent, texts)}
    narrow = routed(load_model(options.parent, dtype=torch.bfloat16), texts)
    found = {
        "documents": len(texts),
        "int4 against bf16": agreement(runs["bf16"], runs["int4"]),
        "bf16 arithmetic against float32": agreement(runs["bf16"], narrow),
        "recall_two_ahead": transfer(runs["bf16"], runs["int4"], shipped),
    }
    if not options.json:
        Console().print(_table(found))
    print(json.dumps(found))


def _table(found: dict[str, Any]) -> Table:
    table = Table(title=f"{found['documents']} documents", title_justify="left")
    for heading in ("pair", "tokens", "experts in common", "equal sets", "first expert", "weight in common"):
        table.add_column(heading)
    for name in ("int4 against bf16", "bf16 arithmetic against float32"):
        each = found[name]
        shares = ("experts_in_common", "equal_sets", "first_expert_equal", "weight_in_common")
        table.add_row(name, f"{each['tokens']:,}", *(f"{each[share]:.2%}" for share in shares))
    return table


if __name__ == "__main__":
    main()
