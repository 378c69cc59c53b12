"""kill -9 of the engine in mid-answer: everybody is answered, and the next request works."""

import json
import os
import signal
import threading
from typing import Any

from tests.server.running import LIMIT_SECONDS, Running


def test_every_client_of_a_killed_engine_is_told_and_the_next_request_works(server: Running) -> None:
    expected = server.complete("before and after")["choices"][0]["text"]
    restarts = server.metrics()["steerpipe_engine_restarts_total"]
    streaming, answers = threading.Event(), {}

    def follow() -> None:
        body = {"prompt": "to be cut", "max_tokens": 450, "ignore_eos": True, "stream": True}
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
            lines = []
            for line in stream.iter_lines():
                streaming.set()
                lines.append(line)
        answers["stream"] = json.loads([line for line in lines if line][-1].removeprefix("data: "))

    def ask(place: int) -> None:
        body: dict[str, Any] = {"prompt": f"to be cut {place}", "max_tokens": 450, "ignore_eos": True}
        answer = server.post("/v1/completions", body)
        answers[f"whole {place}"] = answer.json() | {"status": answer.status_code}

    threads = [threading.Thread(target=follow), *(threading.Thread(target=ask, args=(i,)) for i in range(10))]
    for thread in threads:
        thread.start()
    assert streaming.wait(LIMIT_SECONDS)
    while server.service.link.open_count < 11:
        pass
    victim = server.service.link.process_id
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert len(answers) == 11
    for answer in answers.values():
        assert "the engine process ended" in answer["error"]["message"]
        assert answer.get("status", 500) == 500
    # nobody waits for the restart: this request does
    assert server.complete("before and after")["choices"][0]["text"] == expected
    assert server.metrics()["steerpipe_engine_restarts_total"] == restarts + 1
    assert server.get("/health").status_code == 200
