"""Work that nobody has asked for yet: told to nobody, given up for anybody, and exactly what would be computed."""

from dataclasses import replace

import pytest

from steerpipe.core.errors import CapacityError
from steerpipe.core.events import TokenEvent
from steerpipe.core.ids import SequenceId
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.prefixes import as_bytes
from steerpipe.engine.request import Promise, Request
from steerpipe.engine.turns import Turns
from tests.engine.test_engine import GREEDY, Bench, bench, complete, prompt
from tests.engine.test_prefixes import FailingLate, keep, store

SAMPLED = replace(GREEDY, temperature=0.9, seed=None)


def ahead(here: Bench, ids: list[int], tokens: int = 4, sampling: SamplingSettings = GREEDY) -> SequenceId:
    sequence = here.engine.prepare(Request(tuple(ids), sampling, batched=True, scope="a"), tokens)
    while not here.engine.idle:
        assert here.engine.step() == []
    return sequence


def claimed(here: Bench, sequence: SequenceId) -> list[int]:
    assert here.engine.claim(sequence)
    tokens = []
    while not here.engine.idle:
        tokens += [event.token_id for event in here.engine.step() if isinstance(event, TokenEvent)]
    return tokens


def test_a_prepared_answer_waits_and_is_the_answer() -> None:
    here, ids = bench(), prompt(1, 40)
    sequence = ahead(here, ids)
    found = here.engine.prepared(sequence)
    assert found is not None and (found.tokens, found.done) == (4, True) and found.seconds > 0
    assert claimed(here, sequence) == list(complete(ids).token_ids)
    done = here.engine.take_completion(sequence)
    assert done.token_ids == complete(ids).token_ids and done.text == complete(ids).text
    assert done.timings.cache_n == 40 and done.timings.prompt_n == 0
    here.engine.check_integrity()


def test_a_prepared_answer_is_claimed_in_the_middle_of_its_work() -> None:
    here, ids = bench(prefill_chunk=32), prompt(1, 60)
    for steps in range(1, 7):
        sequence = here.engine.prepare(Request(tuple(ids), GREEDY, batched=True, scope="a"), 4)
        for _ in range(steps):
            here.engine.step()
        assert claimed(here, sequence) == list(complete(ids).token_ids)
        here.engine.take_completion(sequence)
        here.engine.forget_prefixes()
        here.engine.check_integrity()


def test_an_answer_that_has_ended_is_claimed_whole() -> None:
    here, ids, short = bench(), prompt(2, 20), replace(GREEDY, max_tokens=2)
    sequence = ahead(here, ids, 4, short)
    assert here.engine.claim(sequence) and here.engine.runs(sequence)
    assert [event.finish_reason is not None for event in here.engine.step() if isinstance(event, TokenEvent)] == [
        False, True,
    ]  # fmt: skip
    assert not here.engine.runs(sequence) and here.engine.ended(sequence)
    assert here.engine.take_completion(sequence).token_ids == complete(ids, short).token_ids


def test_nothing_stays_of_an_answer_that_is_given_up() -> None:
    here = bench()
    here.engine.discard(ahead(here, prompt(1, 40)))
    here.engine.check_integrity()
    assert here.pool.live_blocks == 0


def test_a_request_takes_the_room_of_prepared_answers_the_oldest_first() -> None:
    here = bench(blocks=3, max_context=300)
    first, second = ahead(here, prompt(1, 40)), ahead(here, prompt(2, 40))
    wanted = here.engine.submit(Request(tuple(prompt(3, 200)), replace(GREEDY, max_tokens=20), batched=True))
    here.engine.step()
    assert here.engine.runs(wanted) and here.engine.load.waiting == 0
    assert here.engine.prepared(first) is None and here.engine.prepared(second) is not None
    assert not here.engine.claim(first)


def test_an_answer_that_has_no_room_to_go_on_is_not_given() -> None:
    here = bench(blocks=2, max_context=256)
    sequence = ahead(here, prompt(1, 100), 4, replace(GREEDY, max_tokens=120))
    here.engine.submit(Request(tuple(prompt(2, 20)), GREEDY, batched=True))
    here.engine.step()
    assert not here.engine.claim(sequence) and here.engine.prepared(sequence) is None
    here.run()


def test_nobody_is_overtaken_by_a_prepared_answer() -> None:
    here = bench(max_batch=1)
    sequence = ahead(here, prompt(1, 20))
    here.engine.submit(Request(tuple(prompt(2, 20)), GREEDY, batched=True))
    assert not here.engine.claim(sequence)
    here.run()


def test_a_prepared_answer_that_fails_is_told_to_nobody() -> None:
    here = bench(experts=FailingLate(1))
    sequence = ahead(here, prompt(1, 40))
    assert here.engine.prepared(sequence) is None and not here.engine.claim(sequence)
    here.engine.check_integrity()


