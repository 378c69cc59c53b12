"""Who runs next: admission, chunks, turns. Nothing is computed here; a step is carried out by hand."""

from collections.abc import Sequence as Items

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steerpipe.core.ids import SequenceId
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.prefixes import PrefixStore
from steerpipe.engine.request import Request, Sequence
from steerpipe.engine.scheduler import DecodeStep, PrefillStep, Scheduler
from steerpipe.engine.text import TextStream
from steerpipe.model.kv_cache import KvPool
from steerpipe.model.spec import AttentionSpec, DenseMlpSpec, LayerSpec, ModelSpec, RopeKind, RopeSpec

SPEC = ModelSpec(
    family="mixtral", vocab=8, hidden=8, layers=(LayerSpec(AttentionSpec(1, 1, 2), DenseMlpSpec(8)),),
    norm_eps=1e-6, rope=RopeSpec(RopeKind.DEFAULT, 1e4, 2), tied_embeddings=False, max_context=4096,
    stored_dtype="float32",
)  # fmt: skip


class NoText:
    def decode(self, ids: Items[int]) -> str:
        return ""

    def is_text(self, token_id: int) -> bool:
        return False

    def byte_of(self, token_id: int) -> int | None:
        return None


class Bench:
    """A scheduler, its pool, and the hands that carry out its steps."""

    def __init__(self, *, blocks: int = 100, max_batch: int = 8, prefill_chunk: int = 32) -> None:
        self.pool = KvPool(SPEC, torch.float32, torch.device("cpu"), blocks)
        self.scheduler = Scheduler(PrefixStore(self.pool), max_batch=max_batch, prefill_chunk=prefill_chunk)
        self.made = 0

    def add(
        self, prompt: int, limit: int = 50, *, batched: bool = True, scope: str | None = None, background: bool = False
    ) -> Sequence:
        request = Request(
            tuple(range(prompt)),
            SamplingSettings(),
            batched,
            scope=scope,
            prompt_only=background,
            background=background,
        )
        sequence = Sequence(
            SequenceId(self.made), request, seed=0, limit=limit, stream=TextStream(NoText()), kv=self.pool.sequence()
        )
        self.made += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> PrefillStep | DecodeStep | None:
        """Carries out one step: KV grows, a token is added where one is due, complete answers leave."""
        step = self.scheduler.next_step()
        if isinstance(step, PrefillStep):
            step.sequence.kv.append(len(step.tokens))
            answered = [step.sequence] if step.last else []
        else:
            answered = list(step.sequences) if step else []
            for sequence in answered:
                sequence.kv.append(1)
        for sequence in answered:
            sequence.answer.append(0)
            if len(sequence.answer) == sequence.limit:
                self.scheduler.remove(sequence)
        return step


def ids(step: PrefillStep | DecodeStep | None) -> list[int]:
    assert isinstance(step, DecodeStep)
    return [sequence.id for sequence in step.sequences]


def test_nothing_to_do_is_no_step() -> None:
    bench = Bench()
    assert bench.scheduler.idle
    assert bench.step() is None


def test_a_prompt_is_prefilled_in_chunks_and_the_last_is_marked() -> None:
    bench = Bench(prefill_chunk=32)
    bench.add(70)
    steps = [bench.step() for _ in range(3)]
    assert [(len(s.tokens), s.last) for s in steps if isinstance(s, PrefillStep)] == [
        (32, False),
        (32, False),
        (6, True),
    ]
    assert [t for s in steps if isinstance(s, PrefillStep) for t in s.tokens] == list(range(70))


def test_a_chunk_ends_on_a_cell_s_edge_wherever_it_starts() -> None:
    bench = Bench(prefill_chunk=32)
    sequence = bench.add(100)
    sequence.kv.append(5)  # as if a shared prefix were there already
    lengths = []
    while sequence.waiting_prompt:
        bench.step()
        lengths.append(sequence.kv.length)
    assert lengths == [32, 64, 96, 100]


def test_prefill_chunks_are_whole_cells() -> None:
    with pytest.raises(AssertionError, match="prefill chunks are whole cells"):
        Bench(prefill_chunk=24)


