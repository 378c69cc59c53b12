"""The engine: many requests at once, each with the answer that it gets alone; failures stay where they belong."""

from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steerpipe.core.errors import NumericsError, RequestError, TransferError
from steerpipe.core.events import Completion, FinishReason, SequenceFailed, TokenEvent
from steerpipe.core.ids import SequenceId
from steerpipe.core.protocols import ExpertSource, ExpertWeights, RoutingSink, Wave
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.engine import Engine
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import TextCodec
from steerpipe.model.kv_cache import KvPool
from tests.support import tiny
from tests.support.bits import random_tokens
from tests.support.running import CPU, FailingExperts, Loaded, Recorder, loaded

GREEDY = SamplingSettings(temperature=0.0, max_tokens=12)
MODEL = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 1, "vocab_size": 259}  # all ids are text


@dataclass
class Bench:
    """An engine and everything that came out of it."""

    engine: Engine
    pool: KvPool
    events: list[TokenEvent | SequenceFailed] = field(default_factory=list)

    def submit(self, prompt: Items[int], sampling: SamplingSettings = GREEDY, *, batched: bool = True) -> SequenceId:
        return self.engine.submit(Request(tuple(prompt), sampling, batched))

    def run(self) -> None:
        while not self.engine.idle:
            self.events += self.engine.step()
        self.engine.check_integrity()
        assert self.pool.live_blocks == 0

    def tokens(self, sequence: SequenceId) -> list[int]:
        return [e.token_id for e in self.events if isinstance(e, TokenEvent) and e.sequence == sequence]

    def failures(self) -> dict[SequenceId, Exception]:
        return {e.sequence: e.error for e in self.events if isinstance(e, SequenceFailed)}


def model() -> Loaded:
    return loaded(tiny.tiny("qwen3_moe", **MODEL).folder)


@cache
def codec() -> TextCodec:
    return TextCodec.load(tiny.tiny("qwen3_moe", **MODEL).folder)


def bench(
    *, experts: ExpertSource | None = None, blocks: int = 20, max_context: int = 300, max_batch: int = 8,
    prefill_chunk: int = 32, ends: Items[int] = (), sink: RoutingSink | None = None,
) -> Bench:  # fmt: skip
    pool = KvPool(model().spec, torch.float32, CPU, blocks)
    engine = Engine(
        model().decoder, experts or model().experts, pool, codec(), end_tokens=frozenset(ends),
        max_context=max_context, max_batch=max_batch, prefill_chunk=prefill_chunk, sink=sink,
    )  # fmt: skip
    return Bench(engine, pool)


def prompt(seed: int, count: int = 9) -> list[int]:
    return random_tokens(MODEL["vocab_size"], count, seed)


def complete(ids: Items[int], sampling: SamplingSettings = GREEDY, *, batched: bool = True, **how: Any) -> Completion:
    """The answer that a request gets alone."""
    alone = bench(**how)
    sequence = alone.submit(ids, sampling, batched=batched)
    alone.run()
    return alone.engine.take_completion(sequence)


# --- together and alone


@pytest.mark.parametrize("batched", [True, False])
def test_every_request_gets_the_tokens_that_it_gets_alone(batched: bool) -> None:
    prompts = [prompt(seed, count) for seed, count in enumerate((1, 9, 40, 130, 16, 3))]
    together = bench()
    ids = [together.submit(p, batched=batched) for p in prompts]
    together.run()
    for sequence, p in zip(ids, prompts, strict=True):
        answer = together.engine.take_completion(sequence)
        assert answer.token_ids == complete(p, batched=batched).token_ids == tuple(together.tokens(sequence))
        assert answer.prompt_token_ids == tuple(p)


def test_the_two_classes_run_side_by_side() -> None:
    both = bench()
    ids = {batched: both.submit(prompt(1), batched=batched) for batched in (True, False)}
    both.submit(prompt(2), batched=True)
    both.run()
    for batched, sequence in ids.items():
        assert both.engine.take_completion(sequence).token_ids == complete(prompt(1), batched=batched).token_ids


@pytest.mark.parametrize("batched", [True, False])
def test_the_size_of_prefill_chunks_changes_no_bit_of_the_answer(batched: bool) -> None:
    sampling = SamplingSettings(temperature=0.9, seed=5, max_tokens=10, logprobs=3)
    answers = [
        complete(prompt(3, 140), sampling, batched=batched, prefill_chunk=chunk) for chunk in (16, 32, 48, 64, 256)
    ]
    assert len({(a.token_ids, a.logprobs, a.top_logprobs, a.text) for a in answers}) == 1


