"""`steerpipe generate` in this process: what it prints, what it refuses, where its settings come from."""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steerpipe import Pipeline, __version__
from steerpipe.cli import app
from steerpipe.core.timeline import Timeline
from tests.faults import folders
from tests.faults.running import generate, refused


def answer(model: Path, *options: str, stdin: str | bytes | None = None) -> dict[str, Any]:
    result = generate(model, "--json", *options, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_the_json_object_is_consistent(model: Path) -> None:
    found = answer(model, "--max-tokens", "32", "--logprobs", "5")
    assert {"text", "token_ids", "logprobs", "finish_reason", "timings"} <= found.keys()
    timings = found["timings"]
    assert timings.keys() == {"prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "cache_n", "queued_ms"}
    assert len(found["logprobs"]) == len(found["token_ids"]) == timings["predicted_n"] == 32
    assert timings["prompt_n"] == len(found["prompt_token_ids"]) > 0
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] > 0
    assert found["finish_reason"] == "length"


def test_a_greedy_token_is_the_likeliest_of_its_list(model: Path) -> None:
    found = answer(model, "--max-tokens", "16", "--logprobs", "5")
    for token_id, entry in zip(found["token_ids"], found["logprobs"], strict=True):
        assert entry["token_id"] == token_id == entry["top"][0]["token_id"]
        assert entry["logprob"] == entry["top"][0]["logprob"] <= 0
        assert len(entry["top"]) == 5
        assert [t["logprob"] for t in entry["top"]] == sorted((t["logprob"] for t in entry["top"]), reverse=True)


def test_logprobs_without_others_and_not_at_all(model: Path) -> None:
    assert all(entry["top"] == [] for entry in answer(model, "--logprobs", "0")["logprobs"])
    assert answer(model)["logprobs"] is None


def test_the_text_is_what_the_tokenizer_makes_of_the_ids(model: Path) -> None:
    found = answer(model, "--max-tokens", "32")
    with Pipeline(model, dtype="float32", threads=1) as pipe:
        assert found["text"] == pipe.codec.decode(found["token_ids"])
        assert tuple(found["prompt_token_ids"]) == pipe.encode("Hi there")


def test_the_terminal_shows_the_text_of_the_json(model: Path) -> None:
    shown = generate(model, "--max-tokens", "32")
    assert shown.stdout == answer(model, "--max-tokens", "32")["text"] + "\n"
    assert "32 tokens in" in shown.stderr


def test_the_template_is_applied_unless_raw(model: Path) -> None:
    with Pipeline(model, dtype="float32", threads=1) as pipe:
        chat = pipe.codec.encode("[user]Hi there[assistant]", add_special=False)
        raw = pipe.codec.encode("Hi there", add_special=True)
    assert answer(model)["prompt_token_ids"] == chat
    assert answer(model, "--raw")["prompt_token_ids"] == raw


def test_without_a_template_the_text_is_completed_as_it_is(plain_model: Path) -> None:
    assert answer(plain_model)["prompt_token_ids"] == answer(plain_model, "--raw")["prompt_token_ids"]


def test_a_system_message_goes_through_the_template(model: Path) -> None:
    with Pipeline(model, dtype="float32", threads=1) as pipe:
        expected = pipe.codec.encode("[system]Be brief[user]Hi there[assistant]", add_special=False)
    assert answer(model, "--system", "Be brief")["prompt_token_ids"] == expected


def test_a_system_message_without_a_template_is_refused(model: Path, plain_model: Path) -> None:
    assert "--system needs the chat template" in refused(model, "--system", "x", "--raw")
    assert "the model has no chat template" in refused(plain_model, "--system", "x")


@pytest.mark.parametrize("text", ["Hi there", "Grüße, 日本 🙂\n", "a\x00b", "  spaces  ", "-p"])
def test_a_prompt_from_stdin_is_the_prompt(model: Path, text: str) -> None:
    piped = answer(model, "-p", "-", stdin=text)
    assert piped["prompt_token_ids"] == answer(model, f"--prompt={text}")["prompt_token_ids"]


def test_the_same_seed_gives_the_same_text(model: Path) -> None:
    sampled = ("--temperature", "1.5", "--max-tokens", "24")
    first, again = (answer(model, *sampled, "--seed", "7")["token_ids"] for _ in range(2))
    assert first == again != answer(model, *sampled, "--seed", "8")["token_ids"]


def test_a_stop_string_ends_the_text_before_it(model: Path) -> None:
    text = answer(model, "--max-tokens", "24")["text"]
    stop = next(c for c in text if c.isascii() and c.isprintable())
    found = answer(model, "--max-tokens", "24", "--stop", stop)
    assert found["text"] == text.partition(stop)[0]
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--top-p", "2"), "top_p is 2.0"),
        (("--top-p", "0"), "top_p is 0.0"),
        (("--top-k", "-1"), "top_k is -1"),
        (("--min-p", "1.5"), "min_p is 1.5"),
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--temperature", "nan"), "temperature is nan"),
        (("--temperature", "inf"), "temperature is inf"),
        (("--repetition-penalty", "0"), "repetition_penalty is 0.0"),
        (("--presence-penalty", "3"), "presence_penalty is 3.0"),
        (("--frequency-penalty", "nan"), "frequency_penalty is nan"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--logprobs", "50"), "logprobs is 50"),
        (("--logprobs", "-1"), "logprobs is -1"),
        (("--seed", "-1"), "seed is -1"),
        (("--seed", str(2**64)), f"seed is {2**64}"),
        (("--stop", ""), "stop is ('',)"),
        (("--dtype", "int3"), "dtype is 'int3'"),
        (("--device", "tpu"), "device is 'tpu'"),
        (("--threads", "0"), "threads is 0"),
        (("--max-context", "0"), "max_context is 0"),
        (("--max-context", "100000"), "max_context is 100000, but the model was made for 128 tokens"),
        (("--prefill-chunk", "17"), "prefill_chunk is 17"),
        (("--kv-memory", "lots"), "kv_memory is 'lots'"),
        (("-p", ""), "there is no prompt"),
        (("-p", "x" * 200), "128"),
        (("-p", "half \udcff a character"), "the prompt is not UTF-8 text"),
        (("--system", "half \udcff a character"), "lone surrogate"),
        (("--config", "no-such-file.toml"), "no-such-file.toml cannot be read"),
    ],
)
def test_a_bad_value_is_told_with_status_two(model: Path, options: tuple[str, ...], words: str) -> None:
    message = refused(model, *options)
    assert words in message


