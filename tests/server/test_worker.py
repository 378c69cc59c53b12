"""The engine's loop on a pipe that tests fill: what comes in one go, and how much is taken between two steps."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import cast

import pytest

from steerpipe.core.errors import CapacityError
from steerpipe.core.events import TokenEvent
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.request import Request
from steerpipe.engine.tokenizer import ChatMessage
from steerpipe.intake.edits import insert
from steerpipe.runtime import draft_work
from steerpipe.runtime.pipeline import Pipeline
from steerpipe.server.messages import (
    Begun,
    Cancel,
    DraftName,
    EditDraft,
    Ended,
    Failed,
    FromEngine,
    OpenDraft,
    Stepped,
    Stop,
    Submit,
    Ticket,
    ToEngine,
    Told,
    Warmed,
)
from steerpipe.server.worker import EngineLoop
from tests.server.running import LIMIT_SECONDS

GREEDY = SamplingSettings(temperature=0.0, max_tokens=12)
TEXT = "Can you tell me what the capital of France is?"
DRAFT = DraftName(0)
OPEN = OpenDraft(DRAFT, "a", (), GREEDY, False)


class Front:
    """The server's end of the pipe, on the engine's thread: `answer` says more when the engine says something."""

    def __init__(self, *said: ToEngine, answer: Callable[[FromEngine, "Front"], list[ToEngine]]) -> None:
        self.waiting = list(said)
        self._answer = answer
        self._until = time.monotonic() + LIMIT_SECONDS

    def poll(self, seconds: float | None) -> bool:
        assert time.monotonic() < self._until, "it never ends"
        if not self.waiting and seconds != 0:
            time.sleep(0.001)
        return bool(self.waiting)

    def recv(self) -> ToEngine:
        return self.waiting.pop(0)

    def send(self, message: FromEngine) -> None:
        self.waiting += self._answer(message, self)


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline(dtype="float32", threads=1, predict="off", profile=False, max_context=1024) as pipe:
        yield pipe


def request(pipe: Pipeline) -> Request:
    return Request(pipe.encode([ChatMessage("user", TEXT)]), GREEDY, scope="a", continues=False)


def test_an_answer_that_was_begun_may_be_asked_for_and_cancelled_in_one_go(pipe: Pipeline) -> None:
    told: list[Ticket] = []

    def answer(message: FromEngine, _: Front) -> list[ToEngine]:
        if isinstance(message, Warmed) and message.warmth.speculated_tokens == 8:
            return [Submit(Ticket(0), request(pipe), DRAFT), Cancel(Ticket(0)), Submit(Ticket(1), request(pipe))]
        words = message.told if isinstance(message, Stepped) else ()
        told.extend(word.ticket for word in words)
        return [Stop() for word in words if isinstance(word, Ended)]

    front = Front(OPEN, EditDraft(DRAFT, (insert(0, TEXT, 0.0),)), answer=answer)
    EngineLoop(pipe, cast("Connection", front)).run()
    assert set(told) == {Ticket(1)}
    assert pipe.engine.idle


def test_the_text_of_a_draft_is_not_encoded_again_at_enter(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(pipe)

    def answer(message: FromEngine, _: Front) -> list[ToEngine]:
        words = message.told if isinstance(message, Stepped) else ()
        return [Stop() for word in words if isinstance(word, Ended)]

    monkeypatch.setattr(
        draft_work, "encode_prompt", lambda *_, **__: pytest.fail("it is encoded on the engine's thread")
    )
    front = Front(OPEN, EditDraft(DRAFT, (insert(0, TEXT, 0.0),)), Submit(Ticket(0), asked, DRAFT), answer=answer)
    EngineLoop(pipe, cast("Connection", front)).run()
    assert pipe.engine.idle


def test_an_answer_goes_on_while_somebody_floods_a_draft(pipe: Pipeline) -> None:
    waited: list[int] = []

    def answer(message: FromEngine, front: Front) -> list[ToEngine]:
        words = message.told if isinstance(message, Stepped) else ()
        waited.extend(len(front.waiting) for _ in words)
        return [Stop() for word in words if isinstance(word, Ended)]

    flood = [EditDraft(DRAFT, (insert(0, "a ", 0.0),) * 3)] * 400
    front = Front(Submit(Ticket(0), request(pipe)), OPEN, *flood, answer=answer)
    EngineLoop(pipe, cast("Connection", front)).run()
    assert waited[0] > 350, "the first token did not wait for all edits"
    assert waited[-1] < waited[0], "nor do the edits wait for the whole answer"


def test_what_was_begun_comes_in_one_go_at_enter(pipe: Pipeline) -> None:
    steps: list[int] = []  # words in each message after Enter
    asked = request(pipe)

    def answer(message: FromEngine, _: Front) -> list[ToEngine]:
        if isinstance(message, Warmed) and message.warmth.speculated_tokens == 8:
            return [Submit(Ticket(0), asked, DRAFT)]
        words = message.told if isinstance(message, Stepped) else ()
        steps.extend([len(words)] if words else [])
        return [Stop() for word in words if isinstance(word, Ended)]

    front = Front(OPEN, EditDraft(DRAFT, (insert(0, TEXT, 0.0),)), answer=answer)
    EngineLoop(pipe, cast("Connection", front)).run()
    assert steps[0] == 8 and set(steps[1:-1]) == {1}


@pytest.mark.parametrize("known", [1, 8])
@pytest.mark.parametrize("draft", [DRAFT, DraftName(7)], ids=["there", "of an engine that is gone"])
def test_what_the_server_has_told_is_not_told_again(pipe: Pipeline, known: int, draft: DraftName) -> None:
    told: list[int] = []
    alone = pipe.engine.submit(replace(request(pipe), scope=None))
    while not pipe.engine.idle:
        pipe.engine.step()
    wanted = pipe.engine.take_completion(alone).token_ids

    def answer(message: FromEngine, _: Front) -> list[ToEngine]:
        if isinstance(message, Begun) and len(message.opening.events) == known and not told:
            told.extend(message.opening.promise.token_ids)
            assert message.name == DRAFT and message.opening.request == request(pipe)
            return [Submit(Ticket(0), request(pipe), draft, message.opening.promise)]
        words = message.told if isinstance(message, Stepped) else ()
        told.extend(
            word.event.token_id for word in words if isinstance(word, Told) and isinstance(word.event, TokenEvent)
        )
        return [Stop() for word in words if isinstance(word, Ended)]

    front = Front(OPEN, EditDraft(DRAFT, (insert(0, TEXT, 0.0),)), answer=answer)
    EngineLoop(pipe, cast("Connection", front)).run()
    assert tuple(told) == wanted
    pipe.engine.forget_prefixes()


def test_how_an_answer_begins_is_told_when_more_is_known_and_not_at_every_step_of_others(pipe: Pipeline) -> None:
    known: list[int] = []
    others = Submit(Ticket(0), replace(request(pipe), scope="b"))

    def answer(message: FromEngine, _: Front) -> list[ToEngine]:
        if isinstance(message, Begun):
            known.append(len(message.opening.events))
            return {3: [others], 4: [Stop()]}.get(len(known), [])
        words = message.told if isinstance(message, Stepped) else ()
        more = EditDraft(DRAFT, (insert(len(TEXT), " And of Spain?", 0.0),))
        return [more for word in words if isinstance(word, Ended)]

    front = Front(OPEN, EditDraft(DRAFT, (insert(0, TEXT, 0.0),)), answer=answer)
    EngineLoop(pipe, cast("Connection", front)).run()
    pipe.engine.forget_prefixes()
    assert known == [1, 2, 3, 1], "the last is of another text"


def test_what_drafts_are_told_is_counted_as_a_steps_overhead(pipe: Pipeline) -> None:
    def answer(message: FromEngine, _: Front) -> list[ToEngine]:
        if not isinstance(message, Begun):
            return []
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        return [Stop()]

    loop = EngineLoop(pipe, cast("Connection", Front(OPEN, EditDraft(DRAFT, (insert(0, TEXT, 0.0),)), answer=answer)))
    loop.run()
    pipe.engine.forget_prefixes()
    assert loop._overhead_seconds >= 0.05


@pytest.mark.parametrize("failing", [False, True], ids=["cancelled", "failed"])
def test_of_an_answer_that_does_not_end_no_account_is_left(monkeypatch: pytest.MonkeyPatch, failing: bool) -> None:
    with Pipeline(dtype="float32", threads=1, predict="off", profile=False, max_context=256, max_batch=2,
                  fast_memory="25%", quality="drop") as lossy:  # fmt: skip
        assert lossy.quality is not None
        accounts = lossy.quality.desk.accounts
        known: list[int] = []

        def answer(message: FromEngine, _: Front) -> list[ToEngine]:
            words = message.told if isinstance(message, Stepped) else ()
            if any(isinstance(word, Failed) for word in words):
                return [Stop()]
            if accounts._of and not known:
                known.extend(accounts._of)
                if not failing:
                    return [Cancel(Ticket(0)), Stop()]
                monkeypatch.setattr(lossy.engine._runner, "decode", fail)
            return []

        def fail(_: object) -> None:
            raise CapacityError("no room", fix="none")

        loop = EngineLoop(lossy, cast("Connection", Front(Submit(Ticket(0), request(lossy)), answer=answer)))
        loop.run()
        assert known and not accounts._of and not loop._before
