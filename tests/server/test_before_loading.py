"""What the server says before there is a model, and to web pages. No engine is started here."""

import asyncio
from typing import Any

import httpx

from steerpipe.core.config import EngineConfig, read_api_keys
from steerpipe.server.app import build_app
from steerpipe.server.engine_link import EngineLink, EngineState
from steerpipe.server.messages import Failure, FailureKind
from steerpipe.server.service import Service
from steerpipe.server.settings import ServerSettings

PAGE = "https://page.example"


def asked(service: Service, method: str, path: str, **more: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(ask())


def unloaded(**settings: Any) -> Service:
    return Service(ServerSettings(**settings), EngineLink(None, EngineConfig()))


def test_everything_that_needs_the_model_is_answered_with_503_and_when_to_come_back() -> None:
    service = unloaded()
    routes = (("GET", "/health"), ("GET", "/v1/models"), ("GET", "/props"), ("POST", "/v1/completions"))
    for method, path in routes:
        answer = asked(service, method, path, json={"prompt": "a"} if method == "POST" else None)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
        assert int(answer.headers["retry-after"]) >= 1
    assert "steerpipe_engine_restarts_total 0" in asked(service, "GET", "/metrics").text


def test_a_model_that_cannot_be_loaded_again_is_told_with_its_reason() -> None:
    service = unloaded()
    service.link.state = EngineState.FAILED
    service.link.failure = Failure(FailureKind.ENGINE, "the disk is gone", "bring it back")
    answer = asked(service, "GET", "/health")
    assert answer.status_code == 503 and answer.json()["error"]["message"] == "the disk is gone; bring it back"


def test_a_server_that_ends_refuses_new_requests() -> None:
    service = unloaded()
    service.stopping = True
    answer = asked(service, "POST", "/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503 and "shutting down" in answer.json()["error"]["message"]


def test_a_page_that_was_named_may_ask_and_another_may_not() -> None:
    service = unloaded(cors_origins=(PAGE,), api_keys=("a-long-enough-key",))
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = asked(service, "OPTIONS", "/v1/completions", headers={"origin": PAGE} | wanted)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    assert asked(service, "GET", "/health", headers={"origin": PAGE}).headers["access-control-allow-origin"] == PAGE
    other = asked(service, "GET", "/health", headers={"origin": "https://other.example"})
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers


def test_keys_come_from_one_variable() -> None:
    assert read_api_keys({"STEERPIPE_API_KEY": " first , second,"}) == ("first", "second")
    assert read_api_keys({}) == ()
