"""Drafts: prefilled while they are typed, begun in a pause, the same tokens after Enter, and nothing left behind."""

from collections.abc import Iterator

import pytest

from steerpipe.core.errors import RequestError
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import ChatMessage
from steerpipe.intake.draft import TypedText
from steerpipe.intake.edits import delete, insert, move, paste, replace
from steerpipe.intake.tokens import PrefixChange, StablePrefix
from steerpipe.runtime.drafts import DraftWork
from steerpipe.runtime.pipeline import Pipeline
from tests.runtime.drafting import GREEDY, Desk, expected, keys, nothing_left

TEXT = "Can you tell me what the capital of France is, and how many people live there today?"
HISTORY = (ChatMessage("user", "Hello there!"), ChatMessage("assistant", "Hi, how are you?"))


@pytest.fixture(scope="module")
def nano() -> Iterator[Pipeline]:
    with Pipeline(dtype="float32", threads=1, predict="off", profile=False, max_context=1024) as pipe:
        yield pipe


@pytest.fixture
def desk(nano: Pipeline) -> Iterator[Desk]:
    desk = Desk(nano)
    yield desk
    desk.close()


def test_what_cannot_change_is_prefilled_while_it_is_typed_all_but_a_few_tokens(desk: Desk) -> None:
    draft = desk.drafts.open("a")
    desk.type(draft, keys(TEXT))
    warmth = desk.drafts.warmth(draft)
    assert 64 < warmth.prefilled_tokens <= warmth.stable_tokens < warmth.prefilled_tokens + 4
    assert warmth.stable_tokens < warmth.typed_tokens
    sequence = desk.drafts.submit(draft, settings=GREEDY)
    while not desk.engine.idle:
        desk.engine.step()
    assert desk.engine.take_completion(sequence).timings.cache_n == warmth.prefilled_tokens


def test_only_whole_cells_are_prefilled_where_a_part_of_one_could_change_bits(nano: Pipeline) -> None:
    desk = Desk(nano, parts=False)
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.type(draft, keys(TEXT))
    warmth = desk.drafts.warmth(draft)
    assert warmth.prefilled_tokens == warmth.stable_tokens // 16 * 16 > 64
    desk.drafts.edit(draft, [delete(len(TEXT) - 9, 9, desk.now)])
    assert desk.drafts.warmth(draft).prefilled_tokens % 16 == 0
    assert desk.answer(desk.drafts.submit(draft)) == expected(nano, TEXT[:-9])
    desk.close()


def test_an_answer_that_was_begun_in_a_pause_comes_at_once_and_is_the_answer(desk: Desk) -> None:
    wanted = expected(desk.pipe, TEXT)
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.type(draft, keys(TEXT))
    assert desk.drafts.warmth(draft).speculated_tokens == 0
    desk.rest()
    warmth = desk.drafts.warmth(draft)
    assert warmth.speculated_tokens == 8 and warmth.saved_seconds > 0
    sequence = desk.drafts.submit(draft)
    at_once = desk.engine.step()
    assert [event.token_id for event in at_once] == wanted[:8]
    assert [event.token_id for event in at_once] + desk.answer(sequence) == wanted


def test_a_key_after_the_pause_drops_the_answer(desk: Desk) -> None:
    wanted = expected(desk.pipe, TEXT + "!")
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.type(draft, keys(TEXT))
    desk.rest()
    desk.drafts.edit(draft, [insert(len(TEXT), "!", desk.now)])
    assert desk.drafts.warmth(draft).speculated_tokens == 0
    assert desk.answer(desk.drafts.submit(draft)) == wanted


def test_an_answer_of_other_settings_is_not_given(desk: Desk) -> None:
    other = SamplingSettings(temperature=0.8, seed=7, max_tokens=12)
    wanted = expected(desk.pipe, TEXT, settings=other)
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.type(draft, keys(TEXT))
    desk.rest()
    assert desk.answer(desk.drafts.submit(draft, settings=other)) == wanted


@pytest.mark.parametrize("batched", [False, True])
def test_a_sampled_answer_is_begun_with_its_own_seed(desk: Desk, batched: bool) -> None:
    sampled = SamplingSettings(temperature=0.9, top_p=0.9, seed=11, max_tokens=12, repetition_penalty=1.1)
    wanted = expected(desk.pipe, TEXT, HISTORY, sampled, batched=batched)
    draft = desk.drafts.open("a", HISTORY, settings=sampled, batched=batched)
    desk.type(draft, keys(TEXT))
    desk.rest()
    assert desk.drafts.warmth(draft).speculated_tokens == 8
    assert desk.answer(desk.drafts.submit(draft)) == wanted


