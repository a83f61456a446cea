"""The HTTP application: every route, on any engine client."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp

from lexshard.actors.faults import listen_for_faults
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.admission import Admission
from lexshard.serve_app.api_processes.accounts import SharedAccounts
from lexshard.serve_app.api_processes.seats import Seats
from lexshard.serve_app.authentication import ApiKeys
from lexshard.serve_app.body_room import BodyRoom
from lexshard.serve_app.edge.endpoint import EdgeEndpoint
from lexshard.serve_app.edge.wire import PATH as EDGE
from lexshard.serve_app.engine_client import EngineClient
from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.messages_api.errors import (
    API_KEY_HEADER,
    COUNT_TOKENS,
    MESSAGES,
    error_response,
    is_messages_path,
)
from lexshard.serve_app.messages_api.routes import count_tokens, create_message
from lexshard.serve_app.middleware import (
    MESSAGES_REQUEST_ID,
    RECORD_KEY,
    REQUEST_ID_HEADER,
    RequestMiddleware,
)
from lexshard.serve_app.observability.server_metrics import CONTENT_TYPE, ServerMetrics
from lexshard.serve_app.openai.chat import create_chat_completion
from lexshard.serve_app.openai.completions import create_completion
from lexshard.serve_app.openai.errors import ApiError, json_response
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.openai.tokenizer_routes import detokenize, tokenize
from lexshard.serve_app.peer_routes import absent, load, server_info
from lexshard.serve_app.playground.page import page, page_file
from lexshard.serve_app.playground.processes import about, kill
from lexshard.serve_app.receipts.verifying import VERIFY, verify_receipts
from lexshard.serve_app.request_record import TRACEPARENT, RequestRecord
from lexshard.serve_app.responses.routes import (
    RESPONSE,
    create_response,
    kept_response,
    list_input_items,
)
from lexshard.serve_app.responses.store import ResponseStore
from lexshard.serve_app.scoring.labels import create_generative_scoring
from lexshard.serve_app.scoring.pairs import (
    RERANK_PATHS,
    SCORE_PATHS,
    create_rerank,
    create_score,
)
from lexshard.serve_app.server_state import VERSION, Replica, ServerState

if TYPE_CHECKING:
    from lexshard.serve_app.observability.tracing import Tracing


async def _health(state: ServerState, _: Request) -> Response:
    if state.client.ready:
        return json_response({"status": "ok"})
    # No Retry-After says that waiting is in vain.
    retry = {"Retry-After": "2"} if state.client.failure is None else {}
    return ApiError(503, f"not ready: {state.client.health_reason}", headers=retry).response()


async def _ping(state: ServerState, request: Request) -> Response:
    """Empty where all is well, as SageMaker asks."""
    health = await _health(state, request)
    return Response(media_type="text/plain") if health.status_code == 200 else health


async def _metrics(state: ServerState, _: Request) -> Response:
    replica = state.replica
    text = state.metrics.text() if replica is None else await replica.all_metrics()
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


async def _version(_: ServerState, __: Request) -> Response:
    return json_response({"version": VERSION})


async def _openapi(state: ServerState, _: Request) -> Response:
    return json_response(await asyncio.to_thread(_description, state))


async def _docs(state: ServerState, _: Request) -> Response:
    from lexshard.serve_app.description.page import docs_page

    return HTMLResponse(await asyncio.to_thread(lambda: docs_page(_description(state))))


def _description(state: ServerState) -> dict[str, Any]:
    # Takes a while, and is seldom asked for.
    from lexshard.serve_app.description.openapi import describe

    config = state.config
    return describe(config.root_path, bool(config.api_keys), VERSION, state.pairs is not None)


async def _models(state: ServerState, _: Request) -> Response:
    data = [_model_card(state, name) for name in state.config.model_names]
    return json_response({"object": "list", "data": data})


async def _model(state: ServerState, request: Request) -> Response:
    return json_response(_model_card(state, state.model_name(request.path_params["name"])))


async def _status(state: ServerState, _: Request) -> Response:
    return json_response(await state.report())


async def _tokenizer_info(state: ServerState, _: Request) -> Response:
    limit = state.information().max_model_len
    return json_response(state.tokenizer.information() | {"model_max_length": limit})


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


# What takes a body. Those asked most come first: the router tries one after the other.
POSTS = {
    "/v1/completions": create_completion,
    "/v1/chat/completions": create_chat_completion,
    "/v1/responses": create_response,
    MESSAGES: create_message,
    COUNT_TOKENS: count_tokens,
    "/generative_scoring": create_generative_scoring,
    VERIFY: verify_receipts,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}
# Where the operator says how pairs are scored.
PAIR_POSTS = {
    **dict.fromkeys(SCORE_PATHS, create_score),
    **dict.fromkeys(RERANK_PATHS, create_rerank),
}
GUARDED_GETS = {
    "/v1/models": _models,
    "/v1/models/{name:path}": _model,
    RESPONSE: kept_response,
    f"{RESPONSE}/input_items": list_input_items,
    "/status": _status,
    "/tokenizer_info": _tokenizer_info,
    "/server_info": server_info,
}
# What machines ask about the server itself, without a key.
OPEN_GETS = {
    "/health": _health,
    "/ping": _ping,
    "/load": load,
    "/metrics": _metrics,
    "/version": _version,
    "/openapi.json": _openapi,
    "/docs": _docs,
}
# What these paths take beside GET.
OTHER_METHODS = {RESPONSE: ("DELETE",), "/ping": ("POST",)}
ALL_PATHS = (*POSTS, *PAIR_POSTS, *GUARDED_GETS, *OPEN_GETS, EDGE, "/")
PATHS = tuple(path for path in ALL_PATHS if "{" not in path)
# The page at / and what it alone asks, where the operator has not left it out.
PAGE_FILES = {"/": page, "/playground/{name}": page_file}
PAGE_ABOUT = "/playground/about"
PAGE_KILL = "/playground/kill"
PostHandler = Callable[[HttpCall], Awaitable[ASGIApp]]
GetHandler = Callable[[ServerState, Request], Awaitable[ASGIApp]]


def _routes(state: ServerState) -> list[BaseRoute]:
    """They are plain routes, for bodies are read and checked by `serve_app.openai` itself."""
    keys = ApiKeys(state.config.api_keys)

    def authenticated(request: Request) -> RequestRecord:
        """Raises:
        ApiError: 401 for a request without a valid key.
        """
        record: RequestRecord = request.scope[RECORD_KEY]
        record.is_of(keys.check(_authorization(request)))
        return record

    def post(path: str, handler: PostHandler) -> Route:
        async def endpoint(request: Request) -> ASGIApp:
            return await handler(HttpCall(state, request, authenticated(request)))

        return Route(path, endpoint, methods=["POST"])

    def get(path: str, handler: GetHandler, *, guarded: bool) -> Route:
        async def endpoint(request: Request) -> ASGIApp:
            if guarded:
                authenticated(request)
            return await handler(state, request)

        return Route(path, endpoint, methods=["GET", *OTHER_METHODS.get(path, ())])

    edge = EdgeEndpoint(state, keys)
    playground: list[BaseRoute] = []
    if state.config.has_playground:
        playground = [
            post(PAGE_KILL, kill),
            get(PAGE_ABOUT, about, guarded=True),
            *(get(*each, guarded=False) for each in PAGE_FILES.items()),
        ]
    return [
        *(post(*each) for each in POSTS.items()),
        *(post(*each) for each in PAIR_POSTS.items() if state.pairs is not None),
        *(get(*each, guarded=True) for each in GUARDED_GETS.items()),
        get(EDGE, edge.describe, guarded=True),
        WebSocketRoute(EDGE, edge.serve),
        *(get(*each, guarded=False) for each in OPEN_GETS.items()),
        *playground,
    ]


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
        client,
        admission,
        PATHS,
        seats,
        **origin,
        one_of_several=replica is not None,
        peer_names=config.vllm_metrics,
    )
    tracing = None
    if config.otlp_traces_endpoint is not None:
        from lexshard.serve_app.observability.tracing import Tracing  # is in an extra

        tracing = Tracing(config.otlp_traces_endpoint, origin, VERSION, PATHS)
    created = int(time.time()) if start_time is None else start_time
    bodies = BodyRoom(config.max_body_bytes)
    shared = None if replica is None else replica.responses
    responses = ResponseStore(None if seats is None else seats.folder, shared=shared)
    state = ServerState(
        config, client, tokenizer, admission, bodies, metrics, created, responses, replica
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await client.stop()
        state.grammars.close()
        await responses.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(
        # `serve_app.description` makes both, and loads nothing from elsewhere.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        routes=_routes(state),
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
        allow_methods=("GET", "POST", "DELETE"),
        # Every SDK sends some of its own, which change from version to version.
        allow_headers=("*",),
        expose_headers=(REQUEST_ID_HEADER, MESSAGES_REQUEST_ID, TRACEPARENT, "retry-after"),
    )
    return [around, cors]


def _authorization(request: Request) -> str | None:
    """Clients of the Messages protocol may send their key in a header of its own."""
    given = request.headers.get("authorization")
    key = request.headers.get(API_KEY_HEADER)
    if given is None and key is not None and is_messages_path(request.scope[RECORD_KEY].path):
        return f"Bearer {key}"
    return given


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    record: RequestRecord = request.scope[RECORD_KEY]
    return error_response(error, record.path, record.request_id)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    path = request.scope[RECORD_KEY].path
    told = ApiError(404, absent(path) or f"There is nothing at {request.url.path}")
    if error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path}"
        told = ApiError(405, message, headers=dict(error.headers or {}))
    return await _api_error(request, told)
