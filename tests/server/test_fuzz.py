"""Bodies made by schemathesis from the server's own description, right and wrong: no 5xx, no hang, always a message."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode

from steerpipe.core.config import EngineConfig
from steerpipe.server.app import build_app
from steerpipe.server.engine_link import EngineLink
from steerpipe.server.openapi import describe
from steerpipe.server.service import Service
from steerpipe.server.settings import ServerSettings
from tests.server.running import LIMIT_SECONDS, Running

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/prewarm", "/tokenize", "/detokenize", "/prediction",
    "/v1/models/{model}",
)  # fmt: skip
EXAMPLES = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))


def cases(path: str) -> st.SearchStrategy[Any]:
    """Requests that fit the description, and requests that do not."""
    app = build_app(Service(ServerSettings(), EngineLink(None, EngineConfig())))
    operation = schemathesis.openapi.from_dict(describe(app))[path]["GET" if "models" in path else "POST"]
    return st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode))


def short(body: Any) -> Any:
    """The same body with an answer of a few tokens: what is tested is what is asked, not how long it may take."""
    if not isinstance(body, dict) or not {"messages", "prompt"} & body.keys():
        return body
    limits = {name: 3 for name in ("max_tokens", "max_completion_tokens") if _is_long(body.get(name), 3)}
    return body | limits | ({"n": 8} if _is_long(body.get("n", 1), 8) else {})


def _is_long(value: Any, limit: int) -> bool:
    return value is None or (isinstance(value, int) and value > limit)


def check(case: Any, server: Running) -> None:
    if case.path.endswith("completions"):
        case.body = short(case.body)
    answer = case.call(base_url=server.url, timeout=LIMIT_SECONDS)
    case.validate_response(answer, checks=[not_a_server_error])
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_whatever_is_sent_is_answered_or_refused_with_a_message(server: Running, path: str) -> None:
    EXAMPLES(given(cases(path))(lambda case: check(case, server)))()


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_whatever_is_sent_many_times(server: Running, path: str) -> None:
    MANY(given(cases(path))(lambda case: check(case, server)))()
