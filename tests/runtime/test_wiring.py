"""Every setting reaches what it is for: seen in what the engine does, at two values each, so none can be a constant."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from steerpipe import Pipeline
from steerpipe.core.errors import CapacityError, RequestError
from steerpipe.core.events import RoutingRecord
from steerpipe.store.cache import packed
from steerpipe.store.policies import Lfru, Lru
from steerpipe.tiny import write_tiny
from steerpipe.transfer.link import PacedLink
from steerpipe.transfer.source import LadderSource

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
KV_BLOCK_KIB = 128  # of 128 tokens: 4 layers, keys and values of 2 heads of 16, float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wiring") / "model"
    write_tiny("olmoe", folder)
    return folder


@dataclass
class Steps:
    """A RoutingSink that keeps, of every step, how many rows and sequences it had and torch's threads."""

    rows: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def observe(self, record: RoutingRecord) -> None:
        if record.layer == 0:
            self.rows.append(len(record.sequences))
            self.sequences.append(len(set(record.sequences)))
            self.threads.add(torch.get_num_threads())


def prompts(count: int, length: int) -> list[Sequence[int]]:
    return [[4 + (7 * i + 3 * j) % 250 for j in range(length)] for i in range(count)]


@pytest.mark.parametrize("max_batch", [2, 5])
def test_max_batch_is_how_many_sequences_are_decoded_together(model: Path, max_batch: int) -> None:
    steps = Steps()
    with Pipeline(model, max_batch=max_batch, sink=steps) as pipe:
        pipe.generate_batch(prompts(7, 10), max_tokens=12, **GREEDY)
        assert pipe.config.max_batch == max_batch
    assert max(steps.sequences) == max_batch


@pytest.mark.parametrize(("chunk", "rows"), [(16, [16] * 6 + [4]), (48, [48, 48, 4]), (256, [100])])
def test_prefill_chunk_is_how_many_tokens_a_step_takes(model: Path, chunk: int, rows: list[int]) -> None:
    steps = Steps()
    with Pipeline(model, prefill_chunk=chunk, sink=steps) as pipe:
        pipe.generate(prompts(1, 100)[0], max_tokens=1, **GREEDY)
    assert steps.rows == rows


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_are_torchs_during_a_step(model: Path, threads: int) -> None:
    steps = Steps()
    torch.set_num_threads(4)
    with Pipeline(model, threads=threads, sink=steps) as pipe:
        pipe.generate("Hi", max_tokens=2, **GREEDY)
    assert steps.threads == {threads}


def test_each_of_two_pipelines_keeps_its_own_threads(model: Path) -> None:
    one, other = Steps(), Steps()
    with Pipeline(model, threads=2, sink=one) as first, Pipeline(model, threads=3, sink=other) as second:
        for pipe in (first, second, first):
            pipe.generate("Hi", max_tokens=2, **GREEDY)
    assert (one.threads, other.threads) == ({2}, {3})


@pytest.mark.parametrize("blocks", [2, 3])
def test_kv_memory_is_how_many_answers_fit_at_once(model: Path, blocks: int) -> None:
    steps = Steps()
    kv_memory = f"{blocks * KV_BLOCK_KIB}KiB"
    with Pipeline(model, dtype="float32", kv_memory=kv_memory, max_batch=8, sink=steps) as pipe:
        pipe.generate_batch(prompts(6, 10), max_tokens=12, **GREEDY)
        assert pipe.config.kv_memory_bytes == blocks * KV_BLOCK_KIB * 1024
        with pytest.raises(RequestError, match=f"the context holds {blocks * 128}"):
            pipe.generate(prompts(1, blocks * 128)[0], **GREEDY)
    assert max(steps.sequences) == blocks


def test_a_context_that_the_kv_memory_cannot_hold_is_refused(model: Path) -> None:
    with pytest.raises(CapacityError, match="room for 128 tokens"):
        Pipeline(model, dtype="float32", kv_memory=f"{KV_BLOCK_KIB}KiB", max_context=129)


@pytest.mark.parametrize("max_context", [40, 60])
def test_max_context_ends_an_answer_and_refuses_a_prompt(model: Path, max_context: int) -> None:
    with Pipeline(model, max_context=max_context) as pipe:
        answer = pipe.generate(prompts(1, 30)[0], **GREEDY)
        assert (len(answer.token_ids), answer.finish_reason) == (max_context - 30, "length")
        with pytest.raises(RequestError, match=f"the context holds {max_context}"):
            pipe.generate(prompts(1, max_context)[0], **GREEDY)


@pytest.mark.parametrize(("policy", "kind"), [("lru", Lru), ("lfru", Lfru)])
def test_policy_is_the_ladders(model: Path, policy: str, kind: type) -> None:
    with Pipeline(model, fast_memory="25%", policy=policy, profile=False) as pipe:
        assert isinstance(pipe.experts, LadderSource)
        assert type(pipe.experts.policy) is kind


