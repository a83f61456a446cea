"""The HTTP application: every route, on any engine client."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lexshard.actors.faults import listen_for_faults
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.admission import Admission
from lexshard.serve_app.api_processes.accounts import SharedAccounts
from lexshard.serve_app.api_processes.seats import Seats
from lexshard.serve_app.authentication import ApiKeys
from lexshard.serve_app.body_room import BodyRoom
from lexshard.serve_app.engine_client import EngineClient
from lexshard.serve_app.middleware import RECORD_KEY, REQUEST_ID_HEADER, RequestMiddleware
from lexshard.serve_app.observability.server_metrics import CONTENT_TYPE, ServerMetrics
from lexshard.serve_app.openai.chat import create_chat_completion
from lexshard.serve_app.openai.completions import create_completion
from lexshard.serve_app.openai.errors import ApiError, model_not_found
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.openai.tokenizer_routes import detokenize, tokenize
from lexshard.serve_app.request_body import read_json
from lexshard.serve_app.request_record import TRACEPARENT, RequestRecord
from lexshard.serve_app.server_state import VERSION, ServerState

if TYPE_CHECKING:
    from lexshard.serve_app.observability.tracing import Tracing

PATHS = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/status",
    "/health",
    "/metrics",
    "/version",
    "/openapi.json",
    "/docs",
)
Handler = Callable[[Request], Awaitable[ASGIApp]]


@dataclass(frozen=True, slots=True)
class Replica:
    """What an application knows of being one of several: its name among them, and how to ask what
    all of them tell of themselves."""

    name: str
    all_metrics: Callable[[], Awaitable[bytes]]


def create_app(
    config: ServeConfig,
    client: EngineClient,
    tokenizer: ModelTokenizer,
    seats: Seats | None = None,
    start_time: int | None = None,
    replica: Replica | None = None,
) -> FastAPI:
    """Routes, errors, authentication and middleware around one engine client.

    ``seats`` join it to the other API processes of the server that began at ``start_time`` (Unix
    seconds); without them it is a server of its own, that begins now. ``replica`` makes it one of
    several servers behind one address. The application stops the client when it shuts down; its
    ``state.server`` is what its routes share.
    """
    accounts = None
    if seats is not None and config.api_processes > 1:
        accounts = SharedAccounts(seats, config.max_running_requests)
    admission = Admission(
        config.max_running_requests,
        config.max_waiting_tokens,
        config.max_requests_per_client,
        accounts,
    )
    listen_for_faults()
    name = platform.node() if replica is None else replica.name
    origin = {"model": config.model_names[0], "replica": name}
    metrics = ServerMetrics(
        client, admission, PATHS, seats, **origin, peer_names=config.vllm_metrics
    )
    tracing = None
    if config.otlp_traces_endpoint is not None:
        from lexshard.serve_app.observability.tracing import Tracing  # is in an extra

        tracing = Tracing(config.otlp_traces_endpoint, origin, VERSION, PATHS)
    created = int(time.time()) if start_time is None else start_time
    bodies = BodyRoom(config.max_body_bytes)
    state = ServerState(config, client, tokenizer, admission, bodies, metrics, created)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await client.stop()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(
        # `serve_app.description` makes both, and loads nothing from elsewhere.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # Those asked most come first: the router tries one after the other. They are plain routes,
        # for bodies are read and checked by `serve_app.openai` itself.
        routes=[*_guarded_routes(state, ApiKeys(config.api_keys)), *_open_routes(state, replica)],
        middleware=_middleware(config, metrics, tracing),
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


def _middleware(
    config: ServeConfig, metrics: ServerMetrics, tracing: Tracing | None
) -> list[Middleware]:
    around = Middleware(
        RequestMiddleware, metrics=metrics, tracing=tracing, root_path=config.root_path or ""
    )
    if not config.cors_origins:
        return [around]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("authorization", "content-type", REQUEST_ID_HEADER, TRACEPARENT),
        expose_headers=(REQUEST_ID_HEADER, TRACEPARENT, "retry-after"),
    )
    return [around, cors]


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path}"
        return ApiError(405, message, headers=dict(error.headers or {})).response()
    return ApiError(404, f"There is nothing at {request.url.path}").response()


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def _open_routes(state: ServerState, replica: Replica | None) -> list[Route]:
    """Routes that need no key: what machines ask about the server itself."""

    async def health(_: Request) -> Response:
        if state.client.ready:
            return _json({"status": "ok"})
        # No Retry-After says that waiting is in vain.
        retry = {"Retry-After": "2"} if state.client.failure is None else {}
        reason = f"not ready: {state.client.health_reason}"
        return ApiError(503, reason, headers=retry).response()

    async def metrics(_: Request) -> Response:
        text = state.metrics.text() if replica is None else await replica.all_metrics()
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def version(_: Request) -> Response:
        return _json({"version": VERSION})

    @cache
    def description() -> dict[str, Any]:
        # Takes a while, and is seldom asked for.
        from lexshard.serve_app.description.openapi import describe

        return describe(state.config, VERSION)

    async def openapi(_: Request) -> Response:
        return _json(await asyncio.to_thread(description))

    async def docs(_: Request) -> Response:
        from lexshard.serve_app.description.page import docs_page

        return HTMLResponse(await asyncio.to_thread(lambda: docs_page(description())))

    return [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/version", version),
        Route("/openapi.json", openapi),
        Route("/docs", docs),
    ]


def _guarded_routes(state: ServerState, keys: ApiKeys) -> list[Route]:
    """Routes whose handlers run only with a valid key."""

    async def body_of(request: Request) -> Any:
        return await read_json(request, state, _record(request).client)

    async def completions(request: Request) -> ASGIApp:
        body = await body_of(request)
        return await create_completion(state, request, body, _record(request))

    async def chat_completions(request: Request) -> ASGIApp:
        body = await body_of(request)
        return await create_chat_completion(state, request, body, _record(request))

    async def models(request: Request) -> Response:
        data = [_model_card(state, name) for name in state.config.model_names]
        return _json({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in state.config.model_names:
            raise model_not_found(name)
        return _json(_model_card(state, name))

    async def status(_: Request) -> Response:
        return _json(await state.report())

    async def tokenize_route(request: Request) -> Response:
        body = await body_of(request)
        return _json(await tokenize(state, request, body, _record(request)))

    async def detokenize_route(request: Request) -> Response:
        body = await body_of(request)
        return _json(await detokenize(state, request, body, _record(request)))

    async def tokenizer_info(request: Request) -> Response:
        limit = state.information().max_model_len
        return _json(state.tokenizer.information() | {"model_max_length": limit})

    def guarded(path: str, method: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> ASGIApp:
            owner = keys.check(request.headers.get("authorization"))
            if owner is not None:
                record = _record(request)
                record.client = record.cache_salt = owner.name
                record.lowest_priority = owner.lowest_priority
            return await handler(request)

        return Route(path, endpoint, methods=[method])

    return [
        guarded("/v1/completions", "POST", completions),
        guarded("/v1/chat/completions", "POST", chat_completions),
        guarded("/v1/models", "GET", models),
        guarded("/v1/models/{name:path}", "GET", model),
        guarded("/status", "GET", status),
        guarded("/tokenize", "POST", tokenize_route),
        guarded("/detokenize", "POST", detokenize_route),
        guarded("/tokenizer_info", "GET", tokenizer_info),
    ]


def _record(request: Request) -> RequestRecord:
    record: RequestRecord = request.scope[RECORD_KEY]
    return record


def _model_card(state: ServerState, name: str) -> dict[str, Any]:
    ready = state.client.ready
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "lexshard",
        "root": state.config.model_names[0],
        "parent": None,
        "max_model_len": state.client.information.max_model_len if ready else None,
    }
