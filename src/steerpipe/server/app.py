"""The routes. Each reads its body, asks the engine, and writes the answer; what they share is in `service`."""

import os
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from steerpipe import __version__
from steerpipe.server.answering import Writer
from steerpipe.server.asking import Asked, Asker
from steerpipe.server.chat import ChatWriter
from steerpipe.server.completions import CompletionWriter
from steerpipe.server.draft_line import DraftLine
from steerpipe.server.events import ClientLeftError, EventStream
from steerpipe.server.exposition import CONTENT_TYPE, counter, expose, gauge
from steerpipe.server.faults import ApiError, json_response
from steerpipe.server.frontpage import add_page
from steerpipe.server.guard import Guard
from steerpipe.server.live import prediction_json
from steerpipe.server.metrics import engine_families, process_families
from steerpipe.server.openapi import describe
from steerpipe.server.outcomes import figures_json, usage_json
from steerpipe.server.properties import model_json, properties_json
from steerpipe.server.schema import (
    DetokenizeRequest,
    PredictionRequest,
    PrewarmRequest,
    TokenizeRequest,
    parse_chat,
    parse_completion,
    parse_plain,
)
from steerpipe.server.service import Service


def build_app(service: Service) -> FastAPI:
    app = FastAPI(title="steerpipe", version=__version__, docs_url=None, redoc_url=None)
    add_answer_routes(app, service)
    add_text_routes(app, service)
    add_state_routes(app, service)
    add_live_routes(app, service)
    add_draft_routes(app, service)
    add_page(app)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    app.add_middleware(Guard, service=service)
    if service.settings.cors_origins:  # outermost: a preflight brings no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


def add_answer_routes(app: FastAPI, service: Service) -> None:
    """Whatever makes the engine compute."""

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        return await _answer(http, service, parse_chat, Asker.chat, ChatWriter, "chatcmpl")

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await _answer(http, service, parse_completion, Asker.completion, CompletionWriter, "cmpl")

    @app.post("/v1/prewarm")
    async def prewarm(http: Request) -> Response:
        asker = service.asker
        body = parse_plain(await service.read_json(http), PrewarmRequest)
        service.check_model(body.model)
        asked = await service.tokenized(asker.prewarm, body, http.state.user)
        try:
            outcomes = await service.answering(asked).gather(http)
        except ClientLeftError:
            return Response(status_code=499)
        usage = usage_json(asked, outcomes)
        return json_response({**service.head("warm"), "object": "prewarm", "usage": usage, **figures_json(outcomes)})


async def _answer(
    http: Request,
    service: Service,
    parse: Callable[[Any], Any],
    ask: Callable[[Asker, Any, str], Asked],
    writer: Callable[..., Writer],
    prefix: str,
) -> Response:
    asker = service.asker
    body = parse(await service.read_json(http))
    service.check_model(body.model)
    asked = await service.tokenized(ask, asker, body, http.state.user)
    hidden = asker.facts.end_tokens | frozenset(asked.requests[0].settings.stop_token_ids)
    head = service.head(prefix) | {"system_fingerprint": f"steerpipe-{__version__}"}
    written = writer(asked, service.texts, hidden, head)  # first: nothing may fail once the engine has the request
    return await service.answering(asked).respond(http, written)


def add_text_routes(app: FastAPI, service: Service) -> None:
    """Text to tokens and back."""

    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        asker = service.asker
        body = parse_plain(await service.read_json(http), TokenizeRequest)
        service.check_model(body.model)
        if (body.messages is None) == (body.prompt is None):
            raise ApiError(400, "send either prompt or messages", param="prompt")
        if body.messages is not None:
            ids = await service.tokenized(asker.render, body.messages)
        else:
            special = body.add_special_tokens
            ids = await service.tokenized(lambda: asker.encode(body.prompt or "", add_special=special))
        return json_response({"tokens": list(ids), "count": len(ids), "max_model_len": asker.facts.max_context})

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        asker = service.asker
        body = parse_plain(await service.read_json(http), DetokenizeRequest)
        service.check_model(body.model)
        strange = next((token for token in body.tokens if token >= asker.facts.vocab), None)
        if strange is not None:
            raise ApiError(400, f"token id {strange} is not in the vocabulary of {asker.facts.vocab}", param="tokens")
        return json_response({"prompt": await service.tokenized(asker.codec.decode, body.tokens)})


def add_state_routes(app: FastAPI, service: Service) -> None:
    """What the server is and does."""

    @app.get("/health")
    async def health() -> Response:
        service.asker  # noqa: B018  raises while there is no model
        return json_response({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_json(service)]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        service.check_model(model)
        return json_response(model_json(service))

    @app.get("/props")
    async def properties() -> Response:
        return json_response(properties_json(service))

    @app.get("/metrics")
    async def metrics() -> Response:
        observed, facts = await service.link.observe(), service.link.facts
        families = [*service.metrics.families()]
        families.append(counter("steerpipe_engine_restarts_total", "Engines that died.", service.link.restarts))
        families.append(gauge("steerpipe_engine_unsent", "Messages that wait to be sent to it.", service.link.unsent))
        if observed is not None and facts is not None:
            families += engine_families(observed, facts)
        families += process_families({"server": os.getpid(), "engine": service.link.process_id})
        return Response(expose(families), media_type=CONTENT_TYPE)


def add_live_routes(app: FastAPI, service: Service) -> None:
    """What somebody who looks on wants."""

    @app.get("/live", include_in_schema=False)
    async def live() -> Response:
        return EventStream(service.gallery.enter(), lambda: None)

    @app.get("/prediction")
    async def prediction() -> Response:
        service.asker  # noqa: B018  raises while there is no model
        return json_response(prediction_json(await service.link.observe()))

    @app.post("/prediction")
    async def switch(http: Request) -> Response:
        service.asker  # noqa: B018  raises while there is no model
        body = parse_plain(await service.read_json(http), PredictionRequest)
        service.link.switch_prediction(body.on)
        return json_response(prediction_json(await service.link.observe()))


def add_draft_routes(app: FastAPI, service: Service) -> None:
    """Where typing enters."""

    @app.websocket("/v1/drafts")
    async def drafts(socket: WebSocket) -> None:
        if not service.settings.drafts:
            refused = ApiError(403, "drafts are switched off here; send the message when it is complete")
            await socket.send_denial_response(refused.response())
            return
        await DraftLine(socket, service).run()


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for ApiError"
    return error.response()


async def _http_error(_: Request, error: Exception) -> Response:
    """Of the router: no such path, or not with this method."""
    assert isinstance(error, HTTPException), "registered for HTTPException"
    return ApiError(error.status_code, str(error.detail)).response()
