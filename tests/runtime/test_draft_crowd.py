"""More drafts than there is room for: nobody computes another's prompt away; who waits is told, and goes on later."""

from collections.abc import Iterator

import pytest

from steerpipe import Pipeline
from steerpipe.intake.edits import paste
from steerpipe.runtime.drafts import DraftId, DraftWork
from tests.runtime.drafting import GREEDY, Desk

LONG = "Can you tell me what the capital of France is? " * 15  # more than one block of 128 tokens


@pytest.fixture
def desk() -> Iterator[Desk]:
    """Six KV blocks."""
    with Pipeline(
        dtype="float32", threads=1, predict="off", profile=False, max_context=512, max_batch=1, kv_memory="29MB"
    ) as small:
        assert small.config.kv_blocks == 6
        yield Desk(small, DraftWork(ahead_tokens=0))


def typed(desk: Desk, scope: str, name: int) -> DraftId:
    draft = desk.drafts.open(scope)
    desk.drafts.edit(draft, [paste(0, f"{name} {LONG}", 0.0)])
    desk.rest()
    return draft


def prefilled(desk: Desk, drafts: list[DraftId]) -> list[int]:
    return [desk.drafts.warmth(draft).prefilled_tokens for draft in drafts]


def test_those_who_came_keep_theirs_and_the_others_wait_and_are_told(desk: Desk) -> None:
    drafts = [typed(desk, "a", name) for name in range(5)]
    warm = [not desk.drafts.warmth(draft).crowded for draft in drafts]
    assert warm[0] and not warm[-1]
    before = prefilled(desk, drafts)
    computed = desk.engine.compute_seconds
    for draft in drafts:  # a key in each
        desk.drafts.edit(draft, [paste(len(desk.drafts.text(draft)), ".", 1.0)])
    desk.rest()
    assert prefilled(desk, drafts) >= before and prefilled(desk, drafts)[0] == before[0]
    assert desk.engine.compute_seconds - computed < computed / 2, "nothing was computed a second time"


def test_who_waits_goes_on_when_there_is_room(desk: Desk) -> None:
    drafts = [typed(desk, "a", name) for name in range(5)]
    last = drafts[-1]
    less = desk.drafts.warmth(last).prefilled_tokens
    assert desk.drafts.warmth(last).crowded and desk.drafts.next_wake() is None
    for draft in drafts[:2]:
        desk.drafts.close(draft)
    desk.rest()
    assert desk.drafts.warmth(last).prefilled_tokens > less


def test_who_waits_is_called_when_an_answer_gives_its_room_back(desk: Desk) -> None:
    answer = desk.engine.prefixes.pool.sequence()  # of somebody whose answer is being written
    answer.append(5 * 128)
    draft = typed(desk, "a", 0)
    assert desk.drafts.warmth(draft).crowded and desk.drafts.next_wake() is None
    answer.free()
    assert desk.drafts.next_wake() is not None, "an engine with nothing else to do would sleep"
    desk.rest()
    assert desk.drafts.warmth(draft).prefilled_tokens > 128 and not desk.drafts.warmth(draft).crowded


def test_a_user_with_many_drafts_leaves_another_his_share(desk: Desk) -> None:
    many = [typed(desk, "a", name) for name in range(5)]
    other = typed(desk, "b", 9)
    found = desk.drafts.warmth(other)
    assert found.prefilled_tokens > 128 and not found.crowded
    kept = prefilled(desk, [*many, other])
    for draft in many:
        desk.drafts.edit(draft, [paste(len(desk.drafts.text(draft)), " and more of it", 1.0)])
    desk.rest()
    assert desk.drafts.warmth(other).prefilled_tokens == kept[-1], "nor do they take it back"


def test_of_an_answer_that_was_begun_and_dropped_no_account_is_left() -> None:
    with Pipeline(
        dtype="float32", threads=1, predict="off", profile=False, quality="fast", fast_memory="12.5%"
    ) as lossy:
        desk = Desk(lossy)
        assert lossy.quality is not None
        accounts = lossy.quality.desk.accounts
        for number in range(3):
            draft = desk.drafts.open("a", settings=GREEDY)
            desk.drafts.edit(draft, [paste(0, f"{number} and so on?", 0.0)])
            desk.rest()
            assert len(accounts._of) == 1, "that of the answer which was begun"
            desk.drafts.close(draft)
            assert not accounts._of
