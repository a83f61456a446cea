"""Every way a request can fail, told as OpenAI's own server does: clients choose the exception they
raise, and whether they try again, by status, ``type``, ``code`` and some well-known sentences."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

_INVALID = "invalid_request_error"
# The type that goes with a status, and the code where nothing more can be told.
TYPES_AND_CODES = {
    400: (_INVALID, None),
    401: (_INVALID, "invalid_api_key"),
    403: (_INVALID, "permission_denied"),
    404: (_INVALID, "unknown_url"),
    405: (_INVALID, "method_not_supported"),
    408: ("timeout_error", "request_timeout"),
    413: (_INVALID, "request_too_large"),
    429: ("requests", "rate_limit_exceeded"),
    500: ("server_error", None),
    503: ("service_unavailable_error", None),
}


class ApiError(Exception):
    """A failure a client is told about; ``parameter`` names the offending request field, ``code``
    the kind of failure where its status says too little."""

    def __init__(
        self,
        status: int,
        message: str,
        parameter: str | None = None,
        headers: dict[str, str] | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.headers = headers or {}
        self.code = code

    def body(self) -> dict[str, Any]:
        kind, code = TYPES_AND_CODES[self.status]
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.parameter,
                "code": self.code or code,
            }
        }

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


class ClientDisconnectedError(Exception):
    """The client is gone: there is no one to answer."""


def shortened(text: str) -> str:
    """What a client wrote, as much of it as a message should repeat."""
    return text if len(text) <= 200 else text[:200] + "..."


def bad_request(message: str, parameter: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, parameter, code=code or (parameter and "invalid_value"))


def context_length_exceeded(context: int, reason: str, parameter: str) -> ApiError:
    """Clients fall back to a model of more context, or shorten, when they read this beginning or,
    in the sentence too, this code."""
    code = "context_length_exceeded"
    message = f"This model's maximum context length is {context} tokens. However, {reason} ({code})"
    return bad_request(message, parameter, code)


def unknown_parameter(parameter: str, end: str = "") -> ApiError:
    return bad_request(f"unknown field '{parameter}'{end}", parameter, "unknown_parameter")


def not_implemented(parameter: str) -> ApiError:
    return bad_request(
        f"'{parameter}' is not implemented by this server", parameter, "unsupported_parameter"
    )


def model_not_found(name: str) -> ApiError:
    message = f"The model '{shortened(name)}' does not exist"
    return ApiError(404, message, "model", code="model_not_found")


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "Incorrect API key provided, or none: send 'Authorization: Bearer KEY'",
        headers={"WWW-Authenticate": "Bearer"},
    )


def overloaded(message: str, retry_after_seconds: int = 1) -> ApiError:
    return ApiError(503, message, headers={"Retry-After": str(retry_after_seconds)})


def rate_limited(message: str, retry_after_seconds: int = 1) -> ApiError:
    return ApiError(429, message, headers={"Retry-After": str(retry_after_seconds)})


def internal_error(request_id: str) -> ApiError:
    return ApiError(500, f"Internal error; the server's log has it under request {request_id}")
