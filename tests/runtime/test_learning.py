"""What a model's answers teach is there in the next run, changes no bit, and never stops one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from steerpipe import Pipeline
from steerpipe.core.events import Completion
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import RouterProbe
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.model.moe import run_experts
from steerpipe.predict.running_openings import LEAST_MET, RunningOpenings
from steerpipe.predict.trials import Verdict
from steerpipe.runtime import learning
from steerpipe.runtime.learning import EVERY, SELDOM, OpeningsLearner, openings_file, vectors_file
from steerpipe.store.formats import parse_dense_format, parse_expert_format
from steerpipe.store.pack import PackOptions, write_pack
from steerpipe.tiny import write_tiny

PROMPT = "The quick brown fox jumps over the lazy dog, again and again. " * 2
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 3, "raw": True}
LAYERS, TOP_K = 3, 2  # of the tiny model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning")
    write_tiny("qwen2_moe", folder / "checkpoint")
    options = PackOptions(parse_expert_format("float32"), parse_dense_format("native"))
    write_pack(open_checkpoint(folder / "checkpoint"), folder / "pack", options)
    return folder / "pack"


@pytest.fixture
def pack(whole: Path) -> Iterator[Path]:
    """Nothing was learnt about it yet."""
    yield whole
    for file in whole.glob("profile*"):
        file.unlink()


def opened(pack: Path, **settings: Any) -> Pipeline:
    return Pipeline(pack, **{"fast_memory": "50%", "dtype": "float32", "threads": 1} | settings)


def answer(pack: Path, **settings: Any) -> Completion:
    with opened(pack, **settings) as pipe:
        return pipe.generate(PROMPT, **GREEDY)


def names(pipe: Pipeline) -> list[str]:
    assert pipe.prediction is not None and pipe.prediction.steering is not None
    return [each.name for each in pipe.prediction.steering._predictors]  # type: ignore[attr-defined]


def test_a_model_never_seen_looks_ahead_with_vectors_that_its_own_answers_taught(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "LEAST_TOKENS", 24)
    with opened(pack) as first:
        assert names(first) == ["lookahead + shared"]
        for number in range(3):
            first.generate(f"{number} {PROMPT}", **GREEDY)
    with opened(pack) as second:
        assert names(second) == ["lookahead + defaults + shared"]
        assert second._profile is not None and second._profile.learning is not None
        learner = second._profile.learning.defaults
        assert learner is not None and learner.tokens >= 24


def test_what_is_learnt_changes_no_bit(pack: Path) -> None:
    exact = answer(pack, fast_memory="100%", profile=False)
    for _ in range(3):
        got = answer(pack)
        assert (got.token_ids, got.logprobs, got.top_logprobs) == (exact.token_ids, exact.logprobs, exact.top_logprobs)


def test_a_vector_is_the_mean_of_what_its_expert_gave_in_some_steps_and_never_in_prompts(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[tuple[int, int], list[torch.Tensor]] = {}
    steps = {"prompt": 0, "decode": 0}

    def watched(x: torch.Tensor, route: Any, valid: torch.Tensor, lease: Any, *, cell: int, **named: Any) -> Any:
        outputs = run_experts(x, route, valid, lease, cell=cell, **named)
        layer = watched.layer % LAYERS  # type: ignore[attr-defined]
        watched.layer += 1  # type: ignore[attr-defined]
        steps["prompt" if len(valid) > 1 else "decode"] += layer == 0
        if len(valid) == 1 and steps["decode"] % EVERY == 0:
            for row, experts in enumerate(route.experts.tolist()):
                for rank, expert in enumerate(experts):
                    given.setdefault((layer, expert), []).append(outputs[row, rank].clone())
        return outputs

    watched.layer = 0  # type: ignore[attr-defined]
    with opened(pack) as pipe, monkeypatch.context() as patched:
        patched.setattr("steerpipe.model.decoder.run_experts", watched)
        pipe.generate(PROMPT, **GREEDY)
        assert steps["prompt"] and steps["decode"] == 23 and len(pipe.spec.moe_layers) == LAYERS
        assert pipe._profile is not None and pipe._profile.learning is not None
        learner = pipe._profile.learning.defaults
        assert learner is not None
        means = learner.running.means()
        for (layer, expert), outputs in given.items():
            assert int(means.counts[layer, expert]) == len(outputs)
            torch.testing.assert_close(means.vectors[layer, expert], torch.stack(outputs).mean(0))
        assert int(means.counts.sum()) == sum(map(len, given.values()))


def test_learning_ends_when_it_has_enough(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "ENOUGH_TOKENS", 1)
    with opened(pack) as pipe:
        pipe.generate(PROMPT, **GREEDY)
        assert pipe._profile is not None and pipe._profile.learning is not None
        learner = pipe._profile.learning.defaults
        assert learner is not None and learner.tokens == 1


def test_a_lossy_answer_teaches_no_vectors(pack: Path) -> None:
    answer(pack, quality="drop")
    assert (pack / "profile.json").is_file()
    assert not vectors_file(pack / "profile.json").exists()


def test_nothing_is_learnt_where_nobody_wants_it(pack: Path) -> None:
    answer(pack, profile=False)
    assert not list(pack.glob("profile*"))


def test_the_embedded_model_has_all_that_could_be_learnt(tmp_path: Path) -> None:
    with Pipeline(fast_memory="25%", threads=1, cache_dir=str(tmp_path)) as pipe:
        assert pipe._profile is not None and pipe._profile.learning is not None
        assert pipe._profile.learning.defaults is None and pipe._profile.learning.openings is None
        pipe.generate("Hello", max_tokens=2)
    assert [each.suffix for each in (tmp_path / "profiles").iterdir()] == [".json"]


def test_a_draft_of_the_next_run_asks_the_table_that_answers_have_filled(pack: Path) -> None:
    with opened(pack) as first:
        assert first._drafting is not None and not first._drafting.table.answer.any()
        for _ in range(LEAST_MET):
            first.generate(PROMPT, **GREEDY | {"max_tokens": 4})
    with opened(pack) as second:
        assert second._drafting is not None
        table = second._drafting.table
        assert table.answer.sum(1) == pytest.approx([TOP_K] * LAYERS)
        assert len(table.tokens) and table.routing_of({int(table.tokens[0]): 1.0}).any()


def test_a_prompt_alone_teaches_nothing_and_a_vector_that_is_kept_is_of_many_tokens(pack: Path) -> None:
    with opened(pack) as pipe:
        pipe.score(PROMPT, raw=True)
    assert not vectors_file(pack / "profile.json").exists() and not openings_file(pack / "profile.json").exists()
    with opened(pack) as pipe:
        for number in range(2):
            pipe.generate(f"{number} {PROMPT}", **GREEDY)
        assert pipe._profile is not None and pipe._profile.learning is not None
        learner = pipe._profile.learning.defaults
        assert learner is not None and ((learner.running.counts > 0) & (learner.running.counts < LEAST_MET)).any()
    found = load_file(vectors_file(pack / "profile.json"))
    assert ((found["counts"] == 0) | (found["counts"] >= LEAST_MET)).all() and found["counts"].any()


def test_what_is_typed_is_in_no_file_of_what_was_learnt(pack: Path) -> None:
    with opened(pack) as pipe:
        for _ in range(LEAST_MET):
            done = pipe.generate(PROMPT, **GREEDY | {"max_tokens": 4})
        prompt = set(pipe.encode(PROMPT, raw=True)) - set(done.token_ids)
    with np.load(openings_file(pack / "profile.json")) as found:
        kept = set(found["tokens"].tolist())
    assert kept and kept <= set(done.token_ids) and not kept & prompt


def test_only_the_first_steps_of_an_answer_are_its_beginning() -> None:
    learner = OpeningsLearner(RunningOpenings(2, 4))

    def step(answer: int, *, fails: bool = False) -> None:
        if not learner.begin((SequenceId(answer),), torch.zeros(1, dtype=torch.int64), decode=True):
            return
        for layer in (5, 9):
            chosen = torch.tensor([[1, 3]])
            learner.routed(RouterProbe(layer, torch.zeros(1, 4), chosen, torch.ones(1, 2), None))
            if fails:
                return
        learner.end()

    for _ in range(learning.FIRST_TOKENS + 2 * SELDOM):
        step(1)
    assert learner.running.answer_tokens == learning.FIRST_TOKENS
    assert learner.running._met[0] == learning.FIRST_TOKENS + 2  # of the rest some steps count
    step(2, fails=True)
    step(2)
    assert learner.running.answer_tokens == learning.FIRST_TOKENS + 1
    assert learner.running.answer.tolist() == [[0, learning.FIRST_TOKENS + 1] * 2] * 2
    assert not learner.begin((SequenceId(1),), torch.zeros(1, dtype=torch.int64), decode=False)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\0" * 400])
def test_damaged_files_cost_what_was_learnt_and_nothing_else(pack: Path, content: bytes) -> None:
    exact = answer(pack)
    for file in (vectors_file(pack / "profile.json"), openings_file(pack / "profile.json")):
        assert file.is_file()
        file.write_bytes(content)
    with opened(pack) as pipe:
        assert names(pipe) == ["lookahead + shared"]
        assert pipe.generate(PROMPT, **GREEDY).token_ids == exact.token_ids
    assert vectors_file(pack / "profile.json").stat().st_size > 1000


def test_vectors_of_another_model_are_left_aside(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "LEAST_TOKENS", 1)
    write_tiny("qwen2_moe", tmp_path / "checkpoint", seed=1)
    options = PackOptions(parse_expert_format("float32"), parse_dense_format("native"))
    write_pack(open_checkpoint(tmp_path / "checkpoint"), tmp_path / "other", options)
    with opened(pack) as pipe:
        for number in range(6):
            pipe.generate(f"{number} {PROMPT}", **GREEDY)
    with opened(pack) as pipe:
        assert names(pipe) == ["lookahead + defaults + shared"]
    for file in (vectors_file(pack / "profile.json"), openings_file(pack / "profile.json")):
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    with opened(tmp_path / "other") as pipe:
        assert names(pipe) == ["lookahead + shared"]
        assert pipe._drafting is not None and not pipe._drafting.table.answer.any()


@pytest.mark.parametrize("wrong", ["narrow", "fewer layers", "negative", "fractions", "not a number"])
def test_vectors_that_do_not_fit_together_are_left_aside_and_replaced(pack: Path, wrong: str) -> None:
    answer(pack)
    file = vectors_file(pack / "profile.json")
    with safe_open(file, framework="pt") as opened_file:
        metadata = opened_file.metadata()
    whole = load_file(file)
    counts, vectors = whole["counts"].clone() + 500, whole["vectors"].clone()
    if wrong == "not a number":
        vectors[0, 0, 0] = float("nan")
    changed = {
        "narrow": counts[:, :2], "fewer layers": counts[:1], "negative": -counts, "fractions": counts.float(),
    }.get(wrong, counts)  # fmt: skip
    save_file(whole | {"counts": changed.contiguous(), "vectors": vectors}, file, metadata)
    with opened(pack) as pipe:
        assert names(pipe) == ["lookahead + shared"]
        pipe.generate(PROMPT, **GREEDY)
    again = load_file(file)
    assert again["vectors"].isfinite().all() and again["counts"].shape == whole["counts"].shape


def test_numbers_that_are_none_are_not_kept(pack: Path) -> None:
    with opened(pack) as pipe:
        pipe.generate(PROMPT, **GREEDY)
        assert pipe._profile is not None and pipe._profile.learning is not None
        learner = pipe._profile.learning.defaults
        assert learner is not None
        learner.running.sums[0, 0, 0] = float("nan")
    assert not vectors_file(pack / "profile.json").exists()
    assert openings_file(pack / "profile.json").is_file()


def test_a_full_disk_costs_what_was_learnt_and_no_answer(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("steerpipe.predict.files.write_whole", full)
    monkeypatch.setattr("steerpipe.predict.running_openings.write_whole", full)
    assert len(answer(pack).token_ids) == 24
    assert sorted(each.name for each in pack.glob("profile*")) == ["profile.json"]


def test_a_verdict_is_kept_and_the_next_run_of_the_same_settings_begins_by_it(pack: Path) -> None:
    found = Verdict(("none", "lookahead + shared"), (2.0, 1.0), 1)
    with opened(pack) as first:
        first.generate("abc", **GREEDY | {"max_tokens": 2})
        assert first.prediction is not None and first.prediction.past is None
        first.prediction.verdicts.append(found)
    with opened(pack) as same:
        assert same.prediction is not None and same.prediction.past == found
        assert same.prediction.line() == "prediction by lookahead + shared saved 50% per token in an earlier run: on"
        assert same.prediction.steering is not None and same.prediction.steering.predictor is not None
        same.generate("abc", **GREEDY | {"max_tokens": 2})
    with opened(pack, fast_memory="25%") as other:
        assert other.prediction is not None and other.prediction.past is None
        other.generate("abc", **GREEDY | {"max_tokens": 2})
    with opened(pack) as later:  # kept, although no trial has ended since
        assert later.prediction is not None and later.prediction.past == found


def test_a_verdict_of_many_short_runs_ago_counts_no_more(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Verdict(("none", "lookahead + shared"), (2.0, 1.0), 1)
    with opened(pack) as first:
        first.generate("abc", **GREEDY | {"max_tokens": 8})
        assert first.prediction is not None
        first.prediction.verdicts.append(found)
    (entry,) = json.loads((pack / "profile.json").read_text())["verdicts"].values()
    each = entry["tokens"]
    assert 8 <= each <= 16
    monkeypatch.setattr("steerpipe.runtime.profiles.LONGEST_REST_TOKENS", 2.5 * each)
    for known in (found, found, None, None):
        with opened(pack) as later:
            assert later.prediction is not None and later.prediction.past == known
            later.generate("abc", **GREEDY | {"max_tokens": 8})


@pytest.mark.parametrize(
    "wrong",
    [
        None, [], "x", {"names": ["none", "a"]}, {"names": ["none"], "seconds": [1.0], "chosen": 0},
        {"names": ["none", "a"], "seconds": [1.0, 2.0], "chosen": 2},
        {"names": ["none", "a"], "seconds": [1.0, 2.0], "chosen": True},
        {"names": ["none", "a"], "seconds": [1.0, "x"], "chosen": 0},
        {"names": ["none", "a"], "seconds": [1.0, 0.0], "chosen": 0},
        {"names": 3, "seconds": [1.0, 2.0], "chosen": 0},
        {"names": ["none", "of another version"], "seconds": [2.0, 1.0], "chosen": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_verdict_that_is_none_or_of_others_is_left_aside(pack: Path, wrong: object) -> None:
    with opened(pack) as first:
        first.generate(PROMPT, **GREEDY | {"max_tokens": 2})
        assert first.prediction is not None
        first.prediction.verdicts.append(Verdict(("none", "lookahead + shared"), (2.0, 1.0), 1))
    file = pack / "profile.json"
    said = json.loads(file.read_text())
    (setting,) = said["verdicts"]
    file.write_text(json.dumps(said | {"verdicts": {setting: wrong}}))
    with opened(pack) as second:
        assert second.prediction is not None and second.prediction.past is None
        assert second.prediction.steering is not None and second.prediction.steering.predictor is None
