"""More drafts than there is room for: nobody computes another's prompt away; who waits is told, and goes on later."""

from collections.abc import Iterator

import pytest

from steerpipe import Pipeline
from steerpipe.core.ids import SequenceId
from steerpipe.engine.request import Request
from steerpipe.engine.scheduler import PrefillStep
from steerpipe.engine.step import Prefilled
from steerpipe.intake.edits import paste
from steerpipe.runtime.drafts import DraftId, DraftWork
from tests.runtime.drafting import GREEDY, Desk, expected

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


def note_tokens(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each prefill step from now on computes."""
    noted: list[int] = []
    runner = desk.engine._runner
    prefill = runner.prefill

    def noting(step: PrefillStep) -> Prefilled:
        noted.append(len(step.tokens))
        return prefill(step)

    monkeypatch.setattr(runner, "prefill", noting)
    return noted


def note_questions(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What is asked of the engine from now on."""
    noted: list[Request] = []
    prepare = desk.engine.prepare

    def noting(request: Request, ahead: int = 0) -> SequenceId:
        noted.append(request)
        return prepare(request, ahead)

    monkeypatch.setattr(desk.engine, "prepare", noting)
    return noted


def test_those_who_came_keep_theirs_and_the_others_wait_and_are_told(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = [typed(desk, "a", name) for name in range(5)]
    crowded = [desk.drafts.warmth(draft).crowded for draft in drafts]
    assert not crowded[0] and crowded[-1]
    before = prefilled(desk, drafts)
    computed = note_tokens(desk, monkeypatch)
    for draft in drafts:  # a few words in each
        desk.drafts.edit(draft, [paste(len(desk.drafts.text(draft)), " and so on it goes.", 1.0)])
    desk.rest()
    after = prefilled(desk, drafts)
    assert all(now >= then for now, then in zip(after, before, strict=True))
    assert sum(computed) == sum(after) - sum(before), "nothing was computed a second time"


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


def test_who_waits_is_called_after_an_answer_whose_prompt_is_kept(desk: Desk) -> None:
    for name in range(4):
        last = typed(desk, "a", name)
    assert desk.drafts.warmth(last).crowded and desk.engine.load.live_blocks == 6
    less = desk.drafts.warmth(last).prefilled_tokens
    ids = desk.pipe.encode(LONG * 2)[:400]
    answer = desk.engine.submit(Request(ids, GREEDY, scope="b"))
    while desk.engine.runs(answer):
        desk.drafts.tend(desk.now)
        desk.engine.step()
    assert desk.engine.load.live_blocks == 6, "no block came back"
    assert desk.drafts.next_wake() is not None
    desk.rest()
    assert desk.drafts.warmth(last).prefilled_tokens > less


def test_a_draft_takes_nothing_of_another_whoever_s_that_is_and_is_answered_all_the_same(desk: Desk) -> None:
    many = [typed(desk, "a", name) for name in range(5)]
    before = prefilled(desk, many)
    other = typed(desk, "b", 9)
    assert desk.drafts.warmth(other).crowded and prefilled(desk, many) == before
    text = desk.drafts.text(other)
    told = desk.answer(desk.drafts.submit(other, settings=GREEDY))
    assert told == expected(desk.pipe, text)


def test_an_end_makes_one_draft_ask_again_and_none_while_somebody_is_answered(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = [typed(desk, "a", name) for name in range(12)]
    asked = note_questions(desk, monkeypatch)
    desk.drafts.close(drafts.pop())  # it held nothing
    desk.rest()
    assert len(asked) == 1, "the first had no room: nobody else asks"
    answer = desk.engine.submit(Request(desk.pipe.encode("Hello"), GREEDY, scope="b"))
    desk.drafts.close(drafts.pop())
    while desk.engine.runs(answer):
        desk.drafts.tend(desk.now)
        desk.engine.step()
    assert len(asked) == 1
    desk.rest()
    assert len(asked) > 1


def test_many_who_type_at_once_ask_one_by_one(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in range(5):
        typed(desk, "a", name)
    asked = note_questions(desk, monkeypatch)
    for name in range(5, 9):
        desk.drafts.edit(desk.drafts.open("a"), [paste(0, f"{name} {LONG}", 0.0)])
    for questions in range(1, 5):
        assert desk.drafts.next_wake() is not None, "somebody has not asked yet"
        desk.drafts.tend(desk.now)
        assert len(asked) == questions


def test_what_is_typed_while_somebody_is_answered_is_computed_after_it(desk: Desk) -> None:
    answer = desk.engine.submit(Request(desk.pipe.encode("Hello"), GREEDY, scope="b"))
    draft = desk.drafts.open("a")
    desk.drafts.edit(draft, [paste(0, LONG, 0.0)])
    while desk.engine.runs(answer):
        desk.drafts.tend(desk.now)
        desk.engine.step()
    assert desk.engine.idle and desk.drafts.warmth(draft).prefilled_tokens == 0
    assert desk.drafts.next_wake() is not None, "an engine with nothing else to do would sleep"
    desk.rest()
    assert desk.drafts.warmth(draft).prefilled_tokens > 128


def test_somebody_alone_has_the_whole_context() -> None:
    with Pipeline(dtype="float32", threads=1, predict="off", profile=False, max_context=512, max_batch=1) as alone:
        assert alone.config.kv_blocks == 4
        desk = Desk(alone)
        draft = desk.drafts.open("a", settings=GREEDY)
        desk.drafts.edit(draft, [paste(0, "word and " * 150, 0.0)])
        desk.rest()
        for _ in range(5):
            desk.drafts.edit(draft, [paste(len(desk.drafts.text(draft)), "word and more ", desk.now)])
            desk.rest()
        found = desk.drafts.warmth(draft)
        assert found.typed_tokens > 3 * 128 and found.speculated_tokens == 8 and not found.crowded


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
