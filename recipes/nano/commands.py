"""One function per command of the recipe; each prints its figures as JSON lines."""

import json
import time
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from recipes.nano.answers import answer_all, answer_figures, read_openers
from recipes.nano.config import PRESETS, Preset
from recipes.nano.corpus import Tokens, read_documents, split_held_back, tokenise
from recipes.nano.device import pick_device
from recipes.nano.evaluate import bits_per_byte, greedy_agreement
from recipes.nano.export import export_model, import_model
from recipes.nano.routing import routing_statistics
from recipes.nano.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from recipes.nano.train import Clock, Run

BATCH_TOKENS = 65_536
UNFINISHED = 75  # exit status of a run that stopped by the clock: EX_TEMPFAIL, "call again"


def learn_tokenizer(corpus: Path, out: Path, vocabulary: int, context: int = 1024) -> None:
    """Learn the vocabulary from the training text, every document once."""
    learnt = train_tokenizer((document.text for document in read_documents(corpus, "train-*.jsonl.gz")), vocabulary)
    save_tokenizer(learnt, out, context)


def train(
    corpus: Path,
    out: Path,
    preset: str,
    tokenizer: Path | None,
    teacher: Path | None,
    minutes: float,
    checkpoint_seconds: float,
    plan: dict[str, Any],
    seed: int | None,
) -> int:
    """Train until the plan is done (exit 0, OUT/hf written and scored) or the clock runs out (exit 75: call again)."""
    start = time.monotonic()
    shape = PRESETS[preset].shape
    settled = PRESETS[preset].plan.changed(**plan, seed=seed)
    folder = tokenizer or out / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        learn_tokenizer(corpus, folder, shape.vocabulary, shape.context)
    tokens = tokenise(read_documents(corpus, "train-*.jsonl.gz"), load_tokenizer(folder), close=True)
    teaching = import_model(teacher, pick_device()) if teacher else None
    run = Run(Preset(shape, settled), *split_held_back(tokens, settled.seed), out, teaching)
    left_seconds = 60 * minutes - (time.monotonic() - start)
    if not run.advance(Clock(left_seconds, checkpoint_seconds)):
        return UNFINISHED
    export_model(run.model, folder, out / "hf")
    evaluate(out / "hf", corpus, out / "heldout.json")
    return 0


def evaluate(model: Path, corpus: Path, figures_to: Path | None) -> None:
    """Held-out bits per byte, per source and in total."""
    scores = bits_per_byte(import_model(model, pick_device()), _held_out(model, corpus), BATCH_TOKENS)
    figures = {
        source: {
            "bits_per_byte": round(score.bits_per_byte, 4),
            "perplexity": round(score.perplexity, 3),
            "tokens": score.tokens,
            "bytes": score.text_bytes,
        }
        for source, score in scores.items()
    }
    _report(figures, figures_to)


def routing(model: Path, corpus: Path, figures_to: Path | None) -> None:
    _report(routing_statistics(import_model(model, pick_device()), _held_out(model, corpus), BATCH_TOKENS), figures_to)


def agreement(model: Path, other: Path, corpus: Path, figures_to: Path | None) -> None:
    """Share of held-out positions at which both models' most likely token is the same."""
    mine, theirs = (import_model(folder, pick_device()) for folder in (model, other))
    share = greedy_agreement(mine, theirs, _held_out(model, corpus), BATCH_TOKENS)
    _report({"greedy_agreement": round(share, 4)}, figures_to)


def answers(
    model: Path | None,
    prompts: Path,
    rounds: int,
    seed: int,
    sampling: dict[str, Any],
    trace_to: Path | None,
    figures_to: Path | None,
) -> None:
    """Do answers end, do they loop; with `trace_to`, the routing of all of them as `steerpipe replay` reads it."""
    given, trace = answer_all(model, read_openers(prompts) * rounds, seed, sampling)
    for answer in given[:10]:
        print(f"> {answer.prompt}\n{answer.text}\n")
    if trace_to is not None:
        save_file(trace, trace_to)
    tokens = {"decoded_tokens": len(trace["routing"]), "prompt_tokens": len(trace["prompt_routing"])}
    _report(answer_figures(given) | tokens, figures_to)


def _held_out(model: Path, corpus: Path) -> Tokens:
    return tokenise(read_documents(corpus, "heldout.jsonl.gz"), load_tokenizer(model), close=False)


def _report(figures: dict[str, Any], path: Path | None) -> None:
    print(json.dumps(figures), flush=True)
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