def test_a_bad_value_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    for options, words in ((("--top-p", "2"), "top_p"), (("--dtype", "x"), "dtype"), (("-p", ""), "prompt")):
        assert words in refused(tmp_path / "gone", *options)


@pytest.mark.parametrize("sent", [b"\xff\xfe", b"good until \xc3"])
def test_stdin_that_is_not_text(model: Path, sent: bytes) -> None:
    assert "the prompt is not UTF-8 text" in refused(model, "-p", "-", stdin=sent)


def test_stdin_with_nothing_in_it(model: Path) -> None:
    assert "there is no prompt" in refused(model, "-p", "-", stdin="")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--temperature", "hot"], "--temperature"),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "x", "--temprature", "1"], "--temperature"),
        (["generate", "x", "y"], "y"),
        (["generate", "x", "-p"], "requires an argument"),
        (["generat", "x"], "generate"),
        (["--nosuch"], "--nosuch"),
    ],
)
def test_a_bad_command_line_is_told_with_status_two_and_a_hint(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["doctor", "--help"], ["demo", "--help"]])
def test_help_is_there_for_every_verb(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "Usage" in result.stdout
    assert result.stderr == ""


def test_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"steerpipe {__version__}\n")


def test_debug_shows_the_traceback_and_keeps_the_status(tmp_path: Path) -> None:
    result = generate(tmp_path, "--debug")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("with its config.json\n")


