"""`steerpipe arena` from the command line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steerpipe.cli import app
from tests.arena.traces import GEOMETRY, draw, write

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "write_a_predictor.py"
QUICK = ["--machines", "none", "--horizons", "1,2"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("arena") / "traces", draw(prompts=30, tokens=30))


def test_a_new_predictor_enters_the_arena_by_one_option(traces: Path) -> None:
    result = CliRunner().invoke(app, ["arena", str(traces), *QUICK, "--plugin", str(EXAMPLE), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    by_name = {each["name"]: each for each in found["entries"]}
    assert by_name["followers"]["horizons"][0]["overall"]["recall"] > 0.95  # the rule is planted
    assert abs(found["control_excess"]) < 0.2
    assert found["setting"]["train_prompts"] + found["setting"]["test_prompts"] == 30


def test_tables_pictures_and_page_are_written(traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["arena", str(traces), "--horizons", "1", "--machines", "few", "--replay-tokens", "20", "--jobs", "1"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "transition" in result.stdout and "TPOT" in result.stdout
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {
        "arena.html", "arena.json", "recall-by-layer.svg", "recall-and-cost.svg", "calibration.svg", "worth.svg",
    }  # fmt: skip
    assert len(json.loads((tmp_path / "out" / "arena.json").read_text())["worth"]) == 6


def test_a_predictor_that_peeks_is_named_and_the_exit_says_so(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "cheat.py").write_text(
        "from steerpipe.predict.protocol import Cost\n"
        "class Cheat:\n"
        "    name, horizons = 'cheat', (1,)\n"
        "    def probabilities(self, sight): return sight.hot(sight.decision.target)\n"
        "    def cost(self): return Cost(0, 0)\n"
    )
    result = CliRunner().invoke(app, ["arena", str(traces), *QUICK, "--plugin", str(tmp_path / "cheat.py")])
    assert result.exit_code == 2
    assert "cheat is out: PeekError" in result.stdout


def test_a_predictor_that_reads_the_next_token_is_caught(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "next.py").write_text(
        "from steerpipe.predict.protocol import Cost\n"
        "class Next:\n"
        "    name, horizons = 'next', (1,)\n"
        "    def probabilities(self, sight):\n"
        "        trace = sight._trace\n"
        "        return trace.routed((sight._rows + 1) % trace.rows, sight.decision.target)\n"
        "    def cost(self): return Cost(0, 0)\n"
    )
    result = CliRunner().invoke(app, ["arena", str(traces), *QUICK, "--plugin", str(tmp_path / "next.py")])
    assert result.exit_code == 2
    assert "next is out: PeekError" in result.stdout


def test_a_plugin_that_raises_is_named_and_the_others_go_on(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from steerpipe.predict.protocol import Cost\n"
        "class Bad:\n"
        "    name, horizons = 'bad', (1,)\n"
        "    def probabilities(self, sight): return 1 / 0\n"
        "    def cost(self): return Cost(0, 0)\n"
    )
    words = ["arena", str(traces), *QUICK, "--plugin", str(tmp_path / "bad.py"), "--plugin", str(EXAMPLE)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "bad is out: ZeroDivisionError: division by zero" in result.stdout and "followers" in result.stdout


def test_what_train_wrote_stands_beside_what_the_arena_counts(traces: Path, tmp_path: Path) -> None:
    files = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for file in files:
        trained = CliRunner().invoke(app, ["train", "transition", str(traces), str(file)])
        assert trained.exit_code == 0, trained.output
    words = ["arena", str(traces), *QUICK, "--predictor", str(files[0]), "--predictor", str(files[1]), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    recalls = {each["name"]: each["horizons"][0]["overall"]["recall"] for each in json.loads(result.stdout)["entries"]}
    assert recalls["transition (one)"] == recalls["transition (two)"] == recalls["transition"]


def test_horizons_beyond_the_layers_are_left_out_with_a_line(tmp_path: Path) -> None:
    two = replace(GEOMETRY, layers=2)
    traces = write(tmp_path / "traces", draw(prompts=30, tokens=30, geometry=two), geometry=two)
    result = CliRunner().invoke(app, ["arena", str(traces), "--machines", "none", "--json"])
    assert result.exit_code == 0, result.output
    assert "horizons left out: 2, 3 (the model has 2 MoE layers)" in result.stderr
    entries = json.loads(result.stdout)["entries"]
    assert not any(each["refused"] for each in entries)
    assert {at["horizon"] for each in entries for at in each["horizons"]} == {0, 1}
    none = CliRunner().invoke(app, ["arena", str(traces), "--horizons", "2,3"])
    assert none.exit_code == 2 and "give horizons below 2" in none.stderr


def test_before_the_attention_alone_the_missing_control_is_said(traces: Path) -> None:
    words = ["arena", str(traces), "--machines", "none", "--horizons", "0", "--plugin", str(EXAMPLE)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for name in ("transition", "shuffled labels", "followers"):
        assert f"{name} is left out: it answers at none of the horizons that were asked for" in result.stderr
    assert "control is missing" in " ".join(result.stdout.split())


def test_test_traces_that_share_a_prompt_with_the_training_are_refused(traces: Path, tmp_path: Path) -> None:
    shared = write(tmp_path / "shared", draw(prompts=3, first=29, seed=5))
    result = CliRunner().invoke(app, ["arena", str(traces), "--test", str(shared), *QUICK])
    assert result.exit_code == 2 and "share 1 prompt ids, prompt 29 among them" in result.stderr
    apart = write(tmp_path / "apart", draw(prompts=3, first=40, seed=5))
    assert CliRunner().invoke(app, ["arena", str(traces), "--test", str(apart), *QUICK]).exit_code == 0
    other = write(tmp_path / "other", draw(prompts=3, first=40, seed=5), digest="another model")
    refused = CliRunner().invoke(app, ["arena", str(traces), "--test", str(other), *QUICK])
    assert refused.exit_code == 2 and "same model" in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to compare on"),
        (["TRACES", "--prompts", "x.jsonl"], "both given"),
        (["--prompts", "x.jsonl", "--test", "y"], "--test"),
        (["TRACES", "--limit", "3"], "--limit"),
        (["TRACES", "--horizons", "soon"], "soon"),
        (["TRACES", "--machines", "many"], "many"),
        (["TRACES", "--held-out", "2"], "held out"),
        (["TRACES", "--predictor", "nowhere.safetensors"], "does not exist"),
        (["nowhere"], "not a trace"),
    ],
)
def test_bad_input_is_one_line_and_a_fix(words: list[str], said: str, traces: Path) -> None:
    given = [str(traces) if word == "TRACES" else word for word in words]
    result = CliRunner().invoke(app, ["arena", *given])
    assert result.exit_code == 2, result.output
    assert said in result.stderr and "fix:" in result.stderr and "Traceback" not in result.stderr


def test_a_model_and_prompts_are_traced_on_the_fly_with_its_routers(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": f"p{number}", "text": f"{number} quick brown foxes jump"}) for number in range(24)]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    words = [
        "arena",
        "--model",
        str(model),
        "--prompts",
        str(prompts),
        "--machines",
        "none",
        "--horizons",
        "0,1",
        "--json",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    by_name = {each["name"]: each for each in json.loads(result.stdout)["entries"]}
    assert [each["horizon"] for each in by_name["lookahead"]["horizons"]] == [0, 1]
    assert by_name["lookahead"]["refused"] is None
