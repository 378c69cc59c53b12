"""What a model that nobody has trained predictors for teaches while it answers, and what the next run gains by it.

    python benchmarks/learnt_online.py [--json FILE] [--runs 4,12,32] [--rounds 5]

nano without its predictors answers in runs of a real pipeline. After each: recall of router lookahead with the default
vectors that lie beside the profile then, on other prompts, beside none and those that were trained on 0.5 M tokens.
Then time: what learning costs a step; and with all of nano's predictors behind a slowed link, the first tokens of a run
that knows how earlier trials of prediction ended, over one that does not (same warm cache; rounds take turns).
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.predictor_corpora import synthetic_chats
from benchmarks.predictor_material import CONTEXT, load_nano
from steerpipe.arena.foresee import foresee, recording_of
from steerpipe.predict import files
from steerpipe.predict.lookahead import DefaultVectors, RouterLookahead
from steerpipe.predict.records import PackedTrace, pack_traces
from steerpipe.predict.routers import Routers
from steerpipe.predict.running_defaults import RunningDefaults
from steerpipe.predict.shipped import for_model
from steerpipe.runtime.learning import vectors_file
from steerpipe.runtime.models import find_model
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.trace.combinatorial import combinatorial_prompts
from steerpipe.trace.live import TokenSequence, read_geometry, trace_texts
from steerpipe.train.models import routers_of_model

HORIZONS = (1, 2)
TESTED, ANSWER, FIRST_TOKENS = 12, 48, 64
PACE = "8MB"  # a block takes about three layers' compute: prediction pays
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PLAIN: dict[str, Any] = {"fast_memory": "25%", "dtype": "float32", "threads": 1}


def tested() -> tuple[PackedTrace, Routers]:
    """The first prompts with their answers, traced with hidden states."""
    model, folder = load_nano("cpu")
    chats = synthetic_chats(model, folder, TESTED)
    said = [TokenSequence(each["id"], each["tokens"][:CONTEXT], each["prompt_tokens"]) for each in chats]
    traced = list(trace_texts(model, said, states=True, state_dtype=torch.float32, max_tokens=CONTEXT))
    return pack_traces(traced, read_geometry(model)), routers_of_model(model)


def recalls(trace: PackedTrace, routers: Routers, defaults: DefaultVectors | None) -> dict[str, list[float]]:
    """At each horizon, without and with the exact shared expert."""
    top_k, truth = trace.geometry.top_k, recording_of(trace, "test").routing
    found = {}
    for shared in (False, True):
        predictor = RouterLookahead(routers, shared=shared, defaults=defaults, horizons=HORIZONS)
        ranked = foresee(predictor, trace, HORIZONS, top_k).ranked
        hits = (ranked[..., None] == truth[None, :, :, None, :]).any(-1)
        found["shared" if shared else "alone"] = [round(float(each), 4) for each in hits.mean((1, 2, 3))]
    return found


def learn(folder: Path, prompts: Sequence[str]) -> int:
    """One run; how many tokens its vectors are of."""
    with Pipeline(folder, **PLAIN) as pipe:
        for prompt in prompts:
            pipe.generate(prompt, max_tokens=ANSWER, **GREEDY)
        assert pipe._profile is not None and pipe._profile.learning is not None  # noqa: SLF001
        learner = pipe._profile.learning.defaults  # noqa: SLF001
        assert learner is not None, "somebody has trained this model's predictors"
        return learner.tokens


def cost(folder: Path, prompt: str, rounds: int) -> list[float]:
    """Time per token with learning over that without, by rounds."""
    ratios = []
    for number in range(rounds):
        ms = {}
        for learns in (True, False) if number % 2 else (False, True):
            with Pipeline(folder, **PLAIN | {"fast_memory": "90%", "predict": "off", "profile": learns}) as pipe:
                pipe.generate(prompt, max_tokens=8, **GREEDY)
                ms[learns] = pipe.generate(prompt, max_tokens=FIRST_TOKENS, **GREEDY).timings.predicted_ms
        ratios.append(ms[True] / ms[False])
    return ratios


def remembered(cache: Path, prompt: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a run's first tokens, with and without an earlier verdict, over the same warm cache."""
    settings = PLAIN | {"pace": PACE, "cache_dir": str(cache)}
    with Pipeline(**settings) as pipe:
        while pipe.prediction is not None and not pipe.prediction.verdicts:
            pipe.generate(prompt, max_tokens=FIRST_TOKENS, **GREEDY)
        line = None if pipe.prediction is None else pipe.prediction.line()
    (file,) = (cache / "profiles").glob("*.json")
    known = file.read_text()
    unknown = json.dumps(json.loads(known) | {"verdicts": {}})
    ms: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(rounds):
        for way in ("with", "without") if number % 2 else ("without", "with"):
            file.write_text(known if way == "with" else unknown)
            with Pipeline(**settings) as pipe:
                done = pipe.generate(prompt, max_tokens=FIRST_TOKENS, **GREEDY)
                ms[way].append(done.timings.predicted_ms)
    return {"line": line, "ms": ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", default="1,2,8,32", help="answers of each run")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    trace, routers = tested()
    shipped = for_model(find_model(None))
    assert shipped is not None, "the package has no predictors"
    trained = files.load(shipped.files["lookahead"], routers)
    assert isinstance(trained, RouterLookahead), "lookahead is one"
    found: dict[str, Any] = {"tested_tokens": trace.rows, "none": recalls(trace, routers, None)}
    found["trained"] = recalls(trace, routers, trained.defaults)
    print(json.dumps(found), flush=True)
    prompts = [each.content for each in combinatorial_prompts()[TESTED:]]
    with tempfile.TemporaryDirectory() as scratch:
        folder, begun = Path(scratch) / "nano", 0
        shutil.copytree(find_model(None), folder)
        for answers in map(int, options.runs.split(",")):
            tokens = learn(folder, prompts[begun : begun + answers])
            begun += answers
            kept = files.load(vectors_file(folder / "profile.json"), routers)
            assert isinstance(kept, RouterLookahead) and kept.defaults is not None, "vectors were learnt"
            line = {"tokens": tokens} | recalls(trace, routers, RunningDefaults.of(kept.defaults).drawn())
            line["undrawn"] = recalls(trace, routers, kept.defaults)
            found.setdefault("learnt", []).append(line)
            print(json.dumps(line), flush=True)
        found["cost"] = cost(folder, prompts[0], options.rounds)
        print(f"a step while learning, over one that does not: {statistics.median(found['cost']):.4f}", flush=True)
        found["remembered"] = remembered(Path(scratch) / "cache", prompts[1], options.rounds)
    ms = {way: statistics.median(each) for way, each in found["remembered"]["ms"].items()}
    print(f"{found['remembered']['line']}\nfirst {FIRST_TOKENS} tokens of the next run: {ms}")
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
