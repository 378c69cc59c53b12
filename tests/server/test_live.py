"""What onlookers get: the page, frames while they look, the switch, and figures that agree with each other."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from steerpipe.server import live
from steerpipe.server.frontpage import PATHS
from tests.server.running import LIMIT_SECONDS, Running
from tests.server.test_limits import changed
from tests.server.test_security import KEYS, bearer

HANG_SECONDS = 30.0
REASONS = ("demand", "prefetch", "draft")


@contextmanager
def looking(server: Running, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Frames as they come."""
    with httpx.stream("GET", f"{server.url}/live", headers=headers, timeout=LIMIT_SECONDS) as stream:
        assert stream.status_code == 200, stream.read()
        yield (json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: "))


def until(done: Any) -> None:
    """Waits for what the server does after the client has left."""
    limit = time.monotonic() + HANG_SECONDS
    while not done():
        assert time.monotonic() < limit, "it never happens"


def test_the_page_needs_no_key_and_brings_everything_with_it(server: Running) -> None:
    with changed(server, api_keys=KEYS):
        for path in PATHS:
            answer = server.get(path)
            assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
            assert not re.search(r"(src|href|from|url\()\s*=?\s*[\"'(]?(https?:)?//", answer.text), path
        assert server.get("/live").status_code == 401
        assert server.get("/page/../app.py").status_code == 401
    assert server.get("/page/index.html").status_code == 404


def test_a_frame_says_what_the_metrics_say(server: Running) -> None:
    server.complete("before anybody looks")
    with looking(server) as frames:
        frame = next(frames)
        metrics = server.metrics()
    assert frame["state"] == "ready"
    for place, count in frame["places"].items():
        assert metrics[f'steerpipe_experts{{place="{place}"}}'] == count
        assert count == sum("".join(frame["map"]).count(digit) for digit in _digits(place))
    for reason in REASONS:
        moved = frame["experts"]["by_reason"][reason]["read_bytes"]
        assert metrics[f'steerpipe_expert_read_bytes_total{{reason="{reason}"}}'] == moved


def _digits(place: str) -> tuple[str, str]:
    number = ("disk", "ram", "moving", "fast").index(place)
    return str(number), str(number + 4)


def test_frames_come_while_something_happens_and_show_who_is_used(server: Running) -> None:
    with looking(server) as frames:
        assert next(frames)["running"] == 0
        server.complete("something to look at", max_tokens=40)
        seen = [next(frames)]
        while not any(digit >= "4" for digit in "".join(seen[-1]["map"])):
            seen.append(next(frames))
        assert seen[-1]["experts"]["leased"] > 0


def test_who_is_used_is_not_told_where_there_are_several_users(server: Running) -> None:
    with looking(server) as frames:
        server.complete("what somebody asks", max_tokens=40)
        while not any(digit >= "4" for digit in "".join(next(frames)["map"])):
            pass
    with changed(server, api_keys=("first-key-of-two", "second-key-of-two")):
        headers = bearer("first-key-of-two")
        with looking(server, **headers) as frames:
            frame = next(frames)
    assert frame["state"] == "ready" and set("".join(frame["map"])) <= set("0123")


def test_the_engine_is_asked_only_while_somebody_looks(server: Running) -> None:
    gallery = server.service.gallery
    with looking(server) as one, looking(server) as other:
        next(one), next(other)
        looks = gallery._looking
        assert gallery._viewers == 2 and looks is not None
    until(lambda: not gallery._viewers and looks.done())


def test_only_so_many_look_at_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_VIEWERS", 1)
    with looking(server) as frames:
        next(frames)
        refused = server.get("/live")
    assert refused.status_code == 429 and refused.json()["error"]["message"]


def test_the_switch_is_the_engines_own(server: Running) -> None:
    server.post("/prediction", {"on": True})
    assert server.get("/prediction").json()["on"] is True
    off = server.post("/prediction", {"on": False}).json()
    assert off["available"] and off["on"] is False and off["eviction"] is None
    assert server.metrics()["steerpipe_prediction_on"] == 0
    before = server.metrics()['steerpipe_expert_transfers_total{reason="prefetch"}']
    answer = server.complete("without a forecast", max_tokens=40)["choices"][0]["text"]
    assert server.get("/prediction").json()["predictor"] is None
    assert server.post("/prediction", {"on": True}).json()["on"] is True
    assert server.complete("without a forecast", max_tokens=40)["choices"][0]["text"] == answer
    assert server.metrics()['steerpipe_expert_transfers_total{reason="prefetch"}'] >= before
    assert server.post("/prediction", {"on": 1}).status_code == 400


def test_metrics_of_prediction_add_up(server: Running) -> None:
    server.complete("long enough for a trial to begin and to end", max_tokens=200)
    metrics, said = server.metrics(), server.get("/prediction").json()
    assert sum(value for name, value in metrics.items() if name.startswith("steerpipe_prediction_running")) == 1
    for name, score in said["scores"].items():
        foreseen = metrics[f'steerpipe_prediction_foreseen_total{{predictor="{name}"}}']
        missing = metrics[f'steerpipe_prediction_missing_total{{predictor="{name}"}}']
        assert (foreseen, missing) == (score["foreseen"], score["missing"]) and foreseen <= missing
        assert metrics[f'steerpipe_prediction_recall_on_misses{{predictor="{name}"}}'] == score["recall_on_misses"]
    for outcome, size in said["guessed_bytes"].items():
        assert metrics[f'steerpipe_prediction_bytes{{outcome="{outcome}"}}'] == size