def test_a_prepared_prompt_is_computed_a_cell_at_a_time() -> None:
    here, ids = bench(prefill_chunk=64), prompt(1, 64)
    sequence = here.engine.prepare(Request(tuple(ids), GREEDY, scope="a", prompt_only=True))
    steps = 0
    while not here.engine.idle:
        assert here.engine.step() == []
        steps += 1
    assert steps == 4 and here.engine.ended(sequence)
    assert here.engine.prefixes.shared("a", ids) == 64


def test_a_kept_beginning_is_cut_and_another_prompt_is_not() -> None:
    prefixes, ids = store(), list(range(100))
    keep(prefixes, "a", ids[:96])
    keep(prefixes, "a", [*ids[:20], 900])
    keep(prefixes, "b", ids[:96])
    prefixes.cut("a", ids, 48)
    assert prefixes.shared("a", ids) == 48 and prefixes.shared("b", ids) == 96
    assert prefixes.shared("a", [*ids[:20], 900]) == 21
    prefixes.cut("a", ids, 0)
    assert prefixes.shared("a", ids) == 20, "of the prompt that went on otherwise"


def test_turns_go_to_who_had_none_for_longest() -> None:
    turns: Turns[str] = Turns()
    for who in ("a", "b", "a"):
        turns.take(who)
    assert sorted("abc", key=turns.rank) == ["c", "b", "a"]
    turns.forget("a")
    assert turns.rank("a") == -1
    for number in range(300):
        turns.take(str(number))
    assert turns.rank("b") == -1 and turns.rank("43") == -1 and turns.rank("44") >= 0


@pytest.mark.parametrize("most", [2, 12], ids=["ended", "goes on"])
def test_nothing_is_told_of_a_claimed_answer_that_is_discarded_before_the_next_step(most: int) -> None:
    here, other = bench(), prompt(5, 20)
    gone = ahead(here, prompt(2, 20), 4, replace(GREEDY, max_tokens=most))
    stays = ahead(here, other)
    assert here.engine.claim(gone) and here.engine.claim(stays)
    here.engine.discard(gone)
    assert not here.engine.runs(gone) and not here.engine.ended(gone)
    told = []
    while not here.engine.idle:
        told += here.engine.step()
    assert {event.sequence for event in told} == {stays}
    assert here.engine.take_completion(stays).token_ids == complete(other).token_ids
    here.engine.check_integrity()


def heard(here: Bench, sequence: SequenceId) -> list[int]:
    """What the engine tells of a sequence until it has nothing to do."""
    tokens = []
    while not here.engine.idle:
        told = [event for event in here.engine.step() if isinstance(event, TokenEvent)]
        tokens += [event.token_id for event in told if event.sequence == sequence]
    return tokens


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("known", [1, 3, 4])
@pytest.mark.parametrize("fate", ["claimed", "claimed with more", "given up"])
def test_what_was_told_beforehand_is_followed_by_the_rest(sampling: SamplingSettings, known: int, fate: str) -> None:
    """Whatever has become of the answer that was begun."""
    here, ids = bench(), prompt(1, 40)
    request = Request(tuple(ids), sampling, batched=True, scope="a")
    sequence = here.engine.prepare(request, 4)
    while (opening := here.engine.opening(sequence)) is None or len(opening.events) < known:
        here.engine.step()
    if fate != "claimed":
        heard(here, sequence)
    if fate == "given up":
        here.engine.discard(sequence)
        sequence = here.engine.submit(request, opening.promise)
    else:
        assert here.engine.claim(sequence, opening.promise)
    told = list(opening.promise.token_ids) + heard(here, sequence)
    done = here.engine.take_completion(sequence)
    assert told == list(done.token_ids) and len(told) == sampling.max_tokens
    assert done.text.startswith(opening.text)
    if sampling.seed is not None or not sampling.temperature:
        assert told == list(complete(ids, sampling).token_ids)
    here.engine.forget_prefixes()
    here.engine.check_integrity()


def test_an_answer_with_another_seed_is_not_taken_for_the_one_that_was_told() -> None:
    here, ids = bench(), prompt(1, 40)
    first, second = ahead(here, ids, 4, SAMPLED), ahead(here, ids, 4, SAMPLED)
    opening = here.engine.opening(first)
    assert opening is not None and not here.engine.claim(second, opening.promise)
    assert here.engine.claim(first, opening.promise)


def test_what_was_told_stands_though_another_token_would_be_chosen_now() -> None:
    """On a GPU the same tokens computed in other pieces may differ in the last bits."""
    here, ids = bench(), prompt(1, 40)
    usual = complete(ids).token_ids
    other = (usual[0], (usual[1] + 1) % 64)
    sequence = here.engine.submit(Request(tuple(ids), GREEDY, batched=True), Promise(0, other))
    rest = heard(here, sequence)
    assert here.engine.take_completion(sequence).token_ids == (*other, *rest)
    prepared = ahead(here, ids)
    assert not here.engine.claim(prepared, Promise(0, other))


