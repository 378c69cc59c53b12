"""Files of prompts: every form that is understood, and every mistake with its line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from steerpipe.core.errors import InputError
from steerpipe.engine.tokenizer import ChatMessage, TextCodec
from steerpipe.trace.combinatorial import TEMPLATES, TOPICS, combinatorial_prompts
from steerpipe.trace.prompts import read_prompts
from tests.faults import folders


def write(file: Path, *lines: Any) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(text.encode()))
    else:
        file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("name", ["some.jsonl", "some.jsonl.gz"])
def test_the_four_forms_are_read(name: str, tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    file = write(
        tmp_path / name, {"id": 7, "prompt": "Why?"}, "", {"text": "It was."}, {"messages": turns},
        {"turns": ["First", "Second"], "question_id": 3},
    )  # fmt: skip
    why, text, chat, first = read_prompts(file)
    assert (why.id, why.content, why.document, why.source) == ("7", "Why?", False, "some")
    assert text.content == "It was." and text.document
    assert chat.content == (ChatMessage("system", "Be short."), ChatMessage("user", "Hi"))
    assert first.content == "First" and not first.document
    assert [each.id for each in read_prompts(file, limit=2)] == ["7", text.id]


def test_without_an_id_equal_texts_are_one_prompt_wherever_they_stand(tmp_path: Path) -> None:
    first = read_prompts(write(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y"}, {"prompt": "x"}))
    second = read_prompts(write(tmp_path / "sub.jsonl", {"prompt": "y"}))
    assert len(first) == 2 and first[0].id != first[1].id
    assert first[1].id.partition("-")[2] == second[0].id.partition("-")[2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ("[" * 200_000, "is not a prompt"),
        ("[1]", "not an object"),
        ({"question": "?"}, "none of the four"),
        ({"prompt": "a", "text": "b"}, "prompt and text"),
        ({"prompt": ""}, "prompt is no text"),
        ({"prompt": 3}, "prompt is no text"),
        ({"turns": []}, "turns is no text"),
        ({"messages": "hello"}, "no list of messages"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "x", "content": None}]}, "to be text"),
        ({"messages": [{"role": 1, "content": "Hi"}]}, "to be text"),
        ({"messages": ["Hi"]}, "is not a prompt"),
        ({"id": "one", "prompt": "another"}, "another prompt has the id 'one'"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: Any, said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "bad.jsonl", {"id": "one", "prompt": "fine"}, line)
    with pytest.raises(InputError, match=said) as caught:
        read_prompts(file)
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_leaves_nothing_is_refused(limit: int, tmp_path: Path) -> None:
    file = write(tmp_path / "some.jsonl", {"prompt": "Why?"})
    with pytest.raises(InputError, match=f"--limit {limit}\n  fix: give 1 or more"):
        read_prompts(file, limit)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="has no prompts"):
        read_prompts(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 50)[:-9])
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "cut.jsonl.gz")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "latin.jsonl")


def test_prompts_go_through_the_chat_template_and_documents_do_not(tmp_path: Path) -> None:
    codec = TextCodec.load(folders.build(tmp_path / "model"))
    prompt, text = read_prompts(write(tmp_path / "both.jsonl", {"prompt": "Hello"}, {"text": "Hello"}))
    plain = tuple(codec.encode("Hello", add_special=True))
    assert text.encode(codec, raw=False) == plain == prompt.encode(codec, raw=True)
    chat = tuple(codec.apply_chat([ChatMessage("user", "Hello")]))
    assert prompt.encode(codec, raw=False) == chat != plain


def test_a_beginning_is_that_of_the_whole_and_looks_at_no_more_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, looked = TextCodec.load(folders.build(tmp_path / "model")), [0]
    encode = codec.encode

    def look(text: str, add_special: bool, first: int | None = None) -> list[int]:
        looked.append(len(text) if first is None else 0)
        return encode(text if first else text.strip(), add_special, first)  # a normaliser

    said = "".join(f"{number} of them, \u00e9 \U0001f600 and <s>\n" for number in range(20_000))
    lines = {"text": said}, {"prompt": said}, {"text": "short"}, {"text": " " * 50_000 + "Hello"}
    monkeypatch.setattr(codec, "encode", look)
    for prompt in read_prompts(write(tmp_path / "long.jsonl", *lines)):
        whole = prompt.encode(codec, raw=False)
        looked.clear()
        assert all(prompt.encode(codec, raw=False, first=count) == whole[:count] for count in (1, 5, 288))
        assert max(looked) < 60_000


def test_a_thousand_combinatorial_prompts_are_every_template_with_every_topic() -> None:
    prompts = combinatorial_prompts()
    assert len(prompts) == len(TEMPLATES) * len(TOPICS) == 1000
    assert len({each.id for each in prompts}) == len({each.content for each in prompts}) == 1000
    assert all(template.count("{}") == 1 for template in TEMPLATES)
    first = prompts[: len(TEMPLATES)]
    assert len({each.id.split("-")[1] for each in first}) == len({each.id.split("-")[2] for each in first}) == 25
