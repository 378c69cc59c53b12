"""The setting `quality` in a running engine: exact unless told otherwise, and told when it is not."""

import json
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from steerpipe import Pipeline
from steerpipe.core.config import EngineConfig, load_config
from steerpipe.core.errors import ConfigError, DamagedFileError, InputError
from steerpipe.core.events import Completion
from steerpipe.core.quality import MissPolicy, QualityPlan
from steerpipe.core.timeline import Timeline
from steerpipe.runtime.calibrating import open_subject
from steerpipe.runtime.models import EMBEDDED
from steerpipe.runtime.quality import choose
from steerpipe.runtime.quality_profile import load_profile, profile_of
from steerpipe.tiny import write_tiny

PROMPT = "The dog"
LOSSY = ("drop", "surrogate", "patch", "commit", "commit-true", "high", "balanced", "fast")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality") / "model"
    write_tiny("olmoe", folder)
    return folder


def opened(model: Path | None = None, **settings: Any) -> Pipeline:
    return Pipeline(model, **{"dtype": "float32", "threads": 1, "profile": False, "fast_memory": "12.5%"} | settings)


def answer(pipe: Pipeline, tokens: int = 12) -> Completion:
    return pipe.generate(PROMPT, raw=True, temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)


@cache
def exact_answer() -> Completion:
    with opened(fast_memory="100%") as whole:
        return answer(whole)


def waits_after_the_prompt(**settings: Any) -> tuple[int, Completion]:
    timeline = Timeline()
    with opened(timeline=timeline, pace="20MB", **settings) as pipe:
        stream = pipe.stream(PROMPT, raw=True, temperature=0.0, max_tokens=12, ignore_eos=True)
        events = iter(stream)
        next(events)
        before = len(timeline.spans("stream 0: waits"))
        for _ in events:
            pass
        assert before  # the prompt waits: it is exact
        return len(timeline.spans("stream 0: waits")) - before, stream.completion


def test_fast_puts_no_wait_on_the_compute_stream_in_decode() -> None:
    waits, completion = waits_after_the_prompt(quality="fast")
    assert waits == 0
    assert completion.substituted is not None and completion.substituted.share > 0.05
    assert completion.substituted.uses == 11 * 24 * 4


def test_the_exact_engine_does_wait_there() -> None:
    waits, completion = waits_after_the_prompt()
    assert waits > 10 and completion.substituted is None


@pytest.mark.parametrize("quality", LOSSY)
def test_prompts_are_exact_and_every_answer_says_what_was_substituted(quality: str) -> None:
    with opened(quality=quality) as pipe:
        first, second = answer(pipe), answer(pipe)
    assert first.logprobs[0] == exact_answer().logprobs[0]
    assert first.substituted is not None and second.substituted is not None
    assert first.substituted.uses == second.substituted.uses == 11 * 24 * 4  # of its own, not of both
    assert 0 < first.substituted.share < 1
    priced = quality in ("high", "balanced", "fast")
    assert (first.substituted.nats > 0) == priced


def test_an_answer_that_is_exact_by_name_is_the_exact_answer() -> None:
    with opened(quality="wait") as waiting, opened() as plain:
        assert waiting.quality is None and plain.quality is None
        assert exact_answer().logprobs == answer(waiting).logprobs == answer(plain).logprobs


def test_where_every_expert_is_resident_nothing_is_substituted() -> None:
    with opened(fast_memory="auto", quality="fast") as pipe:
        assert pipe.quality is None and answer(pipe).substituted is None


def test_patches_are_made_good_where_the_link_is_quick() -> None:
    with opened(quality="patch", fast_memory="25%") as pipe:
        counts = answer(pipe, tokens=24).substituted
    assert counts is not None and 0 < counts.patched <= counts.substituted


def test_a_batch_is_answered_apart() -> None:
    with opened(quality="drop") as pipe:
        both = pipe.generate_batch(["The dog", "A cat sat"], raw=True, max_tokens=6, ignore_eos=True, temperature=0.0)
    assert [each.substituted and each.substituted.uses for each in both] == [5 * 96, 5 * 96]


def test_a_plan_from_a_file_rules_layers_and_ranks(tmp_path: Path) -> None:
    exact, drops = ["wait"] * 4, ["wait", "wait", "wait", "drop"]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"policies": [exact] * 12 + [drops] * 12}))
    with opened(quality=str(file)) as pipe:
        counts = answer(pipe).substituted
        assert pipe.quality is not None and pipe.quality.chosen.plan.policies[12][3] is MissPolicy.DROP
    assert counts is not None and 0 < counts.share < 1 / 8


def wrong_plan(**changed: object) -> str:
    return json.dumps({"policies": [["drop"] * 4] * 24} | changed)


