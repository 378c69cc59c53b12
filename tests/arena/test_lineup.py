from pathlib import Path

import numpy as np
import pytest
import torch

from steerpipe.arena.lineup import saved_entries
from steerpipe.core.errors import InputError
from steerpipe.predict.files import save
from steerpipe.predict.frequency import Frequency
from steerpipe.predict.mark import ModelMark
from steerpipe.predict.records import TracedSequence
from steerpipe.predict.seen import prompt_digest
from steerpipe.predict.stored import Training


def kept(file: Path, horizons: list[int], tokens: int = 10) -> Path:
    predictor = Frequency(torch.full((4, 12), 1 / 6), horizons)
    predictor.training = Training(tokens, 2, 1.5, "cpu", 0, "planted")
    save(predictor, file)
    return file


def test_files_of_one_name_and_other_horizons_are_one_entry(tmp_path: Path) -> None:
    files = [kept(tmp_path / f"{horizon}.safetensors", [horizon], 10 * horizon) for horizon in (1, 2)]
    (entry,) = saved_entries(files, None, None, [0, 1, 2, 3], "cpu", ())
    assert sorted(entry.by_horizon) == [1, 2]
    assert entry.files == {1: files[0], 2: files[1]}
    training = entry.training()
    assert training is not None and (training.tokens, training.seconds) == (20, 3.0)


def test_one_more_for_a_horizon_is_named_after_its_folder_then_its_file(tmp_path: Path) -> None:
    files = [kept(tmp_path / name, [1]) for name in ("a.safetensors", "large/b.safetensors", "large/c.safetensors")]
    names = [each.name for each in saved_entries(files, None, None, [1], "cpu", ())]
    assert names == ["frequency", "frequency (large)", "frequency (c)"]


def test_a_name_that_is_taken_is_told_apart_by_the_file(tmp_path: Path) -> None:
    files = [kept(tmp_path / name, [1]) for name in ("a.safetensors", "b.safetensors", "large/b.safetensors")]
    names = [each.name for each in saved_entries(files, None, None, [1], "cpu", (), {"frequency"})]
    assert names == ["frequency (a)", "frequency (b)", f"frequency ({files[2]})"]


def test_files_of_the_folder_one_stands_in_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = [kept(Path(name), [1]) for name in ("a.safetensors", "b.safetensors", "c.safetensors")]
    names = [each.name for each in saved_entries(files, None, None, [1], "cpu", ())]
    assert names == ["frequency", "frequency (b)", "frequency (c)"]


def test_horizons_that_nobody_asked_for_are_left_out(tmp_path: Path) -> None:
    file = kept(tmp_path / "a.safetensors", [0, 5])
    (silent,) = saved_entries([file], None, None, [1, 2], "cpu", ())
    assert (silent.name, silent.by_horizon) == ("frequency (a)", {})
    (entry,) = saved_entries([file], None, None, [0, 1], "cpu", ())
    assert list(entry.by_horizon) == [0]


def test_a_file_that_learnt_from_the_test_is_refused(tmp_path: Path) -> None:
    predictor = Frequency(torch.full((4, 12), 1 / 6), [1])
    predictor.seen = frozenset({prompt_digest([3, 4])})
    save(predictor, tmp_path / "a.safetensors")
    test = [TracedSequence("asked", np.array([3, 4], dtype=np.int32), 2, np.zeros((2, 4, 2), dtype=np.uint8))]
    with pytest.raises(InputError, match="was trained on 1 of the held-out prompts"):
        saved_entries([tmp_path / "a.safetensors"], None, None, [1], "cpu", test)
    beside = tmp_path / "pack" / "predictors"  # comes with the model: nobody could leave it out by hand
    beside.mkdir(parents=True)
    save(predictor, beside / "head-1.safetensors")
    (entry,) = saved_entries([], tmp_path / "pack", None, [1], "cpu", test)
    assert (entry.by_horizon, entry.name) == ({}, "frequency (head-1)") and "1 of the held-out" in entry.left_out


def test_predictors_beside_a_model_take_part_but_the_reuse_forecast_does_not(tmp_path: Path) -> None:
    kept(tmp_path / "pack" / "predictors" / "head-1.safetensors", [1])
    (tmp_path / "pack" / "predictors" / "reuse.safetensors").write_bytes(b"another kind of file")
    (entry,) = saved_entries([], tmp_path / "pack", None, [1], "cpu", ())
    assert entry.origin == "comes with the model"
    assert saved_entries([], None, None, [1], "cpu", ()) == []


def test_a_saved_predictor_of_another_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save(Frequency(torch.full((4, 12), 1 / 6), [1]), file)
    assert saved_entries([file], None, None, [1], "cpu", (), here=ModelMark(4, 12))
    with pytest.raises(InputError, match="4 MoE layers, 12 experts; this one has 24 MoE layers, 60 experts"):
        saved_entries([file], None, None, [1], "cpu", (), here=ModelMark(24, 60))
