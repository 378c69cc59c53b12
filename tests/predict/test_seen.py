"""A file tells which prompts its predictor learnt from, and the arena refuses a test on them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from steerpipe.arena.apart import check_unseen
from steerpipe.core.errors import DamagedFileError, InputError
from steerpipe.predict.files import load, save
from steerpipe.predict.frequency import Frequency
from steerpipe.predict.records import TracedSequence
from steerpipe.predict.seen import pack_digests, prompt_digest, prompt_digests, unpack_digests
from steerpipe.trace.live import TokenSequence, windows
from steerpipe.train.catalogue import Options, train
from steerpipe.train.counts import count_frequency
from steerpipe.train.material import Material, seen_in
from tests.predict.planted import VOCAB, model_trace


def traced(prompt: str, tokens: list[int], prompt_tokens: int) -> TracedSequence:
    experts = np.zeros((len(tokens), 4, 2), dtype=np.uint8)
    return TracedSequence(prompt, np.array(tokens, dtype=np.int32), prompt_tokens, experts)


def learnt_from(*prompts: list[int]) -> Frequency:
    predictor = Frequency(torch.full((4, 12), 1 / 6), [1])
    predictor.seen = frozenset(prompt_digest(tokens) for tokens in prompts)
    return predictor


def test_digests_go_through_text_and_know_their_prompts() -> None:
    digests = frozenset(prompt_digest([number, number + 1]) for number in range(500))
    assert len(digests) == 500 and unpack_digests(pack_digests(digests)) == digests
    assert prompt_digest([1, 2]) == prompt_digest(np.array([1, 2], dtype=np.int64).tolist())
    assert len({prompt_digest([1, 2]), prompt_digest([2, 1]), prompt_digest([1]), prompt_digest([1, 2, 0])}) == 4


def test_a_file_keeps_them_and_so_does_another_device(tmp_path: Path) -> None:
    predictor = learnt_from([5, 6, 7])
    save(predictor, tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors").seen == predictor.seen == predictor.to("cpu").seen


def test_a_file_without_them_says_so(tmp_path: Path) -> None:
    save(Frequency(torch.full((4, 12), 1 / 6), [1]), tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors").seen is None


def test_digests_that_are_none_are_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steerpipe.predict.files.pack_digests", lambda digests: "AAAA")
    save(learnt_from([1]), tmp_path / "a.safetensors")
    with pytest.raises(DamagedFileError, match="no whole number of digests"):
        load(tmp_path / "a.safetensors")


def test_the_prompt_counts_and_not_its_answer() -> None:
    predictor, file = learnt_from([5, 6, 7]), Path("head.safetensors")
    check_unseen(predictor, file, [traced("other", [5, 6, 8, 9], 3)])
    with pytest.raises(InputError, match=r"head\.safetensors was trained on 1 of the held-out prompts, asked among"):
        check_unseen(predictor, file, [traced("other", [5, 6], 2), traced("asked", [5, 6, 7, 40, 41], 3)])


def test_a_prompt_is_the_same_in_whatever_windows_it_was_traced() -> None:
    asked = list(range(1, 12))
    apart = [traced("asked", asked[:4], 4), traced("asked", asked[4:8], 4), traced("asked", [*asked[8:], 40, 41], 3)]
    assert prompt_digests([*apart, traced("asked", [42], 0)]) == {"asked": prompt_digest(asked)}
    whole = seen_in([TokenSequence("asked", asked, len(asked))])
    assert seen_in(windows([TokenSequence("asked", asked, len(asked))], 5)) == seen_in(apart) == whole
    with pytest.raises(InputError, match="was trained on 1 of the held-out prompts, asked among"):
        check_unseen(learnt_from(asked), Path("head.safetensors"), [traced("other", [9], 1), *apart])


def test_training_notes_the_prompts_of_its_material_and_of_its_parts() -> None:
    texts = [TokenSequence("a", [1, 2, 3, 9], 3), TokenSequence("b", [4, 5], 2), TokenSequence("an answer", [7, 8], 0)]
    trace = model_trace(tokens=100)
    material = Material(trace, 2, VOCAB, seen=seen_in(texts))
    assert material.seen == {prompt_digest([1, 2, 3]), prompt_digest([4, 5])}
    counted = train("previous", material, Options(), "planted")
    assert counted.seen == material.seen
    other = learnt_from([8, 8])
    blended = count_frequency(trace)
    blended.seen = other.seen
    options = Options(parts=(counted, blended))
    assert train("blend", material, options, "planted").seen == material.seen | other.seen
    blended.seen = None
    assert train("blend", material, options, "planted").seen is None