def test_an_answer_that_ends_before_it_is_asked_for_ends(desk: Desk) -> None:
    short = SamplingSettings(temperature=0.0, max_tokens=3)
    wanted = expected(desk.pipe, TEXT, settings=short)
    draft = desk.drafts.open("a", settings=short)
    desk.type(draft, keys(TEXT))
    desk.rest()
    assert desk.drafts.warmth(draft).speculated_tokens == 3
    assert desk.answer(desk.drafts.submit(draft)) == wanted
    assert desk.engine.load.kept_blocks > 0, "its prompt is kept like any other"


def test_an_edit_in_the_middle_keeps_what_stands_before_it(desk: Desk) -> None:
    long = " ".join([TEXT] * 3)
    draft = desk.drafts.open("a")
    desk.type(draft, [paste(0, long, 0.0)])
    desk.rest()
    before = desk.drafts.warmth(draft)
    middle = len(long) // 2
    desk.drafts.edit(draft, [replace(middle, 4, "other words", desk.now)])
    after = desk.drafts.warmth(draft)
    assert 0 < after.prefilled_tokens < before.prefilled_tokens
    assert after.saved_seconds < before.saved_seconds
    assert desk.engine.prefixes.shared("a", desk.drafts._open[draft].prefix.ids) == after.prefilled_tokens
    desk.rest()
    assert desk.drafts.warmth(draft).prefilled_tokens > after.prefilled_tokens


def test_the_conversation_before_a_draft_is_prefilled_before_a_key_comes(desk: Desk) -> None:
    draft = desk.drafts.open("a", HISTORY)
    desk.rest()
    assert desk.drafts.warmth(draft).prefilled_tokens >= 80


def test_a_draft_takes_only_time_that_nobody_wants_and_a_cell_at_most(desk: Desk) -> None:
    """Every step between a request's arrival and its end is its own, but for the one that was under way."""
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.drafts.edit(draft, [paste(0, TEXT * 8, 0.0)])
    desk.drafts.tend(0.0)
    desk.engine.step()
    computed = desk.engine.prefixes.shared("a", desk.drafts._open[draft].prefix.ids)
    assert computed == 16, "one step of a draft is one cell"
    running = desk.engine.submit(Request(desk.pipe.encode("Hello"), GREEDY))
    steps = 0
    while desk.engine.runs(running):
        desk.drafts.tend(9.0)
        desk.engine.step()
        steps += 1
    tokens = desk.engine.take_completion(running).timings.predicted_n
    assert steps == tokens > 4, "one for the prompt with the first token, one for each of the others"
    assert desk.engine.prefixes.shared("a", desk.drafts._open[draft].prefix.ids) == computed
    desk.drafts.close(draft)


def test_drafts_of_two_people_take_turns(desk: Desk) -> None:
    many = [desk.drafts.open("many") for _ in range(3)]
    one = desk.drafts.open("one")
    for number, draft in enumerate([*many, one]):
        desk.drafts.edit(draft, [paste(0, f"{number} {TEXT * 4}", 0.0)])
    for _ in range(8):
        desk.drafts.tend(0.0)
        desk.engine.step()
    desk.drafts.tend(0.0)
    done = [desk.drafts.warmth(draft).prefilled_tokens for draft in (*many, one)]
    assert done[3] == 64 and max(done[:3]) <= 32


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_abandoned_drafts_leave_nothing(desk: Desk, count: int) -> None:
    with nothing_left(desk.pipe):
        for number in range(count):
            draft = desk.drafts.open(f"person {number % 7}", HISTORY[: number % 3], settings=GREEDY)
            desk.drafts.edit(draft, [paste(0, f"{number} {TEXT}", float(number))])
            if number % 100 == 0:
                desk.now = float(number)
                desk.rest(number + 0.5)
            desk.drafts.close(draft)
        assert len(desk.drafts) == 0 and not desk.drafts._restless
        assert desk.engine.idle


def test_closing_a_draft_keeps_what_was_there_before_it(desk: Desk) -> None:
    head = desk.drafts._prompts.begin(HISTORY).ids
    desk.engine.submit(Request(head, GREEDY, scope="a", prompt_only=True))
    while not desk.engine.idle:
        desk.engine.step()
    kept = desk.engine.prefixes.shared("a", head) // 16 * 16
    assert kept >= 64
    draft = desk.drafts.open("a", HISTORY)
    desk.type(draft, keys(TEXT))
    desk.drafts.close(draft)
    assert desk.engine.prefixes.shared("a", head) // 16 * 16 == kept


