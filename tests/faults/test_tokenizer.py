"""A tokenizer that is missing or broken, and a chat template that is not a program."""

import json
from pathlib import Path

import pytest

from steerpipe.core.errors import TokenizerError
from steerpipe.engine.tokenizer import TextCodec
from tests.faults import folders
from tests.faults.running import generate, refused

TEMPLATE_FILE = "chat_template.jinja"


def complaint(folder: Path) -> str:
    with pytest.raises(TokenizerError) as caught:
        TextCodec.load(folder)
    return str(caught.value)


def without_tokenizer(folder: Path) -> None:
    for file in folder.iterdir():
        if "token" in file.name or file.name == TEMPLATE_FILE:
            file.unlink()


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    without_tokenizer(folder)
    message = complaint(folder)
    assert f"no tokenizer in {folder}: looked for tokenizer.json, tokenizer.model, vocab.json" in message
    assert "copy the tokenizer files of the released model" in message


def test_a_tokenizer_that_links_into_a_deleted_cache(folder: Path) -> None:
    without_tokenizer(folder)
    (folder / "tokenizer.json").symlink_to("../blobs/deadbeef")
    assert f"no tokenizer in {folder}" in complaint(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"model": {"type": "Martian"}}', "\x00\x01", "[" * 20_000]
)
def test_a_tokenizer_that_cannot_be_loaded(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    message = complaint(folder)
    assert f"the tokenizer in {folder} cannot be loaded" in message
    assert "fetch the tokenizer files of the released model again" in message


def test_a_tokenizer_config_that_is_not_json(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    assert f"the tokenizer in {folder} cannot be loaded" in complaint(folder)


def test_the_command_line_refuses_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert "the tokenizer in " in refused(folder)
    without_tokenizer(folder)
    assert "no tokenizer in " in refused(folder)


def test_a_tokenizer_whose_code_lies_in_the_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "own_tokenizer.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    auto_map = {"AutoTokenizer": ["own_tokenizer.Own", None]}
    folders.edit_json(folder / "tokenizer_config.json", tokenizer_class="Own", auto_map=auto_map)
    generate(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}", "{{ messages[0].content", "{% nosuchtag %}", "{{ 1 / 0 }}", "{{ nothing.at.all }}"],
)
def test_a_template_that_is_not_a_program(folder: Path, template: str) -> None:
    (folder / TEMPLATE_FILE).write_text(template)
    message = refused(folder)
    assert "the chat template refuses these messages" in message
    assert "complete the text as it is: --raw" in message


def test_raw_goes_around_a_broken_template(folder: Path) -> None:
    (folder / TEMPLATE_FILE).write_text("{% for")
    assert generate(folder, "--raw").exit_code == 0


def test_a_template_that_raises_is_quoted(folder: Path) -> None:
    (folder / TEMPLATE_FILE).write_text("{{ raise_exception('only odd turns') }}")
    assert "only odd turns" in refused(folder)


def test_a_template_that_reaches_for_the_machine_is_stopped(folder: Path) -> None:
    (folder / TEMPLATE_FILE).write_text("{{ cycler.__init__.__globals__.os.system('touch ran') }}")
    assert "the chat template refuses these messages" in refused(folder)


def test_a_template_that_renders_nothing_leaves_no_prompt(folder: Path) -> None:
    (folder / TEMPLATE_FILE).write_text("{# nothing #}")
    message = refused(folder)
    assert "the prompt is empty" in message


def test_a_tokenizer_larger_than_the_embedding_is_told_by_the_token(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    last = raw["added_tokens"][-1]
    raw["added_tokens"] += [last | {"id": 268 + i, "content": f"<extra {i}>"} for i in range(5)]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    message = refused(folder, "--raw", "-p", "<extra 4>")
    assert "token id 272 is not in the vocabulary of 272" in message