def test_a_sampled_answer_is_the_same_in_any_batch_of_the_class() -> None:
    sampling = SamplingSettings(temperature=1.1, top_p=0.95, seed=77, max_tokens=15, logprobs=2)
    alone = complete(prompt(4), sampling)
    for size, before in ((2, True), (7, False), (19, True)):
        crowd = bench(max_batch=20, blocks=40)
        others = [SamplingSettings(temperature=1.0, max_tokens=3 + i) for i in range(size)]
        if before:
            for i, settings_of_other in enumerate(others):
                crowd.submit(prompt(50 + i, 1 + i), settings_of_other)
        sequence = crowd.submit(prompt(4), sampling)
        if not before:
            for i, settings_of_other in enumerate(others):
                crowd.submit(prompt(50 + i, 1 + i), settings_of_other)
        crowd.run()
        answer = crowd.engine.take_completion(sequence)
        assert (answer.token_ids, answer.logprobs, answer.top_logprobs) == (
            alone.token_ids, alone.logprobs, alone.top_logprobs,
        )  # fmt: skip


def test_a_seed_reproduces_an_answer_and_another_seed_gives_another() -> None:
    def sampled(seed: int | None) -> tuple[int, ...]:
        return complete(prompt(5), SamplingSettings(temperature=1.0, seed=seed, max_tokens=20)).token_ids

    assert sampled(1) == sampled(1)
    assert len({sampled(1), sampled(2), sampled(None), sampled(None)}) == 4


def test_an_answer_grows_by_one_token_per_event_and_the_pieces_are_the_text() -> None:
    run = bench()
    sequence = run.submit(prompt(6), SamplingSettings(temperature=0.0, max_tokens=25, logprobs=4))
    run.run()
    answer = run.engine.take_completion(sequence)
    events = [e for e in run.events if isinstance(e, TokenEvent)]
    assert tuple(e.token_id for e in events) == answer.token_ids
    assert (
        "".join(e.text for e in events)
        == answer.text
        == codec().decode(prompt(6) + list(answer.token_ids))[len(codec().decode(prompt(6))) :]
    )
    assert [e.finish_reason for e in events[:-1]] == [None] * 24
    assert tuple(e.logprob for e in events) == answer.logprobs
    assert all(
        len(top) == 4 and top[0].token_id == t for top, t in zip(answer.top_logprobs, answer.token_ids, strict=True)
    )
    assert (answer.timings.prompt_n, answer.timings.predicted_n) == (9, 25)
    assert answer.timings.prompt_ms > 0 and answer.timings.predicted_ms > 0


def test_a_completion_is_handed_out_once() -> None:
    run = bench()
    sequence = run.submit(prompt(6))
    run.run()
    run.engine.take_completion(sequence)
    with pytest.raises(KeyError):
        run.engine.take_completion(sequence)


# --- limits


def test_no_more_than_max_batch_rows_are_decoded_together() -> None:
    sink = Recorder()
    run = bench(max_batch=3, sink=sink)
    ids = [run.submit(prompt(seed, 1)) for seed in range(8)]
    run.run()
    sizes = {len(record.sequences) for record in sink.records}
    assert max(sizes) == 3
    assert all(len(run.tokens(sequence)) == 12 for sequence in ids)


def test_requests_wait_for_kv_room_and_are_all_answered() -> None:
    run = bench(blocks=2)
    prompts = [prompt(seed, 100 + 9 * seed) for seed in range(6)]  # one block each, or two
    ids = [run.submit(p) for p in prompts]
    most = 0
    while not run.engine.idle:
        run.events += run.engine.step()
        most = max(most, run.pool.live_blocks)
    assert most == 2
    assert [tuple(run.tokens(i)) for i in ids] == [complete(p).token_ids for p in prompts]


def test_a_long_prompt_does_not_hold_up_an_answer_that_is_being_written() -> None:
    run = bench(prefill_chunk=16)
    first = run.submit(prompt(1, 5))
    run.engine.step()
    run.submit(prompt(2, 160))
    for _ in range(10):
        run.events += run.engine.step()
    assert len(run.tokens(first)) == 5, "every second step is a decode step"
    run.run()


