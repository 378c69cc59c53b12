"""The life of an answer and of a pipeline: nothing lost, nothing crossed, nothing left behind."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steerpipe import ChatMessage, Pipeline
from steerpipe.core.errors import RequestError
from steerpipe.core.events import FinishReason, RoutingRecord
from steerpipe.tiny import write_tiny

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    write_tiny("qwen3_moe", folder)
    return folder


class Interrupting:
    """A sink that raises what a person's Ctrl-C raises, at the n-th record."""

    def __init__(self) -> None:
        self.at = -1

    def observe(self, record: RoutingRecord) -> None:
        self.at -= 1
        if self.at == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", range(1, 9))
def test_an_interrupted_step_changes_nobodys_text(model: Path, at: int) -> None:
    sink = Interrupting()
    with Pipeline(model, sink=sink) as pipe:
        alone = pipe.generate("the second", **GREEDY).token_ids
        first, second = pipe.stream("the first", **GREEDY), pipe.stream("the second", **GREEDY)
        run = iter(second)
        seen = [next(run).token_id]
        sink.at = at
        with pytest.raises(KeyboardInterrupt):
            first.completion  # noqa: B018
        seen += [event.token_id for event in run]
        assert tuple(seen) == alone


def test_two_streams_and_a_batch_may_run_at_once(model: Path) -> None:
    with Pipeline(model) as pipe:
        alone = [pipe.generate(text, **GREEDY).token_ids for text in ("one", "two")]
        streams = [iter(pipe.stream(text, **GREEDY)) for text in ("one", "two")]
        first = [next(stream).token_id for stream in streams]
        assert len(pipe.generate_batch(["three", "four"], **GREEDY)) == 2
        rest = [[event.token_id for event in stream] for stream in streams]
        assert [(head, *tail) for head, tail in zip(first, rest, strict=True)] == alone


def test_an_answer_outlives_its_pipeline_with_what_it_had(model: Path) -> None:
    pipe = Pipeline(model)
    answer = pipe.stream("hello", **GREEDY)
    begun = iter(answer)
    token = next(begun).token_id
    unstarted = pipe.stream("world", **GREEDY)
    pipe.close()
    assert answer.completion.finish_reason is FinishReason.CANCELLED
    assert answer.completion.token_ids == (token,)
    assert unstarted.completion.token_ids == ()
    assert unstarted.completion.timings.predicted_ms == 0.0 and unstarted.completion.timings.prompt_ms == 0.0


def test_answers_that_nobody_holds_are_not_computed_and_leave_nothing(model: Path) -> None:
    rows: list[int] = []

    class Counting:
        def observe(self, record: RoutingRecord) -> None:
            rows.append(len(record.positions))

    with Pipeline(model, sink=Counting()) as pipe:
        for _ in range(20):
            pipe.stream("an answer that nobody waits for", **GREEDY)
        gc.collect()
        pipe.generate("x", temperature=0, max_tokens=1)
        assert len(rows) == len(pipe.spec.moe_layers)  # one step, the last request's
        pipe._desk.engine.check_integrity()
        assert not pipe._desk._waiting and not pipe._desk.engine._finished


def test_a_closed_pipeline_says_so_and_gives_its_experts_back(model: Path) -> None:
    pipe = Pipeline(model)
    held = weakref.ref(pipe.experts)
    pipe.close()
    gc.collect()
    assert held() is None
    with pytest.raises(RequestError, match="closed"):
        pipe.generate("x")
    pipe.close()


def test_each_pipeline_computes_with_its_own_threads(model: Path) -> None:
    seen: list[int] = []

    class Watching:
        def observe(self, record: RoutingRecord) -> None:
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    try:
        with Pipeline(model, threads=1, sink=Watching()) as one, Pipeline(model, threads=2):
            one.generate("x", temperature=0, max_tokens=2)
        assert set(seen) == {1}
    finally:
        torch.set_num_threads(before)


def test_a_prompt_is_text_ids_or_messages(model: Path) -> None:
    with Pipeline(model) as pipe:
        chat = pipe.encode("hello")
        assert pipe.encode([ChatMessage("user", "hello")]) == chat
        assert pipe.encode([{"role": "user", "content": "hello"}]) == chat
        assert pipe.encode(list(chat)) == pipe.encode(np.array(chat)) == chat  # type: ignore[arg-type]
        assert pipe.encode("hello", raw=True) != chat


@pytest.mark.parametrize(
    "prompt",
    [
        b"hi", 5, None, [1, "a"], [1.5], [True], [], [{"role": "user"}], [{"role": "user", "content": 3}],
        [ChatMessage("user", "x"), 3],
    ],
)  # fmt: skip
def test_anything_else_is_refused(model: Path, prompt: Any) -> None:
    with Pipeline(model) as pipe, pytest.raises(RequestError):
        pipe.generate(prompt)


def test_messages_do_not_go_with_raw_and_stop_tokens_must_exist(model: Path) -> None:
    with Pipeline(model) as pipe:
        with pytest.raises(RequestError, match="raw"):
            pipe.generate([ChatMessage("user", "x")], raw=True)
        with pytest.raises(RequestError, match="stop token 99999"):
            pipe.generate("x", stop_token_ids=(99999,))
