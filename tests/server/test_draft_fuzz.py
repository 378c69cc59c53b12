"""Whatever is said over the line for drafts: an answer with a message, never silence, never a broken server."""

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed, InvalidStatus

from steerpipe.server.draft_line import DraftLine
from steerpipe.server.service import Service
from tests.server.running import Running
from tests.server.test_drafts import Line, line
from tests.server.test_limits import changed
from tests.server.test_security import bearer

KEYS = ("first-key-of-two", "second-key-of-two")
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
_JSON = st.recursive(
    _LEAVES, lambda deeper: st.lists(deeper, max_size=3) | st.dictionaries(st.text(max_size=8), deeper, max_size=3),
    max_leaves=8,
)  # fmt: skip
_NUMBERS = st.integers(-2, 8) | st.integers() | _JSON
_EDIT = st.fixed_dictionaries({}, optional={"at": _NUMBERS, "remove": _NUMBERS, "insert": st.text(max_size=4) | _JSON})
_FIELDS = st.fixed_dictionaries(
    {"type": st.sampled_from(["open", "edit", "submit", "stop", "close"]) | _JSON},
    optional={
        "edits": st.lists(_EDIT, max_size=4) | _JSON, "messages": _JSON, "text": st.text(max_size=8) | _JSON,
        "max_tokens": _NUMBERS, "temperature": _JSON, "key": _JSON, "n": _NUMBERS, "seed": _NUMBERS, "model": _JSON,
    },
)  # fmt: skip
_MESSAGE = st.one_of(
    _FIELDS.map(json.dumps), _JSON.map(json.dumps), st.text(max_size=40), st.binary(max_size=40), st.just("[" * 50_000)
)


_SAID = st.lists(_MESSAGE, min_size=1, max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=_SAID)
def test_every_message_is_obeyed_or_refused_with_a_reason(server: Running, said: list[str | bytes]) -> None:
    _say(server, said)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=_SAID)
def test_a_thousand_lines_are_obeyed_or_refused_with_a_reason(server: Running, said: list[str | bytes]) -> None:
    _say(server, said)


def _say(server: Running, said: list[str | bytes]) -> None:
    before = server.service.metrics.http["500"]
    with line(server) as typist:
        for message in said:
            try:
                typist.socket.send(message)
            except UnicodeEncodeError:  # half a character: the client library itself refuses it
                continue
        _open_again(typist)
    assert server.service.metrics.http["500"] == before
    assert server.get("/health").status_code == 200


def _open_again(typist: Line) -> None:
    """The line still works; every error on the way has words."""
    typist.say("close")
    typist.say("stop")
    typist.say("open", max_tokens=2, user="the last one")
    opened = 0
    while not opened:
        heard = typist.hear("opened", "error")
        if heard["type"] == "error":
            assert heard["error"]["message"] and heard["error"]["type"] == "invalid_request_error", heard
            continue
        typist.say("submit", text="a")
        while (heard := typist.hear("done", "error", "stopped", "opened"))["type"] != "done":
            assert heard["type"] != "error" or heard["error"]["message"], heard
        opened += 1


