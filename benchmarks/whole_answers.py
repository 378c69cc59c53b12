"""Whether whole answers keep what prediction saves: one pipeline, answers with prediction on and off by turns.

    PYTHONPATH=src:. python benchmarks/whole_answers.py --json FILE [--model MODEL] [--pace RATE] [--shares 0.5,0.25]

It answers one prompt with one seed, again and again, so every answer decodes the same tokens. The first answers end the
trial; then the pipeline's own switch turns what the trial chose off and on, and the order changes from pair to pair:
two pipelines of one process differ by more than is to be measured. No more pairs are asked than come before the next
trial; where the first one chose nobody there is nothing to compare. Times are those that an answer reports: sampling,
detokenising and the engine's own work are in them. At the end a second pipeline with the same settings says what it
begins by. Without a model a made-up one is written (4.4 GB): eight layers of 32 experts of Qwen1.5-MoE's size, and
lookahead by its own routers.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.predict_parts import Log, shares_of
from steerpipe import Pipeline
from steerpipe.predict import trials
from steerpipe.runtime import predicting
from steerpipe.tiny import write_tiny

PROMPT = "Can you tell me a story about a dog that lives by the sea?"
SHAPE = {
    "hidden_size": 2048, "num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 1408, "num_attention_heads": 16,
    "num_key_value_heads": 16, "mlp_only_layers": [], "max_position_embeddings": 1024,
}  # fmt: skip
MOST_TRIED = 4  # answers in which a trial of two predictors and two drivers ends


def answer(pipe: Pipeline, tokens: int) -> tuple[float, tuple[int, ...]]:
    """Milliseconds per token behind the first, and what was said."""
    said = pipe.generate(PROMPT, temperature=1.0, seed=7, max_tokens=tokens, ignore_eos=True)
    return said.timings.predicted_ms / (said.timings.predicted_n - 1), said.token_ids


def trial(pipe: Pipeline, tokens: int) -> int:
    """Answers until it has ended."""
    prediction = pipe.prediction
    assert prediction is not None and prediction.steering is not None, "nobody can predict here"
    for number in range(1, MOST_TRIED + 1):
        answer(pipe, tokens)
        if prediction.verdicts:
            return number
    raise SystemExit(f"no trial has ended after {MOST_TRIED} answers of {tokens} tokens: {prediction.line()}")


def pairs_between_trials(device: str, tokens: int) -> int:
    """Until the next trial somebody predicts in so many tokens; the answer that ended the first one has taken some."""
    rest_tokens = predicting.FIRST_REST_TOKENS if device == "cuda" else trials.FIRST_REST_TOKENS
    if (pairs := (rest_tokens - 1) // tokens - 1) < 1:
        raise SystemExit(f"the next trial comes after {rest_tokens} tokens: give fewer --tokens than {tokens}")
    return pairs


def by_turns(pipe: Pipeline, tokens: int, pairs: int) -> dict[str, Any]:
    """Of each pair, milliseconds per token with and without; the order changes."""
    assert pipe.prediction is not None and pipe.prediction.steering is not None
    steering, spent, said = pipe.prediction.steering, dict[bool, list[float]]({True: [], False: []}), set()
    begun = pipe.counters()
    for number in range(pairs):
        for on in (number % 2 == 0, number % 2 == 1):
            steering.switch(on)
            took, words = answer(pipe, tokens)
            spent[on].append(took)
            said.add(words)
    steering.switch(on=True)
    assert len(said) == 1, "prediction has changed an answer"
    ended = pipe.counters()
    assert begun is not None and ended is not None, "nothing ever misses"
    missed = ended.misses - begun.misses
    saved = [1 - on / off for on, off in zip(spent[True], spent[False], strict=True)]
    return {
        "on_ms": [round(each, 4) for each in spent[True]], "off_ms": [round(each, 4) for each in spent[False]],
        "different_tokens": len(set(next(iter(said)))), "misses_per_token": round(missed / (2 * pairs * tokens), 2),
        "saved": round(statistics.median(saved), 4), "saved_by_pair": [round(each, 4) for each in saved],
    }  # fmt: skip


def one_share(
    model: Path | str | None, settings: dict[str, Any], share: float, tokens: int, pairs: int
) -> dict[str, Any]:
    settings = settings | {"fast_memory": f"{share:%}"}
    with Pipeline(model, **settings) as pipe:
        answers = trial(pipe, tokens)
        assert pipe.prediction is not None
        verdict = pipe.prediction.verdicts[0]
        found: dict[str, Any] = {
            "share": share, "trial_answers": answers, "verdict": verdict.line(),
            "trial_ms": {n: round(s * 1e3, 4) for n, s in zip(verdict.names, verdict.seconds, strict=True)},
        }  # fmt: skip
        if verdict.chosen:
            found |= by_turns(pipe, tokens, min(pairs, pairs_between_trials(pipe.config.device, tokens)))
            assert len(pipe.prediction.verdicts) == 1, "another trial has come between"
    with Pipeline(model, **settings) as again:
        assert again.prediction is not None
        begins = again.prediction.line()
        first, _ = answer(again, tokens)
        chosen = None if (speaks := again.prediction.steering) is None else speaks.predictor
        return found | {
            "next_run_begins": begins, "next_run_first_answer_ms": round(first, 4),
            "next_run_speaker": None if chosen is None else chosen.name,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a hub name, or nano for the embedded model; else one is made up")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pace", help="of the link, as steerpipe takes it")
    parser.add_argument("--shares", default="0.25")
    parser.add_argument("--pairs", type=int, default=8, help="of answers, at most")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    log = Log(given.json, model=given.model or SHAPE, tokens=given.tokens, pace=given.pace, found=[])
    with tempfile.TemporaryDirectory() as folder:
        model, settings = model_in(Path(folder), given.model), {"cache_dir": str(Path(folder) / "cache")}
        settings |= {"device": given.device} | ({"pace": given.pace} if given.pace else {})
        for share in shares_of(given.shares):
            found = one_share(model, settings, share, given.tokens, given.pairs)
            log.add("found", [*log.found["found"], found])


def model_in(folder: Path, named: str | None) -> Path | str | None:
    if named is not None:
        return None if named == "nano" else named
    write_tiny("qwen2_moe", folder / "model", dtype="bfloat16", **SHAPE)
    return folder / "model"


if __name__ == "__main__":
    main()
