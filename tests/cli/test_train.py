"""`steerpipe train` from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steerpipe.cli import app
from steerpipe.predict.files import load
from steerpipe.predict.stored import StoredPredictor
from steerpipe.runtime.prediction import reuse_for, settle_policy
from steerpipe.store.reader import open_pack
from steerpipe.trace.models import load_model
from steerpipe.train.models import routers_of_model


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"id": f"p{number}", "text": f"{number} words about {number * 7} and more"} for number in range(12)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def steerpipe(*words: object) -> Any:
    return CliRunner().invoke(app, [*map(str, words)])


def told(*words: object) -> dict[str, Any]:
    result = steerpipe("train", *words, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    said: dict[str, Any] = json.loads(result.stdout)
    return said


def test_what_is_counted_learns_from_a_trace(model: Path, prompts: Path, tmp_path: Path) -> None:
    assert steerpipe("trace", model, prompts, tmp_path / "traces", "--engine", "transformers").exit_code == 0
    said = told("transition", tmp_path / "traces", tmp_path / "out.safetensors")
    assert said["kind"] == "transition" and said["horizons"] == [1, 2, 3]
    assert said["bytes"] == (tmp_path / "out.safetensors").stat().st_size
    assert 0 < said["training"]["prompts"] < 12  # some are left for the arena
    assert isinstance(load(tmp_path / "out.safetensors"), StoredPredictor)


def test_a_head_learns_from_a_model_and_prompts(model: Path, prompts: Path, tmp_path: Path) -> None:
    words = ("--model", model, "--prompts", prompts, "--steps", 3, "--rows", 32, "--rank", 4, "--storage", "int8")
    said = told("head", tmp_path / "new" / "head-2.safetensors", *words, "--horizon", 2)
    assert said["horizons"] == [2] and said["training"]["tokens"] > 0
    made = load(tmp_path / "new" / "head-2.safetensors", routers_of_model(load_model(model).model))
    assert made.training is not None and made.training.model == "model"


@pytest.mark.parametrize("predictor", ["lookahead", "hybrid"])
def test_default_vectors_come_from_the_models_experts(
    predictor: str, model: Path, prompts: Path, tmp_path: Path
) -> None:
    words = ("--model", model, "--prompts", prompts, *(() if predictor == "lookahead" else ("--steps", 3)))
    assert told(predictor, tmp_path / "made.safetensors", *words)["kind"] == predictor


def test_a_blend_of_saved_parts(model: Path, prompts: Path, tmp_path: Path) -> None:
    source = ("--model", model, "--prompts", prompts)
    parts = [tmp_path / f"{name}.safetensors" for name in ("frequency", "previous")]
    for part in parts:
        told(part.stem, part, *source)
    given = [word for part in parts for word in ("--part", part)]
    assert told("blend", tmp_path / "blend.safetensors", *source, *given)["kind"] == "blend"
    result = steerpipe("train", "blend", tmp_path / "none.safetensors", *source)
    assert result.exit_code == 2 and "--part FILE" in result.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("crystal-ball", "a", "b"), "choose one of frequency"),
        (("frequency", "only-one"), "give TRACES OUT"),
        (("frequency", "nothing-here", "out"), "steerpipe trace"),
        (("frequency", "a", "b", "--storage", "int2"), "choose one of exact"),
        (("frequency", "a", "b", "--model", "m"), "give --prompts FILE"),
        (("frequency", "a", "b", "--steps", "3"), "it takes --storage"),
        (("head", "a", "b", "--loss", "ranking", "--window", "both"), "no use for --loss, --window"),
        (("reuse", "a", "b", "--storage", "int8"), "it takes --rank, --rate, --rows, --steps"),
        (("preattention", "a", "b", "--loss", "hinge"), "choose one of weighted, ranking"),
        (("head", "a", "b", "--rank", "0"), "give 1 or more"),
        (("reuse", "a", "b", "--steps", "-3"), "give 1 or more"),
        *((("reuse", "a", "b", "--rate", rate), "a learning rate above 0") for rate in ("0", "-1", "nan", "inf")),
    ],
)
def test_mistakes_exit_with_2_and_say_what_to_do(words: tuple[str, ...], expected: str) -> None:
    result = steerpipe("train", *words)
    assert result.exit_code == 2 and expected in result.stderr


def test_a_reuse_forecast_learns_from_prompts_or_from_a_trace_and_evicts(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    words = ("--steps", 3, "--rows", 32, "--rank", 4)
    said = told("reuse", tmp_path / "a.safetensors", "--model", model, "--prompts", prompts, *words)
    assert said["kind"] == "reuse" and said["training"]["tokens"] > 0
    assert steerpipe("trace", model, prompts, tmp_path / "plain", "--engine", "transformers").exit_code == 0
    result = steerpipe("train", "reuse", tmp_path / "plain", tmp_path / "out", *words)
    assert result.exit_code == 2 and "trace with states" in result.stderr and not (tmp_path / "out").exists()
    traced = ("--engine", "transformers", "--states")
    assert steerpipe("trace", model, prompts, tmp_path / "traces", *traced).exit_code == 0
    pack = tmp_path / "pack"
    assert steerpipe("pack", model, pack).exit_code == 0
    told("reuse", tmp_path / "traces", pack / "predictors" / "reuse.safetensors", *words)
    opened = open_pack(pack)
    forecast = reuse_for(pack, opened.spec, opened.manifest.source)
    assert forecast is not None and forecast.config.taps[-1] == len(opened.spec.moe_layers) - 1
    assert forecast.project.shape[-1] == 4 and settle_policy("auto", forecast) == "reuse"


def test_both_losses_of_the_pre_attention_predictor_can_be_chosen(model: Path, prompts: Path, tmp_path: Path) -> None:
    words = ("--model", model, "--prompts", prompts, "--steps", 3, "--rows", 32)
    for name in ("usual", "ranking", "weighted"):
        chosen = () if name == "usual" else ("--loss", name)
        told("preattention", tmp_path / f"{name}.safetensors", *words, *chosen)
    usual, ranking, weighted = ((tmp_path / f"{name}.safetensors") for name in ("usual", "ranking", "weighted"))
    routers = routers_of_model(load_model(model).model)
    learnt = [load(file, routers).tensors()["network.second"] for file in (usual, ranking, weighted)]
    assert learnt[0].equal(learnt[1]) and not learnt[1].equal(learnt[2])


def test_kinds_that_need_states_refuse_a_trace_without_them(model: Path, prompts: Path, tmp_path: Path) -> None:
    assert steerpipe("trace", model, prompts, tmp_path / "traces").exit_code == 0
    result = steerpipe("train", "head", tmp_path / "traces", tmp_path / "out")
    assert result.exit_code == 2 and "--prompts FILE" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_head_says_that_a_trace_with_states_has_no_routers(model: Path, prompts: Path, tmp_path: Path) -> None:
    words = ("--engine", "transformers", "--states")
    assert steerpipe("trace", model, prompts, tmp_path / "traces", *words).exit_code == 0
    result = steerpipe("train", "head", tmp_path / "traces", tmp_path / "out")
    assert result.exit_code == 2 and "the model's routers" in result.stderr and "--prompts FILE" in result.stderr


def test_a_file_carries_its_model_and_is_no_part_for_another(model: Path, prompts: Path, tmp_path: Path) -> None:
    part = tmp_path / "mlp.safetensors"
    told("mlp", part, "--model", model, "--prompts", prompts, "--steps", 2, "--rows", 32)
    mark = load(part).mark
    assert mark is not None and mark.weights and mark.hidden and mark.top_k
    given = ("--part", part, "--part", part, "--limit", 12)
    result = steerpipe("train", "blend", tmp_path / "blend.safetensors", "--prompts", prompts, *given)
    assert result.exit_code == 2 and "this one has 24 MoE layers, 60 experts" in result.stderr


@pytest.mark.parametrize("words", [("--horizon", 99), ("--target", 99), ("--window", "sideways")])
def test_choices_that_the_model_does_not_have(
    words: tuple[object, ...], model: Path, prompts: Path, tmp_path: Path
) -> None:
    result = steerpipe("train", "mlp", tmp_path / "out", "--model", model, "--prompts", prompts, *words)
    assert result.exit_code == 2 and not (tmp_path / "out").exists()


def test_the_result_is_told_in_words(model: Path, prompts: Path, tmp_path: Path) -> None:
    result = steerpipe("train", "frequency", tmp_path / "out", "--model", model, "--prompts", prompts)
    assert result.exit_code == 0 and "--predictor" in result.stdout and "parameters" in result.stdout
