"""Prompts that are kept: what comes back, to whom, and that reuse changes no bit."""

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steerpipe.core.errors import TransferError
from steerpipe.core.protocols import Lease
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.prefixes import PrefixStore, as_bytes
from steerpipe.engine.request import Request
from steerpipe.model.kv_cache import BLOCK, KvPool
from tests.engine.test_engine import GREEDY, Bench, bench, complete, model, prompt
from tests.engine.test_scheduler import SPEC


def store(blocks: int = 8) -> PrefixStore:
    return PrefixStore(KvPool(SPEC, torch.float32, torch.device("cpu"), blocks))


def keep(prefixes: PrefixStore, scope: str, ids: list[int]) -> None:
    kv = prefixes.pool.sequence()
    kv.append(len(ids))
    prefixes.keep(scope, ids, kv)


def ask(
    here: Bench, ids: list[int], scope: str = "a", sampling: SamplingSettings = GREEDY, **more: Any
) -> tuple[tuple[int, ...], int]:
    """The answer's tokens, and how many of the prompt's were there already."""
    sequence = here.engine.submit(Request(tuple(ids), sampling, batched=True, scope=scope, **more))
    while not here.engine.idle:
        here.events += here.engine.step()
    here.engine.check_integrity()
    completion = here.engine.take_completion(sequence)
    return completion.token_ids, completion.timings.cache_n


def test_the_longest_shared_beginning_comes_back_in_whole_cells() -> None:
    prefixes = store()
    ids = list(range(100))
    keep(prefixes, "a", ids[:20])
    keep(prefixes, "a", [*ids[:70], 1000])
    assert prefixes.fork("a", ids).length == 64
    assert prefixes.fork("a", [1000, *ids]).length == 0


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    prefixes = store()
    keep(prefixes, "a", list(range(64)))
    assert prefixes.fork("a", list(range(64))).length == 48
    assert prefixes.fork("a", list(range(65))).length == 64


def test_scopes_do_not_see_each_other() -> None:
    prefixes = store()
    keep(prefixes, "a", list(range(64)))
    assert prefixes.fork("b", list(range(65))).length == 0


def test_a_longer_prompt_replaces_its_beginning_and_a_shorter_one_adds_nothing() -> None:
    prefixes = store()
    keep(prefixes, "a", list(range(64)))
    keep(prefixes, "a", list(range(200)))
    assert prefixes.pool.live_blocks == 2
    keep(prefixes, "a", list(range(130)))
    assert prefixes.pool.live_blocks == 2


def test_room_is_made_by_dropping_what_was_used_longest_ago() -> None:
    prefixes = store(blocks=3)
    for first in (0, 1000, 2000):
        keep(prefixes, "a", list(range(first, first + 100)))
    assert prefixes.fork("a", list(range(100))).length == 96  # used just now
    assert prefixes.make_room(1, promised=0)
    assert prefixes.fork("a", list(range(1000, 1100))).length == 0
    assert prefixes.fork("a", list(range(2000, 2100))).length == 96


def test_room_that_cannot_be_made_costs_nobody_a_prefix() -> None:
    prefixes = store(blocks=3)
    keep(prefixes, "a", list(range(100)))
    held = prefixes.pool.sequence()
    held.append(2 * BLOCK)
    assert not prefixes.make_room(2, promised=0)
    assert prefixes.held_blocks == 1


@pytest.mark.parametrize("tail", [1, 20, 150])
def test_a_second_turn_reuses_the_first_and_gets_the_same_answer(tail: int) -> None:
    here = bench()
    first = prompt(1, 70)
    answer, cached = ask(here, first)
    assert cached == 0
    second = [*first, *answer, *prompt(2, tail)]
    again, cached = ask(here, second)
    assert cached == 64, "whole cells of the first prompt; the answer was decoded and is computed again"
    assert again == complete(second).token_ids


def test_reuse_changes_no_bit_of_the_log_probabilities() -> None:
    sampling = SamplingSettings(temperature=0.9, seed=3, max_tokens=8, logprobs=4)
    here, ids = bench(), prompt(5, 140)
    ask(here, ids[:100], sampling=sampling)
    sequence = here.engine.submit(Request(tuple(ids), sampling, batched=True, scope="a"))
    here.engine.step()
    while not here.engine.idle:
        here.engine.step()
    reused, alone = here.engine.take_completion(sequence), complete(ids, sampling)
    assert reused.timings.cache_n == 96
    assert (reused.token_ids, reused.logprobs, reused.top_logprobs) == (
        alone.token_ids, alone.logprobs, alone.top_logprobs,
    )  # fmt: skip


def test_choices_of_one_prompt_share_its_blocks_while_the_first_still_runs() -> None:
    here, ids = bench(), prompt(4, 200)
    both = [here.engine.submit(Request(tuple(ids), GREEDY, batched=True, scope="a")) for _ in range(2)]
    while not here.engine.idle:
        here.engine.step()
    answers = [here.engine.take_completion(sequence) for sequence in both]
    assert [answer.timings.cache_n for answer in answers] == [0, 128]
    assert answers[0].token_ids == answers[1].token_ids == complete(ids).token_ids


