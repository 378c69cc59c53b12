"""Drafts over a WebSocket: typing warms, Enter answers with the same words, and nobody gets at another's."""

import json
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.sync.client import ClientConnection, connect

from steerpipe.runtime.models import find_model
from tests.server.running import LIMIT_SECONDS, Running, serving
from tests.server.test_limits import changed
from tests.server.test_live import until
from tests.server.test_security import bearer

TEXT = "Tell me, please, what there is to be seen in a town of this size when it rains."


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """The embedded model: its tokenizer has words, so that some of them are certain before the text is complete."""
    with serving(find_model(None), fast_memory="50%") as running:
        yield running


@contextmanager
def line(server: Running, **headers: str) -> Iterator["Line"]:
    host, port = urlsplit(server.url).hostname, urlsplit(server.url).port
    address = f"ws://{headers.pop('host', f'{host}:{port}')}/v1/drafts"
    with (
        socket.create_connection((host, port)) as wire,
        connect(address, sock=wire, additional_headers=headers, open_timeout=LIMIT_SECONDS) as opened,
    ):
        yield Line(opened)


class Line:
    """What a client says and hears."""

    def __init__(self, opened: ClientConnection) -> None:
        self.socket = opened

    def say(self, kind: str, **content: Any) -> None:
        self.socket.send(json.dumps({"type": kind} | content))

    def hear(self, *kinds: str) -> dict[str, Any]:
        """The next message of one of these kinds."""
        while True:
            message: dict[str, Any] = json.loads(self.socket.recv(timeout=LIMIT_SECONDS))
            if message["type"] in kinds:
                return message

    def type(self, text: str) -> None:
        for at, letter in enumerate(text):
            self.say("edit", edits=[{"at": at, "insert": letter}])

    def answer(self) -> dict[str, Any]:
        """All of it: its text, and the figures of its last chunk."""
        chunks: list[dict[str, Any]] = []
        while (message := self.hear("chunk", "done", "error"))["type"] == "chunk":
            chunks.append(message["chunk"])
        assert message["type"] == "done", message
        parts = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
        return {"text": "".join(parts)} | chunks[-1]