@pytest.mark.parametrize(
    ("said", "about"),
    [
        ("{", "JSON"), ("[]", "type"), ('{"type": "fly"}', "open, edit, submit, stop, close"), (b"\x00", "bytes"),
        ('{"type": "edit", "edits": []}', "open first"), ('{"type": "submit"}', "open first"),
        ('{"type": "open", "n": 2}', "one answer"), ('{"type": "open", "messages": 1}', "a list"),
        ('{"type": "open", "temprature": 1}', "temperature"), ('{"type": "open", "key": 1}', "a string"),
        ('{"type": "open", "model": "another"}', "not here"), ('{"type": "stop", "x": 1}', "x"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_is_wrong(server: Running, said: str | bytes, about: str) -> None:
    with line(server) as typist:
        typist.socket.send(said)
        assert about in typist.hear("error")["error"]["message"]


@pytest.mark.parametrize(
    ("edit", "about"),
    [
        ({"at": 9}, "9"), ({"at": 0, "remove": 9}, "9"), ({"at": -1}, "at"), ({"at": 0, "insert": 5}, "insert"),
        ({}, "at"),
    ],
)  # fmt: skip
def test_an_edit_that_does_not_fit_is_refused_and_the_text_stands(
    server: Running, edit: dict[str, Any], about: str
) -> None:
    with line(server) as typist:
        typist.say("open", max_tokens=4)
        typist.say("edit", edits=[{"at": 0, "insert": "abc"}])
        typist.say("edit", edits=[edit])
        assert about in typist.hear("error")["error"]["message"]
        typist.say("submit", text="abc")
        assert typist.answer()["text"] is not None


def test_a_line_that_makes_no_sense_for_too_long_is_closed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steerpipe.server.draft_line.MOST_FAULTS", 3)
    with line(server) as typist:
        for _ in range(3):
            typist.socket.send("?")
            typist.hear("error")
        with pytest.raises(ConnectionClosed, match="no sense"):
            typist.hear("nothing")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403), ({"Origin": "null"}, 403), ({"host": "evil.example"}, 403),
        ({"Authorization": "Bearer wrong"}, 401),
    ],
)  # fmt: skip
def test_strangers_are_refused_before_there_is_a_line(
    server: Running, caplog: pytest.LogCaptureFixture, headers: dict[str, str], status: int
) -> None:
    with changed(server, api_keys=KEYS), pytest.raises(InvalidStatus) as refused, line(server, **headers):
        pass
    response = refused.value.response
    assert response.status_code == status
    assert json.loads(response.body or b"")["error"]["message"]
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_a_key_comes_in_the_header_or_with_the_first_message(server: Running) -> None:
    with changed(server, api_keys=KEYS):
        with line(server, **bearer(KEYS[0])) as typist:
            typist.say("open")
            typist.hear("opened")
        with line(server, Origin=server.url) as typist:
            typist.say("open")
            assert typist.hear("error")["error"]["code"] == "invalid_api_key"
            typist.say("open", key=KEYS[1])
            typist.hear("opened")


def test_a_line_that_shows_no_key_is_closed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steerpipe.server.draft_line.KEY_SECONDS", 0.05)
    with (
        changed(server, api_keys=KEYS),
        line(server, Origin=server.url) as typist,
        pytest.raises(ConnectionClosed, match="no key"),
    ):
        typist.hear("nothing")


def test_a_mistake_of_ours_is_logged_without_what_was_typed(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: str) -> None:
        raise ValueError("private")

    monkeypatch.setattr("steerpipe.server.draft_line.parse_said", fail)
    with line(server) as typist:
        typist.say("open", user="private")
        with pytest.raises(ConnectionClosed, match="its log says where"):
            typist.hear("nothing")
    assert "ValueError in " in caplog.text and "private" not in caplog.text


def test_drafts_can_be_switched_off(server: Running) -> None:
    with changed(server, drafts=False), pytest.raises(InvalidStatus) as refused, line(server):
        pass
    assert "switched off" in json.loads(refused.value.response.body or b"")["error"]["message"]


def test_half_a_character_at_enter_is_refused_and_the_draft_stays(server: Running) -> None:
    with line(server) as typist:
        typist.say("open", max_tokens=4)
        typist.say("submit", text="\ud800")
        refused = typist.hear("error")["error"]
        assert "half a character" in refused["message"] and refused["param"] == "text"
        typist.say("submit", text="abc")
        assert typist.answer()["text"] is not None


class Deaf:
    """The socket of a client that sends and never reads."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(user="somebody")
        self.received, self.closed = 0, ""

    async def accept(self) -> None: ...

    async def receive(self) -> dict[str, str]:
        self.received += 1
        await asyncio.sleep(0)
        return {"type": "websocket.receive", "text": "?"}

    async def send_text(self, text: str) -> None:
        await asyncio.Event().wait()

    async def close(self, code: int, why: str) -> None:
        self.closed = why


def test_a_line_that_is_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steerpipe.server.draft_line.MOST_UNREAD", 3)
    monkeypatch.setattr("steerpipe.server.draft_line._CLOSE_SECONDS", 0.01)
    deaf = Deaf()

    async def run() -> None:
        await DraftLine(cast(WebSocket, deaf), cast(Service, None)).run()

    asyncio.run(run())
    assert deaf.closed == "what is said on the line is not read"
    assert 4 <= deaf.received <= 7