@pytest.mark.parametrize(
    ("ids", "sampling", "what", "fix"),
    [
        ([], GREEDY, "the prompt is empty", "at least one token"),
        ([1, 259], GREEDY, "token id 259 is not in the vocabulary of 259", "tokenise with this model"),
        ([1, -1], GREEDY, "token id -1 is not in the vocabulary of 259", "tokenise with this model"),
        ([1] * 300, GREEDY, "the prompt has 300 tokens; the context holds 300, answer included", "shorten the prompt"),
        ([1] * 200, SamplingSettings(max_tokens=90), "the request may need 3 KV blocks; there are 2", "fewer tokens"),
    ],
)
def test_a_request_that_could_never_run_is_refused(
    ids: list[int], sampling: SamplingSettings, what: str, fix: str
) -> None:
    run = bench(blocks=2)
    with pytest.raises(RequestError) as caught:
        run.submit(ids, sampling)
    assert what in caught.value.what and fix in caught.value.fix
    assert run.engine.idle and run.pool.live_blocks == 0


def test_a_request_that_just_fits_runs() -> None:
    run = bench(blocks=2)
    sequence = run.submit([1] * 200, SamplingSettings(temperature=0.0, max_tokens=57, ignore_eos=True))
    run.run()
    assert len(run.tokens(sequence)) == 57


# --- endings