def test_prefill_and_decode_take_turns() -> None:
    bench = Bench(prefill_chunk=16)
    bench.add(3)
    assert isinstance(bench.step(), PrefillStep)
    bench.add(64)
    kinds = [type(bench.step()) for _ in range(8)]
    assert kinds == [DecodeStep, PrefillStep] * 4


def test_prompts_are_prefilled_one_after_the_other_in_the_order_of_arrival() -> None:
    bench = Bench(prefill_chunk=16)
    first, second = bench.add(32), bench.add(16)
    order = [step.sequence.id for _ in range(4) if isinstance(step := bench.step(), PrefillStep)]
    assert order == [first.id, first.id, second.id]


def test_batched_sequences_decode_together_and_one_row_sequences_alone_in_turn() -> None:
    bench = Bench()
    batched = [bench.add(1), bench.add(2)]
    alone = [bench.add(3, batched=False), bench.add(4, batched=False)]
    while any(s.waiting_prompt for s in batched + alone):
        bench.step()
    steps = [bench.step() for _ in range(9)]
    groups = [tuple(ids(step)) for step in steps]
    assert set(groups[:3]) == {(0, 1), (2,), (3,)}
    assert groups == groups[:3] * 3
    assert all(isinstance(s, DecodeStep) and s.batched == (len(s.sequences) == 2) for s in steps)


def test_short_answers_that_come_and_go_do_not_starve_a_one_row_answer() -> None:
    bench = Bench()
    alone = bench.add(1, limit=30, batched=False)
    for _ in range(200):
        bench.add(1, limit=2)  # one token from prefill, one from decode
        bench.step()
    assert len(alone.answer) == 30


def test_at_most_max_batch_sequences_run() -> None:
    bench = Bench(max_batch=3)
    for _ in range(7):
        bench.add(1, limit=4)
    widest = 0
    while not bench.scheduler.idle:
        step = bench.step()
        if isinstance(step, DecodeStep):
            widest = max(widest, len(step.sequences))
    assert widest == 3


@pytest.mark.parametrize(
    ("prompt", "limit", "blocks"), [(1, 1, 1), (100, 29, 1), (100, 30, 2), (128, 1, 1), (128, 2, 2)]
)
def test_a_sequence_reserves_what_it_may_become_without_its_last_token(prompt: int, limit: int, blocks: int) -> None:
    bench = Bench()
    assert bench.add(prompt, limit).reserved_blocks == blocks


def test_a_sequence_waits_until_the_pool_can_hold_all_that_it_may_become() -> None:
    bench = Bench(blocks=2)
    first, second = bench.add(100, limit=100), bench.add(1, limit=1)
    for _ in range(20):
        bench.step()
    assert second.kv.length == 0, "two blocks are reserved, though only one is used yet"
    bench.scheduler.remove(first)
    bench.step()
    assert second.answer == [0]


def test_nobody_is_overtaken_in_the_queue() -> None:
    bench = Bench(blocks=3)
    bench.add(100, limit=100)
    large, small = bench.add(200, limit=100), bench.add(1, limit=1)
    for _ in range(10):
        bench.step()
    assert large.kv.length == 0 and small.kv.length == 0


def test_a_removed_sequence_gives_its_blocks_and_its_reservation_back() -> None:
    bench = Bench(blocks=2)
    running, waiting = bench.add(130, limit=5), bench.add(200, limit=5)
    bench.step()
    assert bench.scheduler.find(running.id) is running and bench.scheduler.find(waiting.id) is waiting
    bench.scheduler.remove(waiting)
    bench.scheduler.remove(running)
    assert bench.scheduler.idle and bench.pool.live_blocks == 0
    assert bench.scheduler.find(running.id) is None
    last = bench.add(250, limit=5)
    bench.step()
    assert last.kv.length == 32


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60), st.booleans()), max_size=12),
    st.integers(3, 12), st.integers(1, 5), st.sampled_from([16, 32, 64]),
)  # fmt: skip
def test_every_sequence_is_answered_within_the_capacity(
    wanted: list[tuple[int, int, bool]], blocks: int, max_batch: int, chunk: int
) -> None:
    bench = Bench(blocks=blocks, max_batch=max_batch, prefill_chunk=chunk)
    sequences = [bench.add(prompt, limit, batched=batched) for prompt, limit, batched in wanted]
    sequences_that_fit = [s for s in sequences if s.reserved_blocks <= blocks]
    assert sequences_that_fit == sequences, "the engine refuses the others before they come here"
    steps = 0
    while not bench.scheduler.idle:
        assert bench.step() is not None  # a CapacityError would come out here
        steps += 1
        assert steps < 10_000
    assert [len(s.answer) for s in sequences] == [limit for _, limit, _ in wanted]
    assert bench.pool.live_blocks == 0


