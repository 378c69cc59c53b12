"""What waits to be sent to the engine: in order, and never more than what is open."""

import asyncio
import threading
from typing import cast

import pytest

from steerpipe.core.config import EngineConfig
from steerpipe.core.sampling import SamplingSettings
from steerpipe.engine.request import Request
from steerpipe.intake.edits import insert
from steerpipe.server.engine_child import Child
from steerpipe.server.engine_link import EngineLink, EngineState
from steerpipe.server.messages import (
    Cancel,
    CloseDraft,
    DraftName,
    EditDraft,
    Observe,
    Observed,
    OpenDraft,
    Submit,
    SwitchPrediction,
    Ticket,
    ToEngine,
)
from steerpipe.server.outbox import Outbox

REQUEST = Request((1, 2, 3), SamplingSettings())
A, B = DraftName(1), DraftName(2)


def submit(number: int, draft: DraftName | None = None) -> Submit:
    return Submit(Ticket(number), REQUEST, draft)


def opened(name: DraftName) -> OpenDraft:
    return OpenDraft(name, "a", (), SamplingSettings(), True)


def typed(name: DraftName, text: str = "abc") -> EditDraft:
    return EditDraft(name, (insert(0, text, 0.0),))


def drained(*said: ToEngine) -> list[ToEngine]:
    box = Outbox()
    for message in said:
        box.put(message)
    found = []
    while len(box):
        message = box.take()
        assert message is not None
        found.append(message)
    return found


def test_messages_come_in_the_order_in_which_they_were_said() -> None:
    said = [submit(1), Observe(), opened(A), typed(A), submit(2, A), Cancel(Ticket(7))]
    assert drained(*said) == said


def test_a_request_that_is_cancelled_before_it_was_sent_is_never_sent() -> None:
    assert drained(submit(1), submit(2), Cancel(Ticket(1))) == [submit(2)]
    flood = [message for number in range(1000) for message in (submit(number), Cancel(Ticket(number)))]
    assert drained(*flood) == []


def test_a_draft_that_is_closed_before_it_was_sent_is_never_sent() -> None:
    assert drained(opened(A), typed(A), opened(B), typed(A), CloseDraft(A)) == [opened(B)]


def test_of_a_draft_that_the_engine_knows_only_the_end_is_sent() -> None:
    assert drained(typed(A), typed(B), CloseDraft(A)) == [typed(B), CloseDraft(A)]


def test_enter_that_is_cancelled_before_it_was_sent_closes_the_draft() -> None:
    assert drained(typed(A), submit(1, A), Cancel(Ticket(1))) == [CloseDraft(A)]
    assert drained(opened(A), typed(A), submit(1, A), Cancel(Ticket(1))) == []


def test_edits_of_one_draft_go_as_one_message_in_their_order() -> None:
    a, b, c = (typed(A, letter).edits[0] for letter in "abc")
    said = [EditDraft(A, (a,)), EditDraft(B, (c,)), EditDraft(A, (b, c)), Observe(), EditDraft(A, (c,))]
    assert drained(*said) == [EditDraft(A, (a, b, c, c)), EditDraft(B, (c,)), Observe()]
    long = [EditDraft(A, (a,) * 990), EditDraft(A, (b,) * 20), EditDraft(A, (c,) * 5)]
    assert drained(*long) == [EditDraft(A, (a,) * 990), EditDraft(A, (b,) * 20 + (c,) * 5)]


def test_of_a_switch_only_the_last_position_is_sent() -> None:
    flips = [SwitchPrediction(on=bool(number % 2)) for number in range(1000)]
    assert drained(submit(1), *flips) == [submit(1), SwitchPrediction(on=True)]


def test_it_says_how_much_of_a_draft_waits() -> None:
    box = Outbox()
    box.put(opened(A))
    assert box.typed(A) == 0
    box.put(typed(A, "x" * 1000))
    box.put(typed(B, "x" * 5000))
    assert 1000 < box.typed(A) < 2000
    box.take()
    box.take()
    assert box.typed(A) == 0


def test_nothing_gathers_where_nobody_takes_it() -> None:
    box = Outbox()
    box.put(submit(1))
    box.close()
    box.put(submit(2))
    assert not len(box) and box.take() is None


class Engine:
    """A process that answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[ToEngine] = []

    def send(self, message: ToEngine) -> None:
        self.asked.append(message)


def test_one_more_question_serves_all_who_ask_while_one_is_under_way() -> None:
    async def ask() -> None:
        engine, link = Engine(), EngineLink(None, EngineConfig())
        link.state, link._child = EngineState.READY, cast(Child, engine)
        first = asyncio.create_task(link.observe())
        await asyncio.sleep(0)
        others = [asyncio.create_task(link.observe(watching=place == 7)) for place in range(50)]
        await asyncio.sleep(0)
        assert engine.asked == [Observe()]
        old, new = cast(list[Observed], [object.__new__(Observed) for _ in range(2)])
        link._heard(cast(Child, engine), old)
        assert engine.asked == [Observe(), Observe(watching=True)]
        assert await first is old and not any(other.done() for other in others)
        link._heard(cast(Child, engine), new)
        assert all(found is new for found in await asyncio.gather(*others))
        assert len(engine.asked) == 2

    asyncio.run(ask())


@pytest.mark.parametrize("end", [submit(1), None], ids=["a message", "the end"])
def test_whoever_waits_for_the_next_is_woken(end: Submit | None) -> None:
    box = Outbox()
    found: list[ToEngine | None] = []
    reader = threading.Thread(target=lambda: found.append(box.take()))
    reader.start()
    if end is None:
        box.close()
    else:
        box.put(end)
    reader.join(60)
    assert found == [end]