@pytest.mark.parametrize(("pace", "bytes_per_second"), [("20MB", 20e6), ("3GiB", 3 * 2**30), (None, None)])
def test_pace_is_the_links(model: Path, pace: str | None, bytes_per_second: float | None) -> None:
    with Pipeline(model, fast_memory="25%", pace=pace, profile=False) as pipe:
        assert isinstance(pipe.experts, LadderSource)
        link = pipe.experts.link
        assert (link.bytes_per_second if isinstance(link, PacedLink) else None) == bytes_per_second


def test_cache_dir_holds_the_pack_and_what_was_learnt(model: Path, tmp_path: Path) -> None:
    for cache in (tmp_path / "one", tmp_path / "other"):
        with Pipeline(model, cache_dir=str(cache), fast_memory="25%") as pipe:
            pipe.generate("Hi", max_tokens=2, **GREEDY)
        assert len(list(cache.glob("packs/*/steerpipe.json"))) == 1
        assert len(list(cache.rglob("profile.json"))) == 1


def test_cache_dir_holds_what_was_learnt_of_a_pack_that_is_part_of_the_installation(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = packed(model, tmp_path / "cache")
    monkeypatch.setattr("steerpipe.runtime.profiles.EMBEDDED", pack)
    with Pipeline(pack, cache_dir=str(tmp_path / "learnt"), fast_memory="25%") as pipe:
        pipe.generate("Hi", max_tokens=2, **GREEDY)
    assert not (pack / "profile.json").exists()
    assert len([file for file in (tmp_path / "learnt").rglob("*.json") if file.is_file()]) == 1


@pytest.mark.parametrize("share", ["25%", "50%"])
def test_fast_memory_is_how_many_experts_have_slots(model: Path, share: str) -> None:
    with Pipeline(model, fast_memory=share, profile=False) as pipe:
        pipe.generate(prompts(1, 40)[0], max_tokens=8, **GREEDY)
        assert isinstance(pipe.experts, LadderSource)
        assert pipe.budget.slots == 32 * int(share[:-1]) // 100
        assert len(pipe.experts.residents) <= pipe.budget.slots
        counters = pipe.counters()
        assert counters is not None and counters.evictions > 0


def test_dtype_is_that_of_the_weights_and_of_the_arithmetic(model: Path) -> None:
    fast_bytes, logprobs = {}, {}
    for dtype in ("float32", "bfloat16"):
        with Pipeline(model, dtype=dtype, fast_memory="50%", profile=False) as pipe:
            assert pipe.config.dtype == dtype
            assert isinstance(pipe.experts, LadderSource)
            fast_bytes[dtype] = pipe.experts.fast_bytes
            logprobs[dtype] = pipe.generate("Hi there", max_tokens=4, logprobs=0, **GREEDY).logprobs[0].logprob
    assert fast_bytes["float32"] == 2 * fast_bytes["bfloat16"]
    assert 0 < abs(logprobs["float32"] - logprobs["bfloat16"]) < 0.1


@dataclass
class StepClock:
    """A clock that stands still but for one second per step; a RoutingSink, so that it hears of them."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    def observe(self, record: RoutingRecord) -> None:
        if record.layer == 0:
            self.now += 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    clock = StepClock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_timings_count_the_prompts_steps_and_the_answers_steps_and_no_waiting(model: Path, clock: StepClock) -> None:
    with Pipeline(model, prefill_chunk=16, fast_memory="100%", sink=clock) as pipe:
        answer = pipe.stream(prompts(1, 40)[0], max_tokens=5, **GREEDY)
        clock.now += 50.0  # in the queue: nobody has asked for a token yet
        timings = answer.completion.timings
    assert (timings.prompt_n, timings.prompt_ms) == (40, 3_000.0)  # 16 + 16 + 8 tokens
    assert (timings.predicted_n, timings.predicted_ms) == (5, 4_000.0)  # the first token came with the prompt's end


def test_a_sequence_that_waits_for_another_is_not_charged_for_it(model: Path, clock: StepClock) -> None:
    with Pipeline(model, prefill_chunk=16, fast_memory="100%", max_batch=1, sink=clock) as pipe:
        answers = pipe.generate_batch(prompts(2, 20), max_tokens=3, **GREEDY)
    assert [answer.timings.prompt_ms for answer in answers] == [2_000.0, 2_000.0]
    assert [answer.timings.predicted_ms for answer in answers] == [2_000.0, 2_000.0]


def test_an_answer_that_ends_before_its_first_token_took_no_time(model: Path, clock: StepClock) -> None:
    with Pipeline(model, prefill_chunk=16, fast_memory="100%", sink=clock) as pipe:
        answer = pipe.stream(prompts(1, 40)[0], max_tokens=5, **GREEDY)
        answer.cancel()
        timings = answer.completion.timings
    assert (timings.prompt_ms, timings.predicted_n, timings.predicted_ms) == (0.0, 0, 0.0)