def asked(server: Running, text: str, before: list[dict[str, str]] | None = None, **fields: Any) -> str:
    """The same over HTTP."""
    messages = [*(before or []), {"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 20, "temperature": 0} | fields
    content: str = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    return content


def test_a_draft_warms_and_becomes_the_answer_that_http_gives(server: Running) -> None:
    with line(server) as typist:
        typist.say("open", max_tokens=20, temperature=0)
        typist.hear("opened")
        typist.type(TEXT)
        warmth = typist.hear("warmth")
        while not warmth["speculated_tokens"]:
            warmth = typist.hear("warmth")
        assert warmth["typed_tokens"] >= warmth["stable_tokens"] >= warmth["prefilled_tokens"] > 0
        assert warmth["saved_ms"] > 0
        typist.say("submit", text=TEXT)
        assert typist.hear("submitted")["speculated_tokens"] > 0
        answer = typist.answer()
    assert answer["text"] == asked(server, TEXT)
    assert answer["timings"]["cache_n"] > 0


def test_what_is_known_of_an_answer_is_told_though_the_engine_is_in_the_middle_of_a_step(server: Running) -> None:
    engine = server.service.link.process_id
    assert engine is not None
    with line(server) as typist:
        typist.say("open", max_tokens=20, temperature=0, logprobs=True)
        typist.type(TEXT)
        while not typist.hear("warmth")["speculated_tokens"]:
            pass
        os.kill(engine, signal.SIGSTOP)  # a step that does not end
        try:
            typist.say("submit", text=TEXT)
            first = [typist.hear("chunk")["chunk"] for _ in range(2)]  # the role, and a token
        finally:
            os.kill(engine, signal.SIGCONT)
        rest = typist.answer()["text"]
    told = "".join(choice["delta"].get("content", "") for chunk in first for choice in chunk["choices"])
    assert told and told + rest == asked(server, TEXT)


def test_the_text_at_enter_counts_whatever_was_typed_before(server: Running) -> None:
    before = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello to you"}]
    with line(server) as typist:
        typist.say("open", messages=before, max_tokens=20, temperature=0)
        typist.type("Something else ☂ that is")
        typist.say("edit", edits=[{"at": 15, "remove": 1, "insert": "🙂"}, {"at": 0, "remove": 4}])
        typist.say("submit", text="Good night")
        assert typist.answer()["text"] == asked(server, "Good night", before)
        typist.say("open", messages=before, max_tokens=20, temperature=0)
        typist.type("Good night")
        typist.say("edit", edits=[{"at": 5, "remove": 5, "insert": "morning"}])
        typist.say("submit")
        assert typist.answer()["text"] == asked(server, "Good morning", before)


def test_an_answer_that_was_begun_to_another_text_is_not_told(server: Running) -> None:
    with line(server) as typist:
        typist.say("open", max_tokens=20, temperature=0)
        typist.type(TEXT)
        while not typist.hear("warmth")["speculated_tokens"]:
            pass
        typist.say("submit", text="Good night")
        assert typist.answer()["text"] == asked(server, "Good night")


def test_a_second_draft_on_a_line_supersedes_the_first(server: Running) -> None:
    with line(server) as typist:
        for text in ("first", "second"):
            typist.say("open", max_tokens=4)
            typist.hear("opened")
            typist.type(text)
        assert len(server.service.drafts) == 1
        typist.say("close")
        typist.say("submit")
        assert typist.hear("error")["error"]["code"] == "no_draft"
        assert len(server.service.drafts) == 0


def test_one_user_has_so_many_drafts_and_the_oldest_goes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steerpipe.server.draft_room.MOST_OF_ONE", 2)
    with line(server) as first, line(server) as second, line(server) as third:
        for typist in (first, second, third):
            typist.say("open")
            typist.hear("opened")
        first.hear("superseded")
        assert len(server.service.drafts) == 2


def test_a_draft_that_nobody_types_on_expires(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steerpipe.server.draft_line.EXPIRE_SECONDS", 0.05)
    with line(server) as typist:
        typist.say("open")
        typist.hear("expired")
        assert len(server.service.drafts) == 0
        typist.say("edit", edits=[{"at": 0, "insert": "a"}])
        assert typist.hear("error")["error"]["code"] == "no_draft"


def test_an_answer_is_stopped_on_its_line(server: Running) -> None:
    with line(server) as typist:
        typist.say("open", max_tokens=400)
        typist.say("submit", text="For a long time")
        typist.hear("chunk")
        typist.say("stop")
        typist.hear("stopped")
        while server.metrics()["steerpipe_num_requests_running"]:
            pass
        typist.say("open", max_tokens=4)
        typist.say("submit", text="For a short time")
        assert typist.answer()["text"]


def test_nothing_that_is_typed_is_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), line(server) as typist:
        typist.say("open", max_tokens=4)
        typist.hear("opened")
        typist.type("a very private thought")
        typist.say("edit", edits=[{"at": 900, "insert": "private"}])
        typist.hear("error")
        typist.say("submit", text="another private thought")
        typist.answer()
        typist.socket.close()
        until(lambda: any("WebSocket /v1/drafts" in said for said in own_words(caplog)))  # it is told when it ends
    assert not any("private" in said for said in own_words(caplog))


def own_words(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith(("steerpipe", "uvicorn"))]


def test_a_draft_outlives_the_engine(server: Running) -> None:
    with line(server) as typist:
        typist.say("open", max_tokens=20, temperature=0)
        typist.hear("opened")
        typist.type(TEXT[:40])
        while not (half := typist.hear("warmth"))["speculated_tokens"]:
            pass
        engine = server.service.link.process_id
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        typist.say("edit", edits=[{"at": 40, "insert": TEXT[40:]}])
        while not (whole := typist.hear("warmth"))["speculated_tokens"]:
            pass
        assert whole["typed_tokens"] > half["typed_tokens"] and server.service.link.process_id != engine
        typist.say("submit", text=TEXT)
        assert typist.answer()["text"] == asked(server, TEXT)


def test_a_draft_warms_for_its_own_key_only(server: Running) -> None:
    keys = ("first-key-of-two", "second-key-of-two")
    with changed(server, api_keys=keys), line(server, **bearer(keys[0])) as typist:
        typist.say("open", max_tokens=1)
        typed = "A sentence that is long enough to be kept for whoever has typed it, and for nobody else at all."
        typist.type(typed)
        while not typist.hear("warmth")["speculated_tokens"]:
            pass
        body = {"messages": [{"role": "user", "content": typed}], "max_tokens": 1}
        other = server.post("/v1/chat/completions", body, headers=bearer(keys[1])).json()
        own = server.post("/v1/chat/completions", body, headers=bearer(keys[0])).json()
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (other, own)]
    assert cached[0] == 0 and cached[1] > 0


def test_who_types_faster_than_the_engine_reads_is_not_listened_to(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    unread = [1 << 20]
    monkeypatch.setattr(server.service.link, "unread", lambda name: looks.append(name) or unread[0])
    with line(server) as typist:
        typist.say("open", max_tokens=4)
        typist.hear("opened")
        typist.say("edit", edits=[{"at": 0, "insert": "much"}])
        typist.say("close")
        until(lambda: len(looks) > 5)
        assert len(server.service.drafts) == 1
        unread[0] = 0
        until(lambda: not len(server.service.drafts))


def test_a_draft_whose_client_leaves_is_closed(server: Running) -> None:
    with line(server) as typist:
        typist.say("open", max_tokens=4)
        typist.hear("opened")
        typist.type("half a thou")
    until(lambda: not len(server.service.drafts))
    assert server.complete("the next one")["choices"][0]["text"]


def test_an_answer_that_is_stopped_at_once_leaves_the_engine_running(server: Running) -> None:
    engine = server.service.link.process_id
    with line(server) as typist:
        for _ in range(3):
            typist.say("open", max_tokens=20, temperature=0)
            typist.say("edit", edits=[{"at": 0, "insert": TEXT}])
            while not typist.hear("warmth")["speculated_tokens"]:
                pass
            typist.say("submit")
            typist.say("stop")
            typist.hear("stopped", "done")
    assert server.complete("the next one")["choices"][0]["text"]
    assert server.service.link.process_id == engine