def test_the_end_of_an_answer_is_told_by_the_engine_alone() -> None:
    here, ids, short = bench(), prompt(2, 20), replace(GREEDY, max_tokens=2)
    sequence = ahead(here, ids, 4, short)
    opening = here.engine.opening(sequence)
    assert opening is not None and [event.finish_reason for event in opening.events] == [None]
    assert here.engine.claim(sequence, opening.promise) and here.engine.runs(sequence)
    last = here.engine.step()
    assert [event.finish_reason is not None for event in last if isinstance(event, TokenEvent)] == [True]


def test_nothing_is_known_of_an_answer_that_has_been_claimed() -> None:
    here = bench()
    sequence = ahead(here, prompt(1, 40))
    assert here.engine.claim(sequence) and here.engine.opening(sequence) is None


def work(here: Bench) -> None:
    """Until there is nothing to do."""
    while not here.engine.idle:
        here.engine.step()
    here.engine.check_integrity()


def typing(here: Bench, prompts: dict[str, list[int]]) -> None:
    """Each is computed, and is being typed by its scope."""
    for scope, ids in prompts.items():
        here.engine.prepare(Request(tuple(ids), GREEDY, scope=scope, prompt_only=True))
        work(here)
    here.engine.prefixes.typed = lambda: [(scope, as_bytes(ids)) for scope, ids in prompts.items()]


def test_what_is_prepared_takes_nothing_of_what_others_type_and_a_request_does() -> None:
    here, theirs = bench(blocks=3, max_context=384), prompt(2, 200)
    typing(here, {"b": theirs})
    with pytest.raises(CapacityError, match="other drafts hold the room"):
        here.engine.prepare(Request(tuple(prompt(1, 200)), GREEDY, scope="a", prompt_only=True))
    assert here.engine.idle and here.engine.prefixes.shared("b", theirs) == 200
    here.engine.submit(Request(tuple(prompt(1, 200)), GREEDY, batched=True, scope="a"))
    work(here)
    assert here.engine.prefixes.shared("b", theirs) == 0


def test_a_prompt_that_goes_on_has_the_block_of_its_own_end() -> None:
    here, own, theirs = bench(blocks=3, max_context=384), prompt(1, 256), prompt(2, 100)
    typing(here, {"b": theirs, "a": own[:208]})
    assert here.pool.live_blocks == 3
    sequence = here.engine.prepare(Request(tuple(own), GREEDY, scope="a", prompt_only=True))
    work(here)
    done = here.engine.take_completion(sequence)
    assert done.timings.prompt_n == 48, "nothing is computed a second time"
    assert here.engine.prefixes.shared("a", own) == 256 and here.engine.prefixes.shared("b", theirs) == 100


def test_a_prompt_that_has_no_room_to_go_on_keeps_what_there_is_of_it() -> None:
    here, own, theirs = bench(blocks=3, max_context=384), prompt(1, 300), prompt(2, 100)
    typing(here, {"b": theirs, "a": own[:208]})
    with pytest.raises(CapacityError):
        here.engine.prepare(Request(tuple(own), GREEDY, scope="a", prompt_only=True))
    assert here.engine.prefixes.shared("a", own) == 208 and here.engine.prefixes.shared("b", theirs) == 100
    here.engine.check_integrity()


def test_what_was_prepared_is_given_up_where_others_have_typed_before_it_was_its_turn() -> None:
    here, theirs = bench(blocks=3, max_context=384), prompt(2, 240)
    here.engine.submit(Request(tuple(theirs), replace(GREEDY, max_tokens=4), batched=True, scope="b"))
    here.engine.step()
    sequence = here.engine.prepare(Request(tuple(prompt(1, 300)), GREEDY, scope="a", prompt_only=True))
    here.engine.step()
    assert here.engine.load.running == 1, "it holds nothing that an answer could want"
    here.engine.prefixes.typed = lambda: [("b", as_bytes(theirs[:128]))]
    work(here)
    assert not here.engine.runs(sequence) and not here.engine.ended(sequence)
    assert here.engine.prefixes.shared("b", theirs) >= 128


def test_an_answer_that_is_claimed_takes_room_of_what_others_type() -> None:
    here, theirs = bench(blocks=3, max_context=384), prompt(2, 200)
    typing(here, {"b": theirs})
    sequence = ahead(here, prompt(1, 100), 4, replace(GREEDY, max_tokens=60))
    assert here.engine.prefixes.shared("b", theirs) == 200
    assert here.engine.claim(sequence) and here.engine.prefixes.shared("b", theirs) == 0
    work(here)
