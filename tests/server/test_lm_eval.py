"""lm-eval's `local-completions` scores over HTTP what the pipeline scores in process.

lm-eval and what it needs beyond our own packages lie in build/lm-eval, put there by `make test-slow` from
tests/server/lm-eval.lock. They are seen by a process of their own, and by nothing else.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steerpipe import Pipeline
from tests.server.running import Running

LM_EVAL = Path(__file__).parents[2] / "build" / "lm-eval"
CHOICES = ("blue", "a cat", "forty-two", "nothing at all")
QUESTIONS = [f"Question {place}: what is {place} plus {place}? Answer:" for place in range(12)]
TASK = """
task: local_choices
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
"""


def own_score(pipe: Pipeline, question: str, choice: str) -> float:
    """The log probability of the choice after the question, as lm-eval puts them together: with a space between."""
    context, whole = pipe.encode(question, raw=True), pipe.encode(f"{question} {choice}", raw=True)
    assert whole[: len(context)] == context
    scores = pipe.score(whole).prompt_logprobs[len(context) - 1 :]
    return sum(entry.logprob for entry in scores)


def run_lm_eval(server: Running, folder: Path) -> dict[str, Any]:
    """The only sample file that lm-eval wrote, by question; and its accuracy."""
    documents = folder / "documents.json"
    lines = [{"question": q, "choices": list(CHOICES), "label": place % 4} for place, q in enumerate(QUESTIONS)]
    documents.write_text("\n".join(json.dumps(line) for line in lines))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "local_choices.yaml").write_text(TASK.format(file=documents))
    model = f"model=tiny-moe,base_url={server.url}/v1/completions,tokenizer={server.folder},num_concurrent=4"
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", model, "--tasks",
        "local_choices", "--include_path", str(folder / "tasks"), "--output_path", str(folder / "out"), "--log_samples",
    ]  # fmt: skip
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(LM_EVAL)]),
        "OPENAI_API_KEY": "none", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"),
    }  # fmt: skip
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(next((folder / "out").rglob("results_*.json")).read_text())["results"]["local_choices"]
    samples = [json.loads(x) for x in next((folder / "out").rglob("samples_*.jsonl")).read_text().splitlines()]
    return {"accuracy": results["acc,none"], "samples": {s["doc"]["question"]: s["filtered_resps"] for s in samples}}


@pytest.mark.slow
def test_lm_eval_scores_over_http_what_the_pipeline_scores_in_process(server: Running, tmp_path: Path) -> None:
    if not (LM_EVAL / "lm_eval").is_dir():
        pytest.skip("lm-eval is not there; make test-slow fetches it")
    found = run_lm_eval(server, tmp_path)
    right = 0
    with Pipeline(server.folder, dtype="float32", threads=1, profile=False) as pipe:
        for place, question in enumerate(QUESTIONS):
            own = [own_score(pipe, question, choice) for choice in CHOICES]
            theirs = [float(score) for score, _ in found["samples"][question]]
            assert theirs == pytest.approx(own, abs=1e-4)
            right += own.index(max(own)) == place % 4
    assert found["accuracy"] == pytest.approx(right / len(QUESTIONS))
