"""Every way a request can fail, in the shape OpenAI's clients expect."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A failure a client is told about; ``parameter`` names the offending request field."""

    def __init__(
        self,
        status: int,
        message: str,
        parameter: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": ERROR_TYPES[self.status],
                "param": self.parameter,
                "code": self.status,
            }
        }

    def response(self) -> Response:
        return Response(
            orjson.dumps(self.body()),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


class ClientDisconnectedError(Exception):
    """The client is gone: there is nobody left to answer."""


def shortened(text: str) -> str:
    """What a client wrote, as much of it as a message should repeat."""
    return text if len(text) <= 200 else text[:200] + "..."


def bad_request(message: str, parameter: str | None = None) -> ApiError:
    return ApiError(400, message, parameter)


def not_implemented(parameter: str) -> ApiError:
    return ApiError(400, f"'{parameter}' is not implemented by this server", parameter)


def model_not_found(name: str) -> ApiError:
    return ApiError(404, f"The model '{shortened(name)}' does not exist", "model")


def unauthorized() -> ApiError:
    return ApiError(
        401,
        "Missing or wrong API key: send 'Authorization: Bearer KEY'",
        headers={"WWW-Authenticate": "Bearer"},
    )


def overloaded(message: str, retry_after_seconds: int = 1) -> ApiError:
    return ApiError(503, message, headers={"Retry-After": str(retry_after_seconds)})


def rate_limited(message: str, retry_after_seconds: int = 1) -> ApiError:
    return ApiError(429, message, headers={"Retry-After": str(retry_after_seconds)})


def internal_error(request_id: str) -> ApiError:
    return ApiError(500, f"Internal error; the server's log has it under request {request_id}")
