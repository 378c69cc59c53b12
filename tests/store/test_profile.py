"""What is learnt in one run is there in the next, and nothing that is wrong with it stops a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from steerpipe.core.ids import ExpertId
from steerpipe.store.profile import Profile, load_profile, profile_file, save_profile

EXPERTS = tuple(ExpertId(layer, expert) for layer in (0, 2) for expert in range(3))
PROFILE = Profile("abc", (0.5, 0.0, 4.0, 3.0, 0.0, 1.0), (ExpertId(0, 0), ExpertId(2, 0)))


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    assert save_profile(tmp_path / "deep" / "abc.json", PROFILE)
    assert load_profile(tmp_path / "deep" / "abc.json", "abc", 6) == PROFILE
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["abc.json"]


def test_a_pack_that_is_gone_does_not_come_back_as_a_folder_with_a_profile(tmp_path: Path) -> None:
    file = profile_file(tmp_path, "abc", tmp_path / "cache", embedded=False)
    assert file.parent == tmp_path
    assert not save_profile(tmp_path / "pack" / file.name, PROFILE)
    assert not (tmp_path / "pack").exists()


def test_residents_come_first_then_the_most_used_and_never_the_unused() -> None:
    assert PROFILE.warmest(6, EXPERTS) == [ExpertId(2, 0), ExpertId(0, 0), ExpertId(0, 2), ExpertId(2, 2)]
    assert PROFILE.warmest(1, EXPERTS) == [ExpertId(2, 0)]


def test_a_resident_that_the_pack_does_not_have_is_left_out() -> None:
    strange = Profile("abc", PROFILE.counts, (ExpertId(9, 9), ExpertId(0, 2)))
    assert strange.warmest(1, EXPERTS) == [ExpertId(0, 2)]


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"source": "other"},
        {"counts": [1.0]},
        {"counts": ["x"] * 6},
        {"counts": [float("nan")] * 6},
        {"counts": [-1.0] * 6},
        {"counts": None},
        {"warm": [1, 2]},
        {"warm": [[1]]},
    ],
)
def test_a_profile_that_does_not_fit_is_left_aside(change: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    save_profile(file, PROFILE)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert load_profile(file, "abc", 6) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_profile_is_left_aside(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(content)
    assert load_profile(tmp_path / "p.json", "abc", 6) is None
    assert load_profile(tmp_path / "none.json", "abc", 6) is None


def test_a_place_that_cannot_be_written_costs_only_the_profile(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not save_profile(tmp_path / "file" / "profile.json", PROFILE)


def test_the_profile_lies_beside_the_pack_and_never_inside_the_package(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert profile_file(tmp_path, "abc", cache, embedded=False) == tmp_path / "profile.json"
    assert profile_file(tmp_path, "abc", cache, embedded=True) == cache / "profiles" / "abc.json"
    assert profile_file(tmp_path / "missing", "abc", cache, embedded=False) == cache / "profiles" / "abc.json"
