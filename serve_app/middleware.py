"""What happens around every request: its id, its log line, its count, and its last-resort error."""

from __future__ import annotations

import logging
import re
import uuid
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lexshard.cluster.process_tree import die_with_parent
from lexshard.serve_app.api_processes.direct_ingress import DirectIngress, application_here
from lexshard.serve_app.messages_api.errors import error_response, is_messages_path
from lexshard.serve_app.observability.server_metrics import ServerMetrics
from lexshard.serve_app.openai.errors import ClientDisconnectedError, internal_error
from lexshard.serve_app.request_record import TRACEPARENT, RequestRecord

if TYPE_CHECKING:
    from lexshard.serve_app.observability.tracing import Tracing

logger = logging.getLogger("lexshard.http")

REQUEST_ID_HEADER = "x-request-id"
MESSAGES_REQUEST_ID = "request-id"  # where clients of Anthropic's look
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Ray Serve lets any client switch off disconnect handling and set timeouts with these.
RAY_CONTROL_HEADERS = (b"x-request-disconnect-disabled", b"x-request-timeout-seconds")
CLIENT_CLOSED_REQUEST = 499
RECORD_KEY = "lexshard.record"


def acceptable_request_id(value: str | None) -> bool:
    return value is not None and REQUEST_ID.fullmatch(value) is not None


class RequestMiddleware:
    """Gives each request a record (``scope[RECORD_KEY]``) and an ``x-request-id``, those of the
    Messages protocol under its own name, too; with ``tracing`` a place in a trace, which the
    response's ``traceparent`` names.

    Exceptions become a 500 without internals. ``root_path`` may stand before every path; it is no
    part of what paths are counted and logged as.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        tracing: Tracing | None = None,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._tracing = tracing
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path  # routes answer with it, and without it
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID_HEADER)
        client = scope.get("client")
        record = RequestRecord(
            request_id=given if given and acceptable_request_id(given) else uuid.uuid4().hex,
            method=scope["method"],
            path=self._path(scope["path"]),
            client=client[0] if client else "",
        )
        scope[RECORD_KEY] = record
        if self._tracing is not None:
            self._tracing.begin(record, headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                told = MutableHeaders(scope=message)
                told[REQUEST_ID_HEADER] = record.request_id
                if is_messages_path(record.path):
                    told[MESSAGES_REQUEST_ID] = record.request_id
                if record.traceparent is not None:
                    told[TRACEPARENT] = record.traceparent
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnectedError:
            record.status = CLIENT_CLOSED_REQUEST
        except Exception:
            logger.exception(
                "id=%s failed",
                record.request_id,
                extra={"fields": {"request_id": record.request_id}},
            )
            if record.status:  # a response has begun and cannot be taken back
                raise
            failure = internal_error(record.request_id)
            response = error_response(failure, record.path, record.request_id)
            await response(scope, receive, send_with_id)
        finally:
            self._finish(record)

    def _finish(self, record: RequestRecord) -> None:
        record.status = record.status or CLIENT_CLOSED_REQUEST
        self._metrics.observe(record)
        if self._tracing is not None:
            self._tracing.end(record)
        log_request(record)

    def _path(self, path: str) -> str:
        """The server's own name of ``path``, which a reverse proxy may have left as it came."""
        root = self._root_path
        return path[len(root) :] if root and path.startswith(f"{root}/") else path


def log_request(record: RequestRecord) -> None:
    """Writes the line of one that has been answered."""
    first = record.seconds_to_first_token
    level = logging.DEBUG if record.path in ("/health", "/metrics", "/status") else logging.INFO
    if not logger.isEnabledFor(level):
        return
    logger.log(
        level,
        "id=%s %s %s status=%d prompt=%d completion=%d ttft=%s duration=%.3fs",
        record.request_id,
        record.method,
        record.path[:200].encode("unicode_escape").decode(),
        record.status,
        record.prompt_tokens,
        record.completion_tokens,
        "-" if first is None else f"{first:.3f}s",
        record.seconds,
        extra={"fields": _fields(record)},
    )


def _fields(record: RequestRecord) -> dict[str, Any]:
    """What a program reads in the log line of a request."""
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path[:200],
        "status": record.status,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "ttft_seconds": record.seconds_to_first_token,
        "seconds": record.seconds,
    }
    if record.traceparent is not None:
        _, fields["trace_id"], fields["span_id"], _ = record.traceparent.split("-")
    return fields


class ProxyHeaders:
    """Runs in Ray Serve's HTTP proxy, before Serve reads anything.

    Drops the headers by which clients could steer Serve and request ids that are none, and sends
    one ``x-request-id`` where proxy and application each add theirs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["headers"] = [
            (name, value)
            for name, value in scope["headers"]
            if name not in RAY_CONTROL_HEADERS
            and (
                name != REQUEST_ID_HEADER.encode() or acceptable_request_id(value.decode("latin-1"))
            )
        ]

        async def send_one_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if REQUEST_ID_HEADER in headers:
                    headers[REQUEST_ID_HEADER] = headers[REQUEST_ID_HEADER]
            await send(message)

        await self._app(scope, receive, send_one_id)


def ingress_middlewares() -> list[Middleware]:
    """What stands before Ray Serve wherever it takes requests
    (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``): in a replica, which HAProxy asks, or in Serve's
    own proxy, a process that is to end with Ray's."""
    die_with_parent()
    application = application_here()
    if application is None:
        return [Middleware(ProxyHeaders)]
    return [Middleware(DirectIngress, application=application)]
