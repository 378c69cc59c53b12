"""The description at `/openapi.json`: FastAPI's, with the bodies that the routes read by themselves."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from steerpipe.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PredictionRequest,
    PrewarmRequest,
    TokenizeRequest,
)

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/prewarm": PrewarmRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/prediction": PredictionRequest,
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_FAILURES = {
    "400": "the request cannot run as asked", "401": "no valid API key", "403": "Host or Origin is not allowed",
    "404": "no such model", "408": "the body did not come in time", "413": "the body is too large",
    "415": "the body is not JSON", "429": "the queue is full", "500": "the engine failed",
    "503": "the model is being loaded, or the server is ending", "504": "the request took too long",
}  # fmt: skip


def describe(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    template = "#/components/schemas/{model}"
    _, bodies = models_json_schema([(model, "validation") for model in _BODIES.values()], ref_template=template)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(bodies["$defs"] | {"Error": _ERROR})
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            if path in _BODIES and method == "post":
                schema = {"$ref": template.format(model=_BODIES[path].__name__)}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            operation["responses"].pop("422", None)
            operation["responses"].update(_failures(path in _BODIES))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return found


def _failures(has_body: bool) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    wanted = _FAILURES if has_body else {status: _FAILURES[status] for status in ("401", "403", "404", "503")}
    return {status: {"description": text, "content": error} for status, text in wanted.items()}