def test_drafts_that_are_not_wanted_do_nothing(nano: Pipeline) -> None:
    nano.engine.forget_prefixes()
    desk = Desk(nano, DraftWork(prefill=False, ahead_tokens=0))
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.type(draft, keys(TEXT))
    desk.rest()
    warmth = desk.drafts.warmth(draft)
    assert (warmth.prefilled_tokens, warmth.speculated_tokens) == (0, 0)
    assert desk.answer(desk.drafts.submit(draft)) == expected(nano, TEXT)


def test_a_draft_longer_than_the_context_is_refused_at_enter_and_stays_open(desk: Desk) -> None:
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.drafts.edit(draft, [paste(0, TEXT * 100, 0.0)])
    desk.rest()
    with pytest.raises(RequestError, match="the context holds 1024"):
        desk.drafts.submit(draft)
    assert desk.drafts.text(draft) == TEXT * 100
    desk.drafts.edit(draft, [delete(0, len(TEXT) * 100, 1.0), paste(0, TEXT, 1.0)])
    assert desk.answer(desk.drafts.submit(draft)) == expected(desk.pipe, TEXT)


def test_an_edit_outside_the_text_is_an_error_and_those_before_it_stand(desk: Desk) -> None:
    draft = desk.drafts.open("a")
    with pytest.raises(RequestError, match="in a draft of 2"):
        desk.drafts.edit(draft, [insert(0, "ab", 0.0), move(1, 5, 0, 0.1)])
    assert desk.drafts.text(draft) == "ab"


def test_an_edit_that_is_refused_does_not_hide_what_the_one_before_it_changed(desk: Desk) -> None:
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.type(draft, [paste(0, TEXT, 0.0)])
    desk.rest()
    with pytest.raises(RequestError):
        desk.drafts.edit(draft, [replace(0, 3, "Would", desk.now), delete(0, 1000, desk.now)])
    session = desk.drafts._open[draft]
    assert session.computed == session.prefix.first(len(session.computed))
    desk.drafts.edit(draft, [insert(len(TEXT) + 2, " Please.", desk.now)])
    desk.rest()
    wanted = expected(desk.pipe, "Would" + TEXT[3:] + " Please.")
    assert desk.answer(desk.drafts.submit(draft)) == wanted


def test_many_edits_at_once_are_looked_at_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    follow = StablePrefix.follow

    def counting(prefix: StablePrefix, typed: TypedText, changed_at: int) -> PrefixChange:
        looks.append(changed_at)
        return follow(prefix, typed, changed_at)

    monkeypatch.setattr(StablePrefix, "follow", counting)
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.type(draft, [paste(0, TEXT, 0.0)])
    desk.rest()
    edits = [insert(len(TEXT), "!", desk.now), replace(8, 4, "show", desk.now), insert(len(TEXT), "?", desk.now)]
    desk.drafts.edit(draft, edits)
    assert looks == [0, 8]
    session = desk.drafts._open[draft]
    assert session.computed == session.prefix.first(len(session.computed))
    assert desk.answer(desk.drafts.submit(draft)) == expected(desk.pipe, session.typed.text)


def test_one_draft_is_read_at_a_time_by_turns_of_scopes_and_none_while_somebody_is_answered(desk: Desk) -> None:
    long = TEXT * 25
    many, one = [desk.drafts.open("many") for _ in range(2)], desk.drafts.open("one")
    for draft in (*many, one):
        desk.drafts.edit(draft, [paste(0, long, 0.0)])
    prefixes = [desk.drafts._open[draft].prefix for draft in (*many, one)]

    def read() -> list[int]:
        before = [prefix.tail_length for prefix in prefixes]
        desk.drafts.tend(0.0)
        return [was - prefix.tail_length > 0 for was, prefix in zip(before, prefixes, strict=True)]

    answered = desk.engine.submit(Request(desk.pipe.encode("Hello"), GREEDY))
    while desk.engine.runs(answered):
        assert read() == [False] * 3
        desk.engine.step()
    desk.engine.take_completion(answered)
    assert [read() for _ in range(4)] == [
        [True, False, False], [False, False, True], [False, True, False], [False, False, True],
    ]  # fmt: skip
    desk.rest()
    assert not any(prefix.behind for prefix in prefixes)


def test_nothing_is_done_for_a_text_that_can_never_fit_until_it_is_shorter(desk: Desk) -> None:
    draft = desk.drafts.open("a", settings=GREEDY)
    desk.type(draft, [paste(0, TEXT, 0.0)])
    desk.rest()
    huge = 1024 * 16
    desk.drafts.edit(draft, [paste(len(TEXT), "a" * huge, desk.now)])
    assert desk.drafts.next_wake() is None and desk.drafts.warmth(draft).speculated_tokens == 0
    desk.drafts.tend(desk.now + 9)
    assert desk.engine.idle and desk.drafts.warmth(draft).too_long
    desk.drafts.edit(draft, [delete(len(TEXT), huge, desk.now), replace(0, 3, "Would", desk.now)])
    assert not desk.drafts.warmth(draft).too_long
    desk.rest()
    assert desk.drafts.warmth(draft).speculated_tokens == 8
    assert desk.answer(desk.drafts.submit(draft)) == expected(desk.pipe, "Would" + TEXT[3:])