# --- users


def test_a_user_with_many_requests_does_not_keep_another_out() -> None:
    bench = Bench(max_batch=2)
    many = [bench.add(1, limit=4, scope="many") for _ in range(6)]
    one = bench.add(1, limit=4, scope="one")
    while not one.answer:
        bench.step()
    assert sum(bool(sequence.answer) for sequence in many) <= 2


def test_users_share_the_batch_in_equal_parts() -> None:
    bench = Bench(max_batch=4)
    for scope in ("a", "a", "a", "a", "b", "b", "b", "b"):
        bench.add(1, limit=9, scope=scope)
    step = None
    while not (isinstance(step, DecodeStep) and len(step.sequences) == 4):
        step = bench.step()
    assert sorted(str(s.request.scope) for s in step.sequences) == ["a", "a", "b", "b"]


def test_prompts_of_two_users_take_turns() -> None:
    bench = Bench(prefill_chunk=16)
    bench.add(64, scope="a")
    bench.add(32, scope="b")
    order = [s.sequence.request.scope for _ in range(6) if isinstance(s := bench.step(), PrefillStep)]
    assert order[:4] == ["a", "b", "a", "b"]


def test_a_waiting_request_is_found_and_removed() -> None:
    bench = Bench(max_batch=1)
    bench.add(1, limit=5, scope="a")
    waiting = bench.add(1, limit=5, scope="b")
    bench.step()
    assert (bench.scheduler.running, bench.scheduler.waiting) == (1, 1)
    bench.scheduler.remove(waiting)
    assert (bench.scheduler.running, bench.scheduler.waiting) == (1, 0)


# --- the background


def test_the_background_waits_while_anything_else_runs() -> None:
    bench = Bench(prefill_chunk=16)
    answer = bench.add(20, limit=6)
    behind = bench.add(100, limit=0, scope="a", background=True)
    while bench.scheduler.find(answer.id) is not None:
        assert behind.kv.length == 0
        bench.step()
    bench.step()
    assert behind.kv.length == 16


def test_a_request_takes_the_place_of_a_background_sequence_which_goes_on_later_where_it_stood() -> None:
    bench = Bench(blocks=3, max_batch=1, prefill_chunk=128)
    behind = bench.add(300, limit=0, scope="a", background=True)
    bench.step()
    assert behind.kv.length == 128
    answer = bench.add(100, limit=3, scope="b")
    bench.step()
    assert answer.kv.length == 100 and behind.kv.length == 0
    while bench.scheduler.find(answer.id) is not None:
        bench.step()
    step = bench.step()
    assert isinstance(step, PrefillStep) and step.sequence is behind
    assert behind.kv.length == 256, "the first 128 tokens were kept"


def test_room_that_the_background_holds_is_given_to_a_request() -> None:
    bench = Bench(blocks=2, prefill_chunk=128)
    behind = bench.add(250, limit=0, scope="a", background=True)
    bench.step()
    answer = bench.add(200, limit=20)
    bench.step()
    assert answer.kv.length == 128 and behind.kv.length == 0
    bench.scheduler.remove(behind)
    bench.scheduler.remove(answer)
    assert bench.scheduler.idle


def test_only_a_prompt_can_wait_in_the_background() -> None:
    with pytest.raises(AssertionError, match="nobody waits"):
        Request((1, 2), SamplingSettings(), background=True)
