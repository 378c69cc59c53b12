"""Errors as OpenAI's clients expect them: a status, and a body that says what is wrong and what to do."""

import json
from typing import Any, NoReturn

from starlette.responses import Response

from steerpipe.core.errors import SteerpipeError
from steerpipe.server.messages import Failure, FailureKind

_STATUS = {FailureKind.INPUT: 400, FailureKind.CAPACITY: 503, FailureKind.ENGINE: 500}
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout_error"}


class ApiError(Exception):
    """An answer that is an error. `param` names the field at fault; `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {} if self.retry_after_seconds is None else {"retry-after": str(self.retry_after_seconds)}
        return json_response(self.body(), self.status, headers)


def api_error(error: SteerpipeError | Failure, *, param: str | None = None) -> ApiError:
    """Of an error in the engine, or of a request that it refuses."""
    if isinstance(error, SteerpipeError):
        return ApiError(400, f"{error.what}; {error.fix}", param=param)
    status = _STATUS[error.kind]
    retry_after_seconds = 1 if status == 503 else None
    return ApiError(status, f"{error.what}; {error.fix}", param=param, retry_after_seconds=retry_after_seconds)


def parse_json(text: str | bytes, what: str) -> Any:
    """Strict JSON. Raises ApiError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError(400, f"{what} is nested too deeply") from None
    except ValueError as problem:  # JSON, UTF-8, or an integer of thousands of digits
        place = f" at character {problem.pos}" if isinstance(problem, json.JSONDecodeError) else ""
        raise ApiError(400, f"{what} is not valid JSON{place}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def to_json(content: object) -> bytes:
    """UTF-8. Half a character (a lone surrogate, which a client may have sent) becomes JSON's own escape of it."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")
