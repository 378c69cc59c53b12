"""Recorded forecasts: files, made-up ones, and the words that taps say in their place."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from steerpipe.arena.foresight import Foresight, ReuseForesight
from steerpipe.bench.forecasts import NAMED, ForecastFile, made_up, read_forecasts, write_forecasts
from steerpipe.bench.options import DecodeOptions
from steerpipe.bench.prediction import ToldReuse, belady, spoken
from steerpipe.core.errors import ConfigError, InputError
from steerpipe.store.policies import Reuse
from steerpipe.transfer.recorded import Recording

TOKENS, LAYERS, TOP_K, EXPERTS = 6, 3, 2, 8


def recording() -> Recording:
    random = np.random.default_rng(0)
    every = np.broadcast_to(np.arange(EXPERTS), (TOKENS, LAYERS, EXPERTS))
    routing = random.permuted(every, axis=-1)[..., :TOP_K].astype(np.int64)
    return Recording("made up", routing, np.array([0, 0, 0, 0, 1, 1], dtype=np.int32), EXPERTS)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    whole, file = recording(), tmp_path / "forecasts.safetensors"
    said = Foresight(
        np.ones((2, TOKENS, LAYERS, NAMED), dtype=np.int16), np.full((2, TOKENS, LAYERS, NAMED), 0.5, np.float32)
    )
    scores = {(token, 1): np.full(LAYERS * EXPERTS, token, dtype=np.float32) for token in range(TOKENS)}
    write_forecasts(file, ForecastFile(whole, {"heads": said}, ReuseForesight(scores, 24.0)))
    found = read_forecasts(file, EXPERTS)
    assert np.array_equal(found.recording.routing, whole.routing)
    assert np.array_equal(found.foresight("heads", 1).ranked, said.ranked[:1])
    assert found.reuse is not None and found.reuse.half_life_tokens == 24.0
    assert found.reuse.at(4, 1) is not None and float(found.reuse.at(4, 1)[0]) == 4.0 and found.reuse.at(4, 0) is None


def test_a_recording_that_is_ended_while_it_writes_leaves_no_half_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", ended)
    with pytest.raises(KeyboardInterrupt):
        write_forecasts(tmp_path / "forecasts.safetensors", ForecastFile(recording(), {}, None))
    assert not list(tmp_path.iterdir()), "make would take it for done"


def test_forecasts_of_another_routing_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "forecasts.safetensors"
    ranked = torch.zeros(1, TOKENS + 1, LAYERS, NAMED, dtype=torch.uint8)
    routing = torch.from_numpy(recording().routing.astype(np.uint8)).contiguous()
    save_file({"routing": routing, "heads.ranked": ranked, "heads.probability": ranked.half()}, file)
    with pytest.raises(InputError, match="do not fit"):
        read_forecasts(file, EXPERTS)


def test_made_up_forecasts_are_as_good_as_they_say() -> None:
    whole = recording()
    truth = whole.routing[None, ..., None, :]

    def recall(name: str) -> float:
        return float((made_up(name, whole, 2).ranked[..., None] == truth).any(-1).mean())

    assert recall("perfect") == 1.0 and recall("wrong") == 0.0
    assert 0.0 < recall("chance") < 0.6
    with pytest.raises(InputError, match="no forecasts of 'nobody'") as caught:
        ForecastFile(whole, {}, None).foresight("nobody", 1)
    assert "perfect" in caught.value.fix


def test_words_are_said_at_the_tap_that_looks_so_far_ahead_and_never_across_texts() -> None:
    whole = recording()
    words = spoken(made_up("perfect", whole, 2), whole)
    assert words.shape == (TOKENS, LAYERS, 2, NAMED)
    named = words & 0xFFFF
    assert named[1, 0, 0, :TOP_K].tolist() == whole.routing[1, 1].tolist()
    assert named[1, 0, 1, :TOP_K].tolist() == whole.routing[1, 2].tolist()
    assert named[1, 2, 0, :TOP_K].tolist() == whole.routing[2, 0].tolist(), "over the end of the token"
    assert named[1, 2, 1, :TOP_K].tolist() == whole.routing[2, 1].tolist()
    assert (words[1, 0, 0, :TOP_K] >> 16 == 0x7FFF).all() and not words[1, 0, 0, TOP_K:].any()
    assert not words[3, 2].any() and not words[5, 2].any(), "the next token is of another text, or there is none"


def test_belady_and_the_told_policy_know_when_the_recording_begins() -> None:
    whole = recording()
    policy = belady(whole, before=3)
    everyone = np.arange(whole.all_experts)
    first = {int(expert) for expert in whole.routing[0, 0]}
    assert policy.victim(everyone, 0.0) not in first
    scores = ReuseForesight({(1, 0): np.arange(whole.all_experts, dtype=np.float32)}, 32.0)
    told, plain = ToldReuse(whole, scores, before=3), Reuse(whole.all_experts)
    for each in (told, plain):
        each.touch_many([0, 1], 4.0)  # token 0
    assert np.array_equal(told.scores(everyone, 4.0), plain.scores(everyone, 4.0))
    told.touch_many([0, 1], 5.0)  # token 1, whose first layer is a tap
    assert told.victim(everyone, 5.0) == 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"routing": "generator"}, "recorded together"),
        ({"batches": (1, 2)}, "one row"),
        ({"driver": "direct"}, "next layer"),
        ({"residencies": (100.0, 0.0)}, "one row"),
        ({"horizon": 4}, "horizon"),
    ],
)
def test_forecasts_that_cannot_be_measured_are_refused(asked: dict[str, object], said: str) -> None:
    given: dict[str, object] = {"predict": "heads", "routing": "file.safetensors", "residencies": (25.0,)}
    with pytest.raises(ConfigError, match=said):
        DecodeOptions(**given | asked)  # type: ignore[arg-type]
