"""Who may ask: keys, hosts, origins. And what nobody gets to see."""

import logging

import httpx
import pytest

from steerpipe.core.errors import ConfigError
from steerpipe.server.guard import is_allowed_host, is_allowed_origin
from steerpipe.server.settings import ServerSettings
from tests.server.running import Running
from tests.server.test_limits import changed

KEYS = ("first-key-of-two", "second-key-of-two")
LONG_PROMPT = "The same long prompt from two people who do not know each other."


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_with_keys_set_everything_but_health_needs_one(server: Running) -> None:
    with changed(server, api_keys=KEYS):
        for path in ("/v1/models", "/metrics", "/props", "/openapi.json", "/nothing"):
            assert server.get(path).status_code == 401
        assert server.get("/health").status_code == 200
        assert server.get("/v1/models", headers=bearer(KEYS[1])).status_code == 200
        for wrong in ("Bearer", "Bearer x", f"Basic {KEYS[0]}", KEYS[0], f"Bearer {KEYS[0]}x"):
            answer = server.post("/v1/completions", {"prompt": "a"}, headers={"authorization": wrong})
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"


def test_prompts_are_reused_by_the_same_key_only(server: Running) -> None:
    with changed(server, api_keys=KEYS):
        body = {"prompt": LONG_PROMPT, "max_tokens": 1}
        order = (KEYS[0], KEYS[1], KEYS[0], KEYS[1])
        usages = [server.post("/v1/completions", body, headers=bearer(key)).json()["usage"] for key in order]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0 and cached[3] > 0


def test_a_host_that_is_not_ours_is_refused(server: Running) -> None:
    for host in ("evil.example", "evil.example:8000", "", "127.0.0.1.evil.example", "[bad"):
        assert server.get("/health", headers={"host": host}).status_code == 403
    with changed(server, allowed_hosts=("Models.example",)):
        assert server.get("/health", headers={"host": "models.example:443"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True), ("localhost:80", True), ("127.0.0.1:8000", True), ("[::1]:8000", True), ("10.1.2.3", True),
        ("localhost.example", False), ("example", False), ("", False), ("::1", False),
    ],
)  # fmt: skip
def test_hosts(host: str, allowed: bool) -> None:
    assert is_allowed_host(host, ()) is allowed


def test_pages_of_other_origins_are_refused_unless_named(server: Running) -> None:
    other = {"origin": "https://evil.example"}
    assert server.get("/v1/models", headers=other).status_code == 403
    assert server.get("/v1/models", headers={"origin": server.url}).status_code == 200
    answer = server.get("/v1/models")
    assert "access-control-allow-origin" not in answer.headers
    assert is_allowed_origin("https://a.example", "localhost", ("https://a.example",))
    assert not is_allowed_origin("null", "localhost", ())
    assert not is_allowed_origin("http://localhost:81", "localhost:80", ())


def test_no_text_of_a_request_is_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    secret = "a very private question"
    with caplog.at_level(logging.DEBUG):
        server.complete(secret)
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": secret}], "n": secret})
        httpx.get(f"{server.url}/v1/models?{secret}")
        server.get("/line%0abreak")
    own = [record.getMessage() for record in caplog.records if record.name.startswith(("steerpipe", "uvicorn"))]
    assert any("POST /v1/completions 200" in line for line in own)
    assert not any("private" in line or "\n" in line for line in own)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "there is no API key"),
        ({"host": "server.example"}, "there is no API key"),
        ({"port": 70000}, "port is 70000"),
        ({"api_keys": ("short",)}, "too short"),
        ({"cors_origins": ("*",)}, "origin"),
        ({"max_queue": -1}, "max_queue is -1"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds"),
    ],
)
def test_settings_that_are_unsafe_or_nonsense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**settings)  # type: ignore[arg-type]


def test_an_address_for_others_is_fine_with_a_key() -> None:
    assert ServerSettings(host="0.0.0.0", api_keys=KEYS).api_keys == KEYS
