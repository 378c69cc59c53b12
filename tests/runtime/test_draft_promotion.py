"""What is likely comes into RAM while somebody types: once, beside what the last turn has read, and not after Enter."""

from collections.abc import Iterator

import pytest

from steerpipe.intake.edits import paste
from steerpipe.runtime.drafts import DraftId, Drafts, DraftWork
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.transfer.promotion import Promotion
from steerpipe.transfer.source import LadderSource
from tests.runtime.drafting import GREEDY

TEXT = "Can you tell me what the capital of France is?"
PROMOTE = DraftWork(prefill=False, ahead_tokens=0, forecast=False, guess=False, promote=True)


@pytest.fixture
def pipe() -> Iterator[Pipeline]:
    """After a turn that has filled RAM."""
    with Pipeline(
        fast_memory="12.5%", ram="22MiB", dtype="float32", threads=1, predict="off", profile=False, max_context=256
    ) as found:
        found.generate("Tell me about dogs and cats.", temperature=0.0, max_tokens=8, ignore_eos=True)
        yield found


def ladder(pipe: Pipeline) -> LadderSource:
    assert isinstance(pipe.experts, LadderSource)
    return pipe.experts


def promotion_of(pipe: Pipeline) -> Promotion:
    promotion = ladder(pipe).promotion
    assert promotion is not None
    return promotion


def settled(pipe: Pipeline) -> int:
    """Blocks that were promoted, when no more are on their way."""
    promotion = promotion_of(pipe)
    with ladder(pipe)._ladder.lock:
        while promotion.moving:
            ladder(pipe)._ladder.changed.wait()
        return promotion.promoted


def typed(drafts: Drafts, seconds: float) -> DraftId:
    draft = drafts.open("a", settings=GREEDY)
    drafts.edit(draft, [paste(0, TEXT, seconds)])
    drafts.tend(seconds + 1.0)
    return draft


def test_the_same_forecast_sends_for_nothing_twice(pipe: Pipeline) -> None:
    drafts = pipe.drafts(PROMOTE)
    typed(drafts, 0.0)
    promoted = settled(pipe)
    typed(drafts, 10.0)
    assert settled(pipe) == promoted > 20


def test_what_the_last_turn_has_read_keeps_half_of_ram(pipe: Pipeline) -> None:
    tier = promotion_of(pipe).tier
    warm = tier.held()
    assert len(warm) == tier.blocks
    drafts = pipe.drafts(PROMOTE)
    for seconds in (0.0, 10.0, 20.0, 30.0):
        typed(drafts, seconds)
        settled(pipe)
    assert tier.blocks > len(tier.held() & warm) >= tier.blocks - tier.blocks // 2


def test_enter_ends_promotion(pipe: Pipeline) -> None:
    drafts, promotion = pipe.drafts(PROMOTE), promotion_of(pipe)
    with ladder(pipe)._ladder.lock:  # no reader takes anything meanwhile
        draft = typed(drafts, 0.0)
        assert promotion.pending
        drafts.submit(draft)
        assert not promotion.pending
