"""The character model: probabilities that add up, a file that is checked, and the shipped one."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from recipes.ngram.__main__ import fit_within, main
from recipes.ngram.corpus import encode_texts
from recipes.ngram.count import count_levels
from recipes.ngram.fit import fit
from recipes.ngram.store import packed_model
from steerpipe.core.errors import InputError
from steerpipe.intake.alphabet import END, OTHER, SIZE, START, Alphabet
from steerpipe.intake.ngram import ASSET, CharacterModel

TEXTS = [
    ("how are you today? I am fine, thank you.", True),
    ("how are the dogs? the dogs are fine.", True),
    ("what are you doing? I am walking the dogs — é.", True),
] * 6


def made(tmp_path: Path, threshold: float = 0.5, orders: int = 5) -> CharacterModel:
    codes, alphabet = encode_texts(TEXTS)
    file = tmp_path / "model.npz"
    file.write_bytes(packed_model(alphabet, fit(count_levels(codes, orders, least=2), threshold)))
    return CharacterModel.load(file)


def test_levels_count_every_ngram_of_the_texts_and_none_across_them() -> None:
    codes, alphabet = encode_texts([("abab", True), ("ba", False)])
    levels = count_levels(codes, 3, least=1)
    a, b = alphabet.codes["a"], alphabet.codes["b"]
    pairs = {
        (int(p), int(c)): int(n) for p, c, n in zip(levels[1].parent, levels[1].character, levels[1].count, strict=True)
    }
    assert pairs == {(START, a): 1, (START, b): 1, (a, b): 2, (b, a): 2, (b, END): 1}
    triples = {
        (int(levels[1].parent[p]), int(levels[1].character[p]), int(c)): int(n)
        for p, c, n in zip(levels[2].parent, levels[2].character, levels[2].count, strict=True)
    }
    assert triples == {(START, a, b): 1, (START, b, a): 1, (a, b, a): 1, (b, a, b): 1, (a, b, END): 1}
    for level, below in ((levels[1], levels[0]), (levels[2], levels[1])):
        assert (below.character[level.suffix] == level.character).all()


def test_probabilities_of_all_characters_add_up_to_one(tmp_path: Path) -> None:
    model = made(tmp_path)
    for text in ("", "h", "how are y", "the dog", "zzz", "\u4e2d", "fine."):
        context = model.context(text)
        total = sum(model.probability(context, code) for code in range(SIZE))
        assert total == pytest.approx(1, abs=0.08), text  # sixteenths of a bit are steps of 4 %


def test_what_is_listed_as_likely_is_what_each_character_is_given(tmp_path: Path) -> None:
    model = made(tmp_path)
    for text in ("", "how are", "the d", "q"):
        context = model.context(text)
        listed = model.likely(context)
        assert len({code for code, _ in listed}) == len(listed)
        for code, share in listed:
            assert share == pytest.approx(model.probability(context, code))
        assert 0.9 < sum(share for _, share in listed) < 1.1


def test_it_expects_what_it_has_read(tmp_path: Path) -> None:
    model = made(tmp_path)

    def best(text: str) -> str:
        return model.alphabet.characters[max(model.likely(model.context(text)), key=lambda item: item[1])[0]]

    assert best("how ar") == "e" and best("I am walking the do") == "g"
    ended = dict(model.likely(model.context("thank you.")))
    assert ended[END] > 0.3 and dict(model.likely(model.context("thank y"))).get(END, 0.0) < 0.05


def test_a_context_is_the_same_read_at_once_or_character_by_character(tmp_path: Path) -> None:
    model = made(tmp_path)
    text = "how are you today? I am"
    context = model.context("")
    for end, code in enumerate(model.alphabet.encode(text), start=1):
        context = model.follow(context, code)
        assert context == model.context(text[:end])


def test_pruning_leaves_fewer_ngrams_and_still_adds_up(tmp_path: Path) -> None:
    small, large = made(tmp_path, threshold=8.0), made(tmp_path, threshold=0.0)
    assert SIZE < small.ngrams < large.ngrams
    context = small.context("how are")
    assert sum(small.probability(context, code) for code in range(SIZE)) == pytest.approx(1, abs=0.08)


def test_the_same_texts_make_the_same_file_within_its_limit() -> None:
    codes, alphabet = encode_texts(TEXTS)
    levels = count_levels(codes, 5, least=2)
    smallest = packed_model(alphabet, fit(levels, 1e9))
    one, _ = fit_within(levels, alphabet, len(smallest) + 800)
    again, _ = fit_within(levels, alphabet, len(smallest) + 800)
    assert one == again and len(smallest) < len(one) <= len(smallest) + 800
    with pytest.raises(ValueError, match="fits in"):
        fit_within(levels, alphabet, 100)


def test_characters_without_a_code_are_one() -> None:
    alphabet = Alphabet("é")
    assert alphabet.encode("aé中\x07") == [alphabet.codes["a"], alphabet.codes["é"], OTHER, OTHER]
    assert len(alphabet.characters) == 3 + 97 + 1


@pytest.mark.parametrize("damage", ["cut", "not a zip", "pickle", "missing", "sizes", "absent"])
def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path: Path, damage: str) -> None:
    made(tmp_path)
    file = tmp_path / "model.npz"
    with np.load(file) as loaded:
        arrays = dict(loaded)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-200])
    elif damage == "not a zip":
        file.write_text("hello")
    elif damage == "pickle":
        np.savez(file, **(arrays | {"beyond": np.array([{"a": 1}], dtype=object)}))
    elif damage == "missing":
        del arrays["children_1"]
        np.savez(file, **arrays)
    elif damage == "sizes":
        arrays["characters_2"], arrays["probabilities_2"] = arrays["characters_2"][1:], arrays["probabilities_2"][1:]
        arrays["children_2"] = arrays["children_2"][1:]
        np.savez(file, **arrays)
    else:
        file.unlink()
    with pytest.raises(InputError) as refused:
        CharacterModel.load(file)
    assert str(file) in str(refused.value) and "recipes.ngram" in refused.value.fix


def test_the_shipped_model_is_small_and_has_read_english() -> None:
    assert ASSET.stat().st_size <= 1_800_000
    model = CharacterModel.load()
    context = model.context("Can you tell me what tim")
    assert model.order == 12 and model.probability(context, model.alphabet.codes["e"]) > 0.8


def test_the_recipe_trains_from_a_corpus_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text, _ in TEXTS)
    for name in ("train-0.jsonl.gz", "heldout.jsonl.gz"):
        with gzip.open(tmp_path / name, "wt") as out:
            out.write(json.dumps({"src": "chitchat", "text": chat}) + "\n")
            out.write(json.dumps({"src": "books", "text": "The dogs walked on."}) + "\n")
    out = tmp_path / "out.npz"
    assert main(["--corpus", str(tmp_path), "--out", str(out), "--least", "2", "--most-bytes", "9000"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bytes"] == out.stat().st_size <= 9000 and 0 < figures["heldout_turns_bits_per_character"] < 4
    assert CharacterModel.load(out).ngrams == figures["ngrams"]