def test_a_long_unstable_end_is_estimated_and_a_short_one_is_counted_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = desk.drafts._prompts.encode
    draft = desk.drafts.open("a")
    desk.drafts.edit(draft, [paste(0, "a" * 2000, 0.0)])
    desk.rest()
    monkeypatch.setattr(desk.drafts._prompts, "encode", lambda text: encoded.append(len(text)) or encode(text))
    assert desk.drafts.warmth(draft).typed_tokens - desk.drafts.warmth(draft).stable_tokens == 500
    assert not encoded
    desk.drafts.edit(draft, [delete(20, 1980, desk.now)])
    assert desk.drafts.warmth(draft) == desk.drafts.warmth(draft)
    assert len(encoded) == 1


def test_a_draft_that_is_gone_is_an_error(desk: Desk) -> None:
    draft = desk.drafts.open("a")
    desk.drafts.close(draft)
    with pytest.raises(RequestError, match="there is no draft"):
        desk.drafts.warmth(draft)


def test_a_request_that_needs_the_room_gets_it_from_begun_answers(nano: Pipeline) -> None:
    with Pipeline(dtype="float32", threads=1, predict="off", profile=False, max_context=512, kv_memory="24MB") as small:
        desk = Desk(small)
        drafts = [desk.drafts.open(f"p{n}", settings=GREEDY) for n in range(3)]
        for number, draft in enumerate(drafts):
            desk.drafts.edit(draft, [paste(0, f"{number} {TEXT}", 0.0)])
        desk.rest()
        blocks = desk.engine.load.capacity_blocks
        room = SamplingSettings(temperature=0.0, max_tokens=blocks * 128 - 110, ignore_eos=True)
        sequence = desk.engine.submit(Request(desk.pipe.encode("Hello"), room))
        desk.engine.step()
        assert desk.engine.runs(sequence) and desk.engine.load.waiting == 0
        desk.engine.discard(sequence)
        wanted = expected(nano, f"1 {TEXT}")
        assert desk.answer(desk.drafts.submit(drafts[1])) == wanted


@pytest.fixture(scope="module")
def tight() -> Iterator[Pipeline]:
    """Ten KV blocks in pages of the experts."""
    with Pipeline(dtype="float32", threads=1, profile=False, predict="off", fast_memory="96MiB", kv_memory="shared",
                  max_context=512) as pipe:  # fmt: skip
        yield pipe


def test_three_who_type_keep_what_was_computed_for_them_in_shared_pages(tight: Pipeline) -> None:
    desk = Desk(tight, DraftWork(ahead_tokens=0))
    drafts = [desk.drafts.open(f"user {number}") for number in range(3)]
    for number in range(2):
        for draft in drafts:
            at = len(desk.drafts.text(draft))
            desk.drafts.edit(draft, [paste(at, TEXT, float(number))])
        desk.rest()
    warmths = [desk.drafts.warmth(draft) for draft in drafts]
    assert all(warmth.stable_tokens - 16 < warmth.prefilled_tokens for warmth in warmths)
    for number, draft in enumerate(drafts):
        ids = desk.drafts._open[draft].prefix.ids
        assert desk.engine.prefixes.shared(f"user {number}", ids) == warmths[number].prefilled_tokens
    desk.close()


def test_warmth_is_of_what_is_there_and_what_is_gone_is_computed_with_the_next_cell(desk: Desk) -> None:
    draft = desk.drafts.open("a")
    desk.type(draft, [paste(0, TEXT * 3, 0.0)])
    desk.rest()
    before = desk.drafts.warmth(draft)
    desk.engine.forget_prefixes()
    gone = desk.drafts.warmth(draft)
    assert (gone.prefilled_tokens, gone.saved_seconds) == (0, 0.0) and before.saved_seconds > 0
    desk.rest()
    assert desk.engine.load.kept_blocks == 0, "nobody types: nothing is done"
    desk.drafts.edit(draft, [paste(len(TEXT) * 3, TEXT * 2, 1.0)])
    desk.rest()
    after = desk.drafts.warmth(draft)
    assert after.prefilled_tokens > before.prefilled_tokens
    assert desk.engine.prefixes.shared("a", desk.drafts._open[draft].prefix.ids) == after.prefilled_tokens
