"""The reuse forecast that comes with nano."""

from pathlib import Path

import pytest
import torch

from steerpipe.arena.foresee import foresee_reuse, recording_of
from steerpipe.predict.reuse import LiveReuse
from steerpipe.predict.reuse_file import load_reuse
from steerpipe.predict.shipped import for_model
from steerpipe.runtime.models import find_model
from steerpipe.store.policies import HALF_LIFE_TOKENS
from steerpipe.trace.live import TokenSequence
from steerpipe.trace.models import load_model
from steerpipe.train.material import collect
from steerpipe.transfer.machine import Machine, slots_of_share
from steerpipe.transfer.replay import replay

STORY = (
    "The old clockmaker had lived in the same house for forty years, and in all that time he had never once been late. "
    "Every morning he wound the clocks in the hall, drank a cup of tea by the window, and watched the children walk to "
    "school. One winter day the clocks stopped. He opened the largest of them and found a mouse asleep between the "
    'wheels. "You might have chosen a quieter room," said the old man, but the mouse did not wake. So he closed it '
    "again, very gently, and for the first time in forty years he went back to bed. When the children came home in the "
    "evening they saw that the lamp was not lit. They knocked, and they waited, and at last he came to the door in his "
    'nightcap. "What time is it?" they asked him. He laughed until he had to hold on to the door. "I have no idea," he '
    'said, "and it is the best day I have had since I was your age. Come in, and be quiet: there is somebody asleep." '
)


@pytest.fixture(scope="module")
def shipped() -> Path:
    found = for_model(find_model(None))
    assert found is not None
    return found.files["reuse"]


def test_it_fits_nano_and_the_default_policy(shipped: Path) -> None:
    forecast = load_reuse(shipped)
    assert shipped.stat().st_size <= 800_000
    assert (forecast.config.layers, forecast.config.experts, forecast.config.hidden) == (24, 60, 192)
    assert forecast.config.count_tokens == HALF_LIFE_TOKENS
    said = LiveReuse(forecast).at(forecast.config.taps[0], torch.randn(1, 192))
    assert said is not None
    assert said.shape == (1440,)
    assert bool(said.isfinite().all())


@pytest.mark.slow
def test_it_misses_less_than_lfru_on_a_story_that_nobody_trained_on(shipped: Path) -> None:
    loaded = load_model(None)
    tokens = loaded.codec.encode(STORY, add_special=False)
    trace = collect(loaded.model, [TokenSequence("story", tokens, len(tokens))])
    recording = recording_of(trace, "story")
    scores = foresee_reuse(load_reuse(shipped), trace)
    for share in (0.25, 0.4):
        machine = Machine(slots_of_share(share, recording.all_experts), 1, 1.0, 0.0)
        lfru = replay(recording, machine, "lfru", warmup_tokens=30)
        reuse = replay(recording, machine, "reuse", reuse=scores, warmup_tokens=30)
        belady = replay(recording, machine, "belady", warmup_tokens=30)
        closed = (reuse.hit_rate - lfru.hit_rate) / (belady.hit_rate - lfru.hit_rate)
        assert 0.15 < closed < 1, f"{closed:.3f} of the gap at {share:.0%}"