def test_max_tokens_ends_an_answer() -> None:
    answer = complete(prompt(7), SamplingSettings(temperature=0.0, max_tokens=5))
    assert (len(answer.token_ids), answer.finish_reason) == (5, FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_the_context_ends_an_answer(max_tokens: int | None) -> None:
    answer = complete(prompt(7, 280), SamplingSettings(temperature=0.0, max_tokens=max_tokens))
    assert (len(answer.token_ids), answer.finish_reason) == (20, FinishReason.LENGTH)


def first_new_token(tokens: Items[int], after: int = 4) -> int:
    """Where a token stands that did not come before."""
    return next(i for i in range(after, len(tokens)) if tokens[i] not in tokens[:i])


def test_an_end_token_ends_an_answer_and_has_no_text() -> None:
    free = complete(prompt(8), SamplingSettings(temperature=0.0, max_tokens=30))
    at = first_new_token(free.token_ids)
    answer = complete(prompt(8), SamplingSettings(temperature=0.0, max_tokens=30), ends=[free.token_ids[at]])
    assert answer.token_ids == free.token_ids[: at + 1]
    assert answer.finish_reason is FinishReason.STOP
    assert free.text.startswith(answer.text.rstrip("\ufffd"))
    assert len(answer.text) <= len(complete(prompt(8), SamplingSettings(temperature=0.0, max_tokens=at)).text)


def test_an_end_token_is_passed_over_where_the_request_says_so() -> None:
    free = complete(prompt(8), SamplingSettings(temperature=0.0, max_tokens=30))
    end = free.token_ids[first_new_token(free.token_ids)]
    answer = complete(prompt(8), SamplingSettings(temperature=0.0, max_tokens=30, ignore_eos=True), ends=[end])
    assert answer.token_ids == free.token_ids
    assert answer.finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_an_answer_even_where_end_tokens_are_passed_over() -> None:
    free = complete(prompt(8), SamplingSettings(temperature=0.0, max_tokens=30))
    at = first_new_token(free.token_ids)
    stop = free.token_ids[at]
    for ignore_eos in (False, True):
        sampling = SamplingSettings(temperature=0.0, max_tokens=30, stop_token_ids=(stop,), ignore_eos=ignore_eos)
        answer = complete(prompt(8), sampling, ends=[stop])
        assert (answer.token_ids, answer.finish_reason) == (free.token_ids[: at + 1], FinishReason.STOP)


def test_a_stop_string_ends_an_answer_and_is_cut_off() -> None:
    for seed in range(20):  # random bytes: find an answer with a readable stretch
        free = complete(prompt(seed), SamplingSettings(temperature=0.0, max_tokens=30))
        readable = [i for i in range(3, len(free.text) - 1) if "\ufffd" not in free.text[i : i + 2]]
        if readable:
            break
    stop = free.text[readable[0] : readable[0] + 2]
    answer = complete(prompt(seed), SamplingSettings(temperature=0.0, max_tokens=30, stop=("never", stop)))
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.finish_reason is FinishReason.STOP
    assert len(answer.token_ids) <= len(free.token_ids)
    assert free.token_ids[: len(answer.token_ids)] == answer.token_ids


def test_the_last_allowed_token_may_also_be_the_end_token() -> None:
    free = complete(prompt(8), SamplingSettings(temperature=0.0, max_tokens=30))
    at = first_new_token(free.token_ids)
    answer = complete(prompt(8), SamplingSettings(temperature=0.0, max_tokens=at + 1), ends=[free.token_ids[at]])
    assert answer.finish_reason is FinishReason.STOP


# --- cancelling


@pytest.mark.parametrize("steps", [0, 1, 3, 6, 12])
def test_a_request_can_be_cancelled_at_any_time_and_the_others_notice_nothing(steps: int) -> None:
    """Waiting (max_batch 2), in the middle of its prompt, or in the middle of its answer."""
    run = bench(max_batch=2, prefill_chunk=16)
    prompts = [prompt(1, 40), prompt(2, 50), prompt(3, 60)]
    ids = [run.submit(p) for p in prompts]
    for _ in range(steps):
        run.events += run.engine.step()
    run.engine.cancel(ids[1])
    assert not run.engine.runs(ids[1]) and run.engine.runs(ids[0]) and run.engine.runs(ids[2])
    so_far = run.tokens(ids[1])
    run.run()
    cut = run.engine.take_completion(ids[1])
    assert cut.finish_reason is FinishReason.CANCELLED
    assert list(cut.token_ids) == so_far == run.tokens(ids[1])
    for i in (0, 2):
        assert run.engine.take_completion(ids[i]).token_ids == complete(prompts[i]).token_ids


def test_cancelling_what_has_ended_does_nothing() -> None:
    run = bench()
    sequence = run.submit(prompt(1))
    run.run()
    run.engine.cancel(sequence)
    run.engine.cancel(SequenceId(12345))
    assert run.engine.take_completion(sequence).finish_reason is FinishReason.LENGTH


def test_cancelling_everything_leaves_nothing() -> None:
    run = bench()
    ids = [run.submit(prompt(seed, 140)) for seed in range(5)]
    for _ in range(8):
        run.engine.step()
    assert run.pool.live_blocks > 0
    for sequence in ids:
        run.engine.cancel(sequence)
    assert run.engine.idle and run.pool.live_blocks == 0
    run.engine.check_integrity()


def test_a_leak_is_noticed() -> None:
    run = bench()
    run.pool.sequence().append(1)
    with pytest.raises(AssertionError, match="1 KV blocks leaked"):
        run.engine.check_integrity()


# --- failures


def uses(p: list[int]) -> set[tuple[int, int]]:
    """(layer, expert) of everything that an answer needs."""
    sink = Recorder()
    complete(p, sink=sink)
    return {(record.layer, int(expert)) for record in sink.records for expert in record.experts.flatten()}


def split_by_an_expert(prompts: list[list[int]]) -> tuple[int, int, set[int]]:
    """A layer's expert that some of the answers need and some do not; and which do."""
    needs = [uses(p) for p in prompts]
    for layer, expert in sorted(set().union(*needs)):
        hit = {i for i, used in enumerate(needs) if (layer, expert) in used}
        if 0 < len(hit) < len(prompts) - 1:
            return layer, expert, hit
    raise AssertionError("choose other prompts")


@pytest.mark.parametrize("batched", [True, False])
def test_an_expert_that_cannot_be_read_fails_those_who_need_it_and_nobody_else(batched: bool) -> None:
    prompts = [prompt(seed, 2) for seed in range(6)]
    layer, expert, hit = split_by_an_expert(prompts)
    broken = FailingExperts(model().experts, layer, expert)
    run = bench(experts=broken)
    ids = [run.submit(p, batched=batched) for p in prompts]
    run.run()
    failures = run.failures()
    assert broken.failures > 0 and broken.open_leases == 0
    if batched:  # `uses` looked at the batched class
        assert failures.keys() == {ids[i] for i in hit}
    assert all(isinstance(error, TransferError) for error in failures.values())
    for i, sequence in enumerate(ids):
        if sequence not in failures:
            assert run.engine.take_completion(sequence).token_ids == complete(prompts[i], batched=batched).token_ids
        else:
            alone = complete(prompts[i], batched=batched).token_ids
            assert tuple(run.tokens(sequence)) == alone[: len(run.tokens(sequence))]
            with pytest.raises(KeyError):
                run.engine.take_completion(sequence)


def test_a_failure_that_goes_away_in_a_batch_costs_nobody_a_token() -> None:
    """The step is done again, one sequence at a time; the row rule makes that the same step."""
    prompts = [prompt(seed, 2) for seed in range(6)]
    layer, expert, _ = split_by_an_expert(prompts)
    flaky = FailingExperts(model().experts, layer, expert, times=0)
    sink = Recorder()
    run = bench(experts=flaky, sink=sink)
    ids = [run.submit(p) for p in prompts]
    while not all(run.tokens(i) for i in ids):
        run.events += run.engine.step()
    flaky.times = 1
    run.run()
    assert flaky.failures == 1 and flaky.open_leases == 0
    assert run.failures() == {}
    assert [tuple(run.tokens(i)) for i in ids] == [complete(p).token_ids for p in prompts]
    seen = [(r.layer, s, int(at)) for r in sink.records for s, at in zip(r.sequences, r.positions, strict=True)]
    assert len(seen) == len(set(seen)), "the routing of a step that was done again was published twice"


@dataclass(frozen=True, slots=True)
class PoisonedExperts:
    """One expert's weights are not numbers."""

    resident: ExpertSource
    layer: int
    expert: int

    @contextmanager
    def lease(self, layer: int, routed: Items[int], keep: Any = None) -> Any:
        with self.resident.lease(layer, routed, keep) as lease:
            table = {e: wave.table[e] for wave in lease.waves() for e in wave.experts}
        if layer == self.layer and self.expert in table:
            own = table[self.expert]
            table[self.expert] = ExpertWeights(own.gate_up * float("nan"), own.down)
        yield _OneWave(Wave(tuple(sorted(table)), table))


@dataclass(frozen=True, slots=True)
class _OneWave:
    wave: Wave

    def waves(self) -> Any:
        yield self.wave


def test_numbers_that_are_not_finite_fail_their_sequence_and_infect_nobody() -> None:
    prompts = [prompt(seed, 2) for seed in range(6)]
    layer, expert, hit = split_by_an_expert(prompts)
    run = bench(experts=PoisonedExperts(model().experts, layer, expert), blocks=6)
    ids = [run.submit(p) for p in prompts]
    run.run()
    failures = run.failures()
    assert failures.keys() == {ids[i] for i in hit}
    assert all(isinstance(error, NumericsError) for error in failures.values())
    clean = next(i for i in range(6) if i not in hit)
    again = [run.submit(prompts[clean]) for _ in range(6)]  # in the blocks that held the others
    run.run()
    assert {tuple(run.tokens(i)) for i in [ids[clean], *again]} == {complete(prompts[clean]).token_ids}


# --- anything, in any order


class EngineMachine(RuleBasedStateMachine):
    """Submit, step and cancel in any order, on a small pool, with an expert that fails now and then."""

    @initialize()
    def begin(self) -> None:
        self.flaky = FailingExperts(model().experts, 1, 0, times=0)
        self.run = bench(experts=self.flaky, blocks=3, max_batch=3, prefill_chunk=16, max_context=200)
        self.wanted: dict[SequenceId, tuple[int, int, bool]] = {}
        self.cancelled: set[SequenceId] = set()

    @rule(seed=st.integers(0, 3), count=st.sampled_from([1, 5, 16, 40, 125]), batched=st.booleans())
    def submit(self, seed: int, count: int, batched: bool) -> None:
        if len(self.wanted) < 8:
            self.wanted[self.run.submit(prompt(seed, count), batched=batched)] = (seed, count, batched)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.run.events += self.run.engine.step()

    @rule()
    def an_expert_fails_once(self) -> None:
        self.flaky.times = self.flaky.failures + 1

    @precondition(lambda self: self.wanted)
    @rule(pick=st.integers(0, 7))
    def cancel(self, pick: int) -> None:
        sequence = list(self.wanted)[pick % len(self.wanted)]
        if self.run.engine.runs(sequence):
            self.cancelled.add(sequence)
        self.run.engine.cancel(sequence)

    @invariant()
    def the_pool_is_never_overdrawn(self) -> None:
        if hasattr(self, "run"):
            assert 0 <= self.run.pool.live_blocks <= 3
            self.run.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        self.run.run()
        for sequence, (seed, count, batched) in self.wanted.items():
            got, want = tuple(self.run.tokens(sequence)), answer_alone(seed, count, batched)
            whole = sequence not in self.cancelled and sequence not in self.run.failures()
            assert got == (want if whole else want[: len(got)])
        assert self.flaky.open_leases == 0


@cache
def answer_alone(seed: int, count: int, batched: bool) -> tuple[int, ...]:
    return complete(prompt(seed, count), batched=batched).token_ids


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=30, stateful_step_count=15)