def test_a_request_without_a_scope_leaves_nothing_behind() -> None:
    here = bench()
    here.submit(prompt(1, 100))
    here.run()
    assert here.pool.live_blocks == 0


def test_kept_prompts_give_way_to_a_request_that_needs_the_room() -> None:
    here = bench(blocks=2)
    ask(here, prompt(1, 120), sampling=SamplingSettings(temperature=0.0, max_tokens=2))
    assert here.engine.load.kept_blocks == 1
    _, cached = ask(here, prompt(2, 130), sampling=SamplingSettings(temperature=0.0, max_tokens=2))
    assert cached == 0 and here.engine.load.kept_blocks == 2, "the second took both blocks"


def test_a_request_that_needs_all_the_room_still_finds_its_own_beginning() -> None:
    here, first = bench(blocks=3, max_context=384), prompt(6, 200)
    ask(here, first, sampling=replace(GREEDY, max_tokens=2))
    ask(here, prompt(7, 30), scope="b", sampling=replace(GREEDY, max_tokens=2))
    second = [*first, *prompt(8, 30)]
    answer, cached = ask(here, second, sampling=replace(GREEDY, max_tokens=154))  # 384 tokens in all: three blocks
    assert cached == 128, "whole blocks: there is none for a copy of the tail"
    assert answer == complete(second, replace(GREEDY, max_tokens=154), max_context=384).token_ids


def test_a_beginning_whose_tail_would_have_to_be_copied_is_given_up_where_there_is_no_block_for_the_copy() -> None:
    here, first = bench(blocks=1, max_context=128), prompt(6, 60)
    ask(here, first, sampling=replace(GREEDY, max_tokens=2))
    answer, cached = ask(here, [*first, 1], sampling=replace(GREEDY, max_tokens=40))
    assert cached == 0
    assert answer == complete([*first, 1], replace(GREEDY, max_tokens=40), max_context=128).token_ids


def test_a_cancelled_prompt_keeps_what_was_computed_of_it() -> None:
    here, ids = bench(prefill_chunk=32), prompt(3, 100)
    sequence = here.engine.submit(Request(tuple(ids), GREEDY, batched=True, scope="a"))
    here.engine.step()
    here.engine.discard(sequence)
    here.engine.check_integrity()
    assert ask(here, ids)[1] == 32


class FailingLate:
    """Experts that cannot be had any more after so many leases."""

    def __init__(self, leases: int) -> None:
        self.left = leases

    @contextmanager
    def lease(self, layer: int, routed: Items[int], keep: Collection[int] | None = None) -> Iterator[Lease]:
        self.left -= 1
        if self.left < 0:
            raise TransferError("the disk is gone", fix="bring it back")
        with model().experts.lease(layer, routed, keep) as lease:
            yield lease


def test_nothing_is_kept_of_a_sequence_that_failed() -> None:
    layers = len(model().spec.moe_layers)
    here = bench(experts=FailingLate(5 * layers), prefill_chunk=32)  # four chunks, one token, and no more
    here.engine.submit(Request(tuple(prompt(1, 100)), GREEDY, batched=True, scope="a"))
    while not here.engine.idle:
        here.events += here.engine.step()
    assert here.failures() and here.engine.load.kept_blocks == 0
    here.engine.check_integrity()


@cache
def alone(seed: int, count: int, limit: int) -> tuple[int, ...]:
    return complete(prompt(seed, 250)[:count], replace(GREEDY, max_tokens=limit)).token_ids


WANTED = st.tuples(
    st.integers(0, 1), st.sampled_from([1, 40, 130, 250]), st.sampled_from([1, 9]), st.sampled_from("ab")
)


@settings(max_examples=15)
@given(st.lists(WANTED, max_size=7), st.integers(3, 6))
def test_whatever_is_kept_every_request_gets_its_answer_and_no_block_leaks(
    wanted: list[tuple[int, int, int, str]], blocks: int
) -> None:
    here = bench(blocks=blocks, max_batch=3)
    ids = [
        here.engine.submit(
            Request(tuple(prompt(seed, 250)[:count]), replace(GREEDY, max_tokens=limit), batched=True, scope=who)
        )
        for seed, count, limit, who in wanted
    ]
    while not here.engine.idle:
        here.engine.step()  # a CapacityError would be a SequenceFailed, and its completion would be missing
        assert here.pool.live_blocks <= blocks
    here.engine.check_integrity()
    for sequence, (seed, count, limit, _) in zip(ids, wanted, strict=True):
        assert here.engine.take_completion(sequence).token_ids == alone(seed, count, limit)
    here.engine.forget_prefixes()
    assert here.pool.live_blocks == 0


def test_prompts_that_are_being_typed_do_not_count_among_the_sixty_four() -> None:
    prefixes = store(200)
    typed = [[1000 + number] * 20 for number in range(70)]
    prefixes.typed = lambda: [("a", as_bytes(ids)) for ids in typed]
    for number, ids in enumerate(typed):
        keep(prefixes, "a", ids)
        keep(prefixes, "a", [5000 + number] * 20)
    assert all(prefixes.shared("a", ids) == 20 for ids in typed)
    left = [prefixes.shared("a", [5000 + number] * 20) for number in range(70)]
    assert left == [0] * 6 + [20] * 64, "the oldest went"