@pytest.mark.parametrize("fast_memory", ["12.5%", "auto"])
@pytest.mark.parametrize(
    "content",
    [
        "{", "[" * 100_000, "[]", "{}", None, wrong_plan(policies=[["drop"]]), wrong_plan(policies=[["dorp"] * 4] * 24),
        wrong_plan(policies=3), wrong_plan(policies=[["cpu"] * 4] * 24), wrong_plan(patch_layers=float("inf")),
        wrong_plan(patch_layers="2"), wrong_plan(horizon=1.5), wrong_plan(horizon=None),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused_also_where_every_expert_is_resident(
    tmp_path: Path, content: str | None, fast_memory: str
) -> None:
    file = tmp_path / "plan.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError):
        opened(quality=str(file), fast_memory=fast_memory)


def shipped() -> dict[str, Any]:
    file = profile_of(EMBEDDED)
    assert file is not None
    profile: dict[str, Any] = json.loads(file.read_text())
    return profile


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (["settings"], []),
        (["settings", "high"], []),
        (["settings", "high", "plan"], None),
        (["settings", "high", "plan", "policies"], [["wait"] * 4] * 3),
        (["settings", "high", "costs"], [[1.0]]),
        (["settings", "high", "costs"], [[1.0, 2.0], [1.0]]),
        (["settings", "high", "costs"], [[float("nan")] * 4] * 24),
        (["settings", "high", "costs"], [[float("inf")] * 4] * 24),
        (["settings", "high", "costs"], [[10**400] * 4] * 24),
        (["settings", "high", "costs"], [["1"] * 4] * 24),
        (["settings", "high", "costs"], {}),
        (["settings", "high", "mended"], [[-1.0] * 4] * 24),
        (["settings", "high", "kl_per_token"], "abc"),
        (["settings", "high", "kl_per_token"], None),
        (["settings", "balanced", "kl_per_token"], None),
        (["settings", "high", "kl_per_token"], True),
        (["settings", "high", "loss"], []),
        (["settings", "high", "loss", "kl"], "abc"),
        (["measurements"], {}),
        (["measurements", 0, "layers"], []),
        (["drifting"], 3),
        (["tokens"], "many"),
        (["exact_perplexity"], float("nan")),
    ],
)
def test_a_damaged_profile_is_refused_by_one_error(tmp_path: Path, where: list[Any], value: object) -> None:
    profile = shipped()
    *outer, last = where
    reduce(getitem, outer, profile)[last] = value
    file = tmp_path / "quality.json"
    file.write_text(json.dumps(profile))
    with pytest.raises(DamagedFileError) as raised:
        load_profile(file, profile["model"])
    assert str(raised.value).count("fix:") == 1


def test_a_profile_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "quality.json"
    file.write_text("[" * 100_000)
    with pytest.raises(DamagedFileError, match="cannot be read"):
        load_profile(file, "any")


def test_a_profile_of_other_layers_is_refused(tmp_path: Path) -> None:
    profile = shipped()
    high = profile["settings"]["high"]
    for table in (high["costs"], high["mended"], high["plan"]["policies"]):
        del table[3:]
    file = tmp_path / "quality.json"
    file.write_text(json.dumps(profile))
    with pytest.raises(ConfigError, match="3 layers and 4 ranks"):
        opened(quality="high", quality_profile=str(file))


@pytest.mark.parametrize("quality", ["exact", "high", "drop"])
def test_a_named_profile_that_is_not_there_is_told_where_every_expert_is_resident(tmp_path: Path, quality: str) -> None:
    with pytest.raises(InputError, match="does not exist"):
        opened(fast_memory="auto", quality=quality, quality_profile=str(tmp_path / "none.json"))


def test_a_model_that_nobody_measured_has_no_dial_but_policies(model: Path, tmp_path: Path) -> None:
    own = {"fast_memory": "20%", "cache_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="nobody has measured") as raised:
        opened(model, quality="balanced", **own)
    assert "calibrate" in raised.value.fix
    with pytest.raises(ConfigError, match="default vectors"):
        opened(model, quality="surrogate", **own)
    with opened(model, quality="drop", **own) as pipe:
        counts = answer(pipe).substituted
        assert counts is not None and counts.substituted
    with opened(model, quality="commit", **own) as pipe:
        assert answer(pipe).substituted is not None


@pytest.mark.parametrize(("layers", "ranks", "said"), [(1, 2, "one layer of experts"), (2, 8, "all 8 experts routed")])
def test_what_cannot_be_calibrated_is_not_sent_there(tmp_path: Path, layers: int, ranks: int, said: str) -> None:
    write_tiny("olmoe", tmp_path, num_hidden_layers=layers, num_experts_per_tok=ranks)
    own = {"fast_memory": "99%", "cache_dir": str(tmp_path)}
    for settings in ({"quality": "surrogate"}, {"quality": "balanced"}, {"cover": "4"}):
        with pytest.raises(ConfigError, match=said) as raised:
            opened(tmp_path, **own, **settings)
        assert "steerpipe calibrate" not in raised.value.fix
    with pytest.raises(ConfigError, match=said):
        open_subject(tmp_path, EngineConfig())
    with opened(tmp_path, quality="drop", **own) as pipe:
        assert answer(pipe).substituted is not None


def test_a_quality_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"quality": "best"}, {})
    assert "balanced" in raised.value.fix and "surrogate" in raised.value.fix


def test_a_uniform_commit_leaves_the_first_layer_exact() -> None:
    with opened() as pipe:
        chosen = choose(EngineConfig(quality="commit"), pipe.spec, pipe.folder, "any", form="int4")
    assert chosen is not None and chosen.plan == QualityPlan.uniform(MissPolicy.COMMIT, 24, 4)
    assert set(chosen.plan.policies[0]) == {MissPolicy.WAIT}
