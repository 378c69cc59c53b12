"""What the server refuses, each with a status and a message; and what it ends."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.server.running import LIMIT_SECONDS, Running

LONG = {"prompt": "On and on", "max_tokens": 450, "ignore_eos": True, "stream": True}


@contextmanager
def changed(server: Running, **settings: Any) -> Iterator[None]:
    """Other settings for a while."""
    before = server.service.settings
    server.service.settings = replace(before, **settings)
    try:
        yield
    finally:
        server.service.settings = before


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    assert found["message"]
    return found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON at character 1"),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b"\xff\xfe\xfd", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[1]", "the body is a list"),
        (b"{}", "prompt: field required"),
        (b'{"prompt": "a", "n": "2"}', "n: input should be a valid integer"),
        (b'{"prompt": "a", "stop": [""]}', "stop.0: string should have at least 1 character"),
        (b'{"prompt": "\\ud800"}', "half a character"),
        (b'{"prompt": [1, 999999]}', "token id 999999 is not in the vocabulary"),
        (b'{"prompt": []}', "prompt"),
        (b'{"prompt": ""}', "the prompt is empty"),
        (b'{"prompt": "a", "\\udc80": 1}', "is not a field"),
        (b'{"prompt": "a", "top_logprobs": 3}', "did you mean logprobs?"),
        (b'{"prompt": "a", "stop_token_ids": [400]}', "stop token 400"),
        (b'{"prompt": "a", "stream_options": {}}', "stream_options needs stream"),
        (b'{"prompt": "a", "suffix": "b"}', "suffix is not supported"),
        (b'{"prompt": "a", "best_of": 2}', "best_of is not supported"),
    ],
)
def test_a_body_that_cannot_be_used_is_answered_with_the_reason(server: Running, content: bytes, message: str) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=LIMIT_SECONDS)
    assert answer.status_code == 400
    assert message in error_of(answer)["message"]


def test_a_chat_names_the_message_at_fault(server: Running) -> None:
    user = {"role": "user", "content": "a"}
    for bad, param in (
        ({"role": "user", "content": "a", "tool_calls": [{}]}, "messages.1.tool_calls"),
        ({"role": "user", "contnt": "a"}, "messages.1.contnt"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.1.content.0.type"),
        ({"role": "user", "content": 5}, "messages.1.content"),
    ):
        answer = server.post("/v1/chat/completions", {"messages": [user, bad]})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == param


def test_parts_of_a_text_are_one_text(server: Running) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "this"}]
    counts = [
        server.post("/tokenize", {"messages": [{"role": "user", "content": content}]}).json()
        for content in (parts, "Say this")
    ]
    assert counts[0] == counts[1]


def test_a_body_that_is_too_large_is_refused_before_it_is_parsed(server: Running) -> None:
    with changed(server, max_body_bytes=1000):
        answer = server.post("/v1/completions", {"prompt": "x" * 1000})
        assert answer.status_code == 413 and "1000 bytes" in error_of(answer)["message"]
        chunks = iter([b'{"prompt": "', b"x" * 2000, b'"}'])  # without a Content-Length
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{server.url}/v1/completions", content=chunks, headers=headers, timeout=LIMIT_SECONDS)
        assert answer.status_code == 413


def test_what_is_no_json_by_its_type_is_refused(server: Running) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415 and error_of(answer)


def test_unknown_paths_and_methods_are_answered_in_the_same_form(server: Running) -> None:
    assert server.get("/v1/nothing").status_code == 404
    answer = server.get("/v1/completions")
    assert answer.status_code == 405 and error_of(answer)


def test_a_full_queue_is_answered_with_429_and_when_to_come_back(server: Running) -> None:
    with changed(server, max_queue=0), server.client() as client:
        with client.stream("POST", "/v1/completions", json=LONG | {"n": 8}) as running:
            assert running.status_code == 200
            answer = server.post("/v1/completions", {"prompt": "a"})
            assert answer.status_code == 429
            assert error_of(answer)["code"] == "queue_full"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert server.post("/v1/completions", {"prompt": "a", "n": 9}).status_code == 400
        while server.service.link.open_count:  # the client has left: its eight answers are cancelled
            server.get("/health")
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200


def test_one_user_leaves_room_in_the_queue_for_another(server: Running) -> None:
    keys = ("first-key-of-two", "second-key-of-two")
    one, other = ({"authorization": f"Bearer {key}"} for key in keys)
    with changed(server, max_queue=0, api_keys=keys), server.client() as client:
        with client.stream("POST", "/v1/completions", json=LONG | {"n": 4}, headers=one) as running:
            assert running.status_code == 200
            refused = server.post("/v1/completions", {"prompt": "a"}, headers=one)
            assert refused.status_code == 429 and "4 of them yours" in error_of(refused)["message"]
            assert server.post("/v1/completions", {"prompt": "a", "n": 4}, headers=other).status_code == 200
        while server.service.link.open_count:
            server.get("/health")


def test_a_request_that_takes_too_long_is_ended_and_told(server: Running) -> None:
    with changed(server, timeout_seconds=0.05):
        answer = server.post("/v1/completions", LONG | {"stream": False})
        assert answer.status_code == 504 and "longer than 0.05 s" in error_of(answer)["message"]
    with changed(server, timeout_seconds=0.4), server.client() as client:
        with client.stream("POST", "/v1/completions", json=LONG | {"n": 4}) as stream:
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert json.loads(lines[-1])["error"]["type"] == "timeout_error"
    while server.service.link.open_count:
        server.get("/health")


def test_a_client_that_leaves_before_its_answer_frees_the_engine(server: Running) -> None:
    with server.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=LONG | {"stream": False, "n": 8}, timeout=0.3)
    while server.service.link.open_count:
        server.get("/health")
    while server.metrics()["steerpipe_num_requests_running"]:
        pass


def test_a_slow_reader_holds_nobody_up(server: Running) -> None:
    with server.client() as client, client.stream("POST", "/v1/completions", json=LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert server.complete("quick")["usage"]["completion_tokens"] == 12
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"


def test_tokens_and_text_go_both_ways(server: Running) -> None:
    found = server.post("/tokenize", {"prompt": "Grüße ≠ 🙂"}).json()
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 512
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "Grüße ≠ 🙂"}
    assert server.post("/tokenize", {}).status_code == 400
    assert server.post("/detokenize", {"tokens": [260]}).status_code == 400


def test_a_prompt_that_was_warmed_is_there_when_it_is_asked(server: Running) -> None:
    messages = [{"role": "user", "content": "A prompt that somebody is still typing, long enough to matter."}]
    warmed = server.post("/v1/prewarm", {"messages": messages}).json()
    assert warmed["usage"]["completion_tokens"] == 0
    body = {"messages": messages, "max_tokens": 4}
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    assert usage["prompt_tokens"] == warmed["usage"]["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16
    assert server.post("/v1/prewarm", {}).status_code == 400


def test_prewarm_in_the_options_of_a_chat_gives_no_output(server: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "Another prompt, and then nothing."}],
        "prompt_cache_options": {"prewarm": True},
    }
    for stream in (False, True):
        answer = server.post("/v1/chat/completions", body | {"stream": stream})
        assert answer.status_code == 200
    first = server.post("/v1/chat/completions", body).json()
    assert first["choices"][0]["message"]["content"] == ""
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_an_answer_says_where_its_time_went_and_what_the_experts_did(server: Running) -> None:
    answer = server.complete("What does it cost?", max_tokens=6)
    timings, experts = answer["timings"], answer["experts"]
    assert timings["predicted_n"] == 6 and timings["prompt_n"] + timings["cache_n"] == 18
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] > 0
    assert experts["hits"] + experts["late"] + experts["misses"] == experts["leased"] > 0
    assert answer["quality"] is None


def test_many_small_requests_at_once_are_all_answered(server: Running) -> None:
    answers: dict[int, str] = {}

    def ask(place: int) -> None:
        answers[place] = server.complete(f"request {place}", max_tokens=5)["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert len(answers) == 24
    for place, text in answers.items():
        assert server.complete(f"request {place}", max_tokens=5)["choices"][0]["text"] == text
