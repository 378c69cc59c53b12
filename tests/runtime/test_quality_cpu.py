"""`--quality cpu` without a GPU: what lies in RAM is computed there, and not a bit changes."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from steerpipe import Pipeline
from steerpipe.core.errors import ConfigError, TransferError
from steerpipe.core.events import Completion
from steerpipe.model.checkpoint import open_checkpoint
from steerpipe.model.moe import Nearby, run_experts
from steerpipe.store.formats import ExpertFormat
from steerpipe.store.pack import write_pack
from steerpipe.store.plan import PackOptions
from steerpipe.tiny import write_tiny
from steerpipe.transfer.places import ram_tier
from steerpipe.transfer.ram import RamTier
from steerpipe.transfer.source import LadderSource

LAYERS, TOP_K = 4, 2


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("cpu")
    write_tiny("olmoe", folder / "model")
    packs = {}
    for form in ("int8", "bfloat16", "int4"):
        write_pack(open_checkpoint(folder / "model"), folder / form, PackOptions(ExpertFormat(form)))
        packs[form] = folder / form
    return packs


def opened(model: Path, **settings: Any) -> Pipeline:
    own = {"dtype": "float32", "threads": 1, "profile": False, "fast_memory": "25%", "ram": "4MiB", "pace": "2MB"}
    return Pipeline(model, **own | {"quality": "cpu", "predict": "off"} | settings)


def resident(model: Path) -> Pipeline:
    return Pipeline(model, dtype="float32", threads=1, profile=False)


def answer(pipe: Pipeline) -> Completion:
    return pipe.generate("The dog", raw=True, temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3)


def tier_of(pipe: Pipeline) -> RamTier:
    source = pipe.experts
    assert isinstance(source, LadderSource)
    tier = ram_tier(source.link)
    assert tier is not None
    return tier


@pytest.mark.parametrize("form", ["int8", "bfloat16"])
def test_the_answer_is_exact_and_says_what_was_computed_where_it_lies(models: dict[str, Path], form: str) -> None:
    with resident(models[form]) as whole, opened(models[form]) as pipe:
        exact, told = answer(whole), answer(pipe)
        assert told.logprobs == exact.logprobs
        counts = told.substituted
        assert counts is not None and pipe.quality is not None
        assert counts.uses == 9 * LAYERS * TOP_K and counts.substituted == 0
        assert 0 < counts.computed < counts.uses
        assert f"{counts.computed} computed where they lie" in pipe.quality.line(counts)
        assert pipe.quality.of(counts).as_json()["computed"] == counts.computed
        tier_of(pipe).check_integrity()


def test_a_batch_is_exact_too(models: dict[str, Path]) -> None:
    prompts = ["The dog", "A cat sat", "Once upon"]
    asked: dict[str, Any] = {"raw": True, "temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
    with resident(models["int8"]) as whole, opened(models["int8"]) as pipe:
        exact, told = whole.generate_batch(prompts, **asked), pipe.generate_batch(prompts, **asked)
        assert [each.logprobs for each in told] == [each.logprobs for each in exact]
        assert all(each.substituted is not None and each.substituted.computed for each in told)


def test_ranks_of_a_plan_may_be_computed_while_others_are_dropped(models: dict[str, Path], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"policies": [["cpu", "drop"]] * LAYERS}))
    with opened(models["int8"], quality=str(plan)) as pipe:
        counts = answer(pipe).substituted
    assert counts is not None and counts.computed and counts.substituted


def test_an_answer_that_is_cancelled_or_fails_leaves_nothing_held(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, nearby: Nearby | None, **named: Any) -> Tensor:
        if nearby is not None:
            raise TransferError("the link is gone", fix="none")
        return run_experts(*given, nearby=nearby, **named)

    with opened(models["int8"]) as pipe:
        stream = iter(pipe.stream("The dog", raw=True, temperature=0.0, max_tokens=30, ignore_eos=True))
        for _ in range(4):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        tier_of(pipe).check_integrity()
        with monkeypatch.context() as patched:  # between the decision and the computing
            patched.setattr("steerpipe.model.decoder.run_experts", fail)
            with pytest.raises(TransferError):
                answer(pipe)
            with pytest.raises(AssertionError, match="never ended"):
                tier_of(pipe).check_integrity()
        answer(pipe)
        tier_of(pipe).check_integrity()


@pytest.mark.parametrize("fast_memory", ["25%", "auto"])
def test_other_formats_are_refused_with_the_reason(models: dict[str, Path], fast_memory: str) -> None:
    with pytest.raises(ConfigError, match="int4 experts: the CPU computes bfloat16 and int8") as raised:
        opened(models["int4"], fast_memory=fast_memory, ram=None)
    assert "--experts int8" in raised.value.fix


def test_without_ram_behind_the_slots_it_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="no expert lies in RAM"):
        opened(models["int8"], ram=None)