def test_a_setting_comes_from_a_flag_then_the_environment_then_a_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[engine]\nmax_context = 64\nprefill_chunk = 32\n")
    run = ["generate", str(model), "-p", "Hi", "--max-tokens", "2", "--threads", "1", "--json"]

    def chosen(*options: str) -> dict[str, object]:
        return dict(json.loads(CliRunner().invoke(app, [*run, *options]).stdout)["config"])

    assert chosen("--config", str(file))["max_context"] == 64
    monkeypatch.setenv("STEERPIPE_MAX_CONTEXT", "80")
    assert chosen("--config", str(file))["max_context"] == 80
    assert chosen("--config", str(file), "--max-context", "96")["max_context"] == 96
    monkeypatch.setenv("STEERPIPE_DTYPE", "bfloat16")
    assert chosen()["dtype"] == "bfloat16"


def test_an_unknown_setting_names_the_nearest(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[engine]\nmax_contxt = 64\n")
    message = refused(model, "--config", str(file))
    assert f"{file}: max_contxt is not a setting" in message and "max_context?" in message
    monkeypatch.setenv("STEERPIPE_DTYP", "float32")
    message = refused(model)
    assert "STEERPIPE_DTYP is not a setting" in message and "STEERPIPE_DTYPE?" in message


def test_a_context_that_is_full_ends_the_answer(model: Path) -> None:
    found = answer(model, "--max-tokens", "1000")
    assert found["finish_reason"] == "length"
    assert found["timings"]["prompt_n"] + found["timings"]["predicted_n"] == 128


def test_a_warning_of_transformers_stays_inside(tmp_path: Path, model: Path) -> None:
    """It warns about generation settings and tokenizer classes; stderr of a good --json run is empty all the same."""
    folder = folders.copy(model, tmp_path / "model")
    folders.edit_json(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    folders.write_json(folder / "generation_config.json", {"temperature": 0.1, "top_k": 3, "do_sample": False})
    assert answer(folder)["finish_reason"] == "length"


def test_a_timeline_has_compute_reads_and_waits(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    answer(model, "--max-tokens", "4", "--fast-memory", "25%", "--timeline", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"stream 0: compute", "stream 0: waits", "stream 1: link", "stream 1: decode"} == lanes
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_a_timeline_of_a_model_that_is_held_whole_is_refused(model: Path, tmp_path: Path) -> None:
    failed = generate(model, "--timeline", str(tmp_path / "trace.json"))
    assert failed.exit_code == 2 and "ladder" in failed.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [("generate", "-p", "Hi", "--timeline"), ("report", "-o")])
def test_a_place_that_cannot_be_written_to_is_told_before_a_model_is_looked_for(words: tuple[str, ...]) -> None:
    failed = CliRunner().invoke(app, [*words, ".", "nowhere"])
    assert failed.exit_code == 1 and "cannot be written to .: a folder" in failed.stderr and failed.stdout == ""


def test_a_timeline_of_an_answer_that_control_c_ended_has_what_there_was_room_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(answer: Iterable[object], *_: object, **__: object) -> None:
        next(iter(answer))
        raise KeyboardInterrupt

    monkeypatch.setattr("steerpipe.cli.generate._tell", pressed)
    monkeypatch.setattr("steerpipe.cli.generate.Timeline", partial(Timeline, most=5))
    file = tmp_path / "trace.json"
    ended = generate(model, "--fast-memory", "25%", "--timeline", str(file))
    trace = json.loads(file.read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 5
    told = f"{trace['otherData']['dropped_spans']:,} did not fit\ninterrupted\n"
    assert ended.exit_code == 130 and ended.stderr.endswith(told)
