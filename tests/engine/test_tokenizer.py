"""The tokenizer of a checkpoint folder: ids and chats as transformers gives them, and what is said when it fails."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from steerpipe.core.errors import RequestError, TokenizerError
from steerpipe.engine.tokenizer import ChatMessage, TextCodec
from tests.engine import tiny_tokenizers

BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    return tiny_tokenizers.save(tiny_tokenizers.byte_level(), path, tiny_tokenizers.TEMPLATE)


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec.load(folder)


def _copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


# --- encode and decode


def test_special_tokens_are_added_when_asked_for(codec: TextCodec) -> None:
    bare = codec.encode("the cat", add_special=False)
    assert BOS not in bare
    assert codec.encode("the cat", add_special=True) == [BOS, *bare]


def test_decode_skips_special_tokens_and_leaves_spaces_as_they_are(codec: TextCodec) -> None:
    ids = codec.encode(" the cat , the end .", add_special=True)
    assert codec.decode([*ids, EOS]) == " the cat , the end ."


def test_decode_leaves_spaces_even_if_the_checkpoint_asks_to_clean_them_up(tmp_path: Path) -> None:
    copy = tiny_tokenizers.save(tiny_tokenizers.metaspace(), tmp_path)
    config = copy / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"clean_up_tokenization_spaces": True}))
    ids = [3 + tiny_tokenizers.PIECES.index(piece) for piece in ("▁the", "▁", ".")]
    assert TextCodec.load(copy).decode(ids) == "the ."


def test_half_a_character_in_the_text_is_refused(codec: TextCodec) -> None:
    with pytest.raises(RequestError) as caught:
        codec.encode("ab\ud83d", add_special=False)
    assert caught.value.what == "character 2 of the text is half a character (a lone surrogate)"
    assert caught.value.fix == "send valid Unicode"


def test_a_long_text_does_not_warn_about_the_tokenizers_own_limit(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = _copy(folder, tmp_path)
    config = copy / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 8}))
    assert len(TextCodec.load(copy).encode("the cat sat on the mat", add_special=False)) > 8
    assert caplog.text == ""


def test_the_end_token_is_known_and_a_tokenizer_without_one_has_none(folder: Path, tmp_path: Path) -> None:
    assert TextCodec.load(folder).eos_token_ids == (EOS,)
    copy = _copy(folder, tmp_path)
    config = copy / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "eos_token"}))
    assert TextCodec.load(copy).eos_token_ids == ()


def test_byte_tokens_count_as_bytes_only_where_the_decoder_makes_bytes_of_them(
    codec: TextCodec, tmp_path: Path
) -> None:
    fallback = TextCodec.load(tiny_tokenizers.save(tiny_tokenizers.byte_fallback(), tmp_path / "a"))
    assert [fallback.byte_of(3 + byte) for byte in range(256)] == list(range(256))
    assert fallback.byte_of(260) is None
    spelled = tiny_tokenizers.metaspace()
    spelled.add_tokens(["<0x80>"])
    plain = TextCodec.load(tiny_tokenizers.save(spelled, tmp_path / "b"))
    assert plain.byte_of(spelled.get_vocab()["<0x80>"]) is None
    assert codec.byte_of(50) is None


def test_added_tokens_that_are_not_special_are_text(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    think = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["<think>"])
    codec = TextCodec.load(tiny_tokenizers.save(tokenizer, tmp_path))
    assert codec.is_text(think)
    assert codec.stream().push(think) == "<think>"
    assert not codec.is_text(BOS)
    assert not codec.is_text(think + 1)


# --- chats


def test_a_chat_is_rendered_by_the_template_up_to_the_answer_with_one_bos(codec: TextCodec) -> None:
    messages = [ChatMessage("user", "hi"), ChatMessage("assistant", "ho"), ChatMessage("user", "the")]
    ids = codec.apply_chat(messages)
    assert ids.count(BOS) == 1
    assert ids[0] == BOS
    assert ids.count(EOS) == 3
    assert codec.decode(ids) == "[user]hi[assistant]ho[user]the[assistant]"


def test_what_the_template_refuses_is_a_request_error_with_its_words(codec: TextCodec) -> None:
    with pytest.raises(RequestError) as caught:
        codec.apply_chat([ChatMessage("user", "a"), ChatMessage("user", "b")])
    assert caught.value.what == "the chat template refuses these messages: roles must alternate"
    assert "--raw" in caught.value.fix


def test_a_broken_template_is_answered_too(folder: Path, tmp_path: Path) -> None:
    copy = _copy(folder, tmp_path)
    (copy / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(RequestError, match="the chat template refuses these messages"):
        TextCodec.load(copy).apply_chat([ChatMessage("user", "a")])


def test_without_a_template_the_error_names_raw(codec: TextCodec, tmp_path: Path) -> None:
    bare = TextCodec.load(tiny_tokenizers.save(tiny_tokenizers.byte_level(), tmp_path))
    assert codec.has_chat_template
    assert not bare.has_chat_template
    with pytest.raises(RequestError) as caught:
        bare.apply_chat([ChatMessage("user", "a")])
    assert caught.value.what == "the model has no chat template"
    assert "--raw" in caught.value.fix


# --- folders that cannot be used


def test_a_folder_without_a_tokenizer_names_the_files_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(TokenizerError) as caught:
        TextCodec.load(tmp_path)
    assert caught.value.what == f"no tokenizer in {tmp_path}: looked for tokenizer.json, tokenizer.model, vocab.json"
    assert "copy the tokenizer files" in caught.value.fix


@pytest.mark.parametrize("model_type", [None, "qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("content", ["cut", "{}", "", "[1]", "null"])
def test_a_broken_tokenizer_file_is_a_tokenizer_error(
    folder: Path, tmp_path: Path, content: str, model_type: str | None
) -> None:
    copy = _copy(folder, tmp_path)
    if model_type is not None:
        (copy / "config.json").write_text(json.dumps({"model_type": model_type}))
    file = copy / "tokenizer.json"
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2] if content == "cut" else content)
    with pytest.raises(TokenizerError, match=r"the tokenizer in .* cannot be loaded") as caught:
        TextCodec.load(copy)
    assert "again" in caught.value.fix


def test_a_tokenizer_without_tokens_for_text_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = _copy(folder, tmp_path)
    file = copy / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    file.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="cannot be used: it has no tokens for text"):
        TextCodec.load(copy)


def test_code_in_the_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    copy = _copy(folder, tmp_path)
    trace = tmp_path / "ran"
    (copy / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    config = copy / "tokenizer_config.json"
    auto_map = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    config.write_text(json.dumps(json.loads(config.read_text()) | auto_map))
    with contextlib.suppress(TokenizerError):  # refused, or loaded from tokenizer.json alone: both are safe
        TextCodec.load(copy)
    assert not trace.exists()
