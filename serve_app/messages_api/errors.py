"""Errors as Anthropic's API tells them, on the paths of its protocol alone."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from lexshard.serve_app.openai.errors import ApiError, json_response

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
API_KEY_HEADER = "x-api-key"
OVERLOADED = 529
# Anthropic's own clients ask for `thread` unasked, and ask again without it where they read this.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
# Where the protocol has a status of its own.
STATUSES = {503: OVERLOADED}


def is_messages_path(path: str) -> bool:
    return path in (MESSAGES, COUNT_TOKENS)


def messages_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """The body of an error."""
    told: dict[str, Any] = {"type": TYPES[error.status], "message": error.message}
    if error.parameter == "thread":
        told["details"] = NO_THREADS
    return {"type": "error", "error": told, "request_id": request_id}


def error_response(error: ApiError, path: str, request_id: str) -> Response:
    """An error as the protocol of ``path`` tells it."""
    if not is_messages_path(path):
        return error.response()
    status = STATUSES.get(error.status, error.status)
    return json_response(messages_error(error, request_id), status, error.headers)
