"""The server's API in OpenAPI's words, made of the models that requests are checked by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lexshard.serve_app.description import replies
from lexshard.serve_app.description.fields import MEANINGS
from lexshard.serve_app.openai import protocol

REASONS = {
    400: "something in the request is wrong, or is not implemented: the message says what",
    401: "the API key is missing or wrong",
    404: "there is no such model",
    408: "the body did not arrive in time",
    413: "the body is too large",
    429: "this client has too much open",
    500: "a failure; the server's log has it",
    503: "the server is full or not ready; `Retry-After` says when to try again",
}
ASKED = (400, 404, 408, 413, 429, 500, 503)
SCHEMAS = "#/components/schemas/"
SECURITY = "API key"


@dataclass(frozen=True, slots=True)
class Operation:
    """``reply`` None is plain text. ``requests`` are the bodies it takes, ``errors`` the statuses
    of its failures, besides those of a wrong key, and ``chunk`` what events of a stream hold."""

    path: str
    summary: str
    reply: type[BaseModel] | None
    requests: tuple[type[BaseModel], ...] = ()
    errors: tuple[int, ...] = ()
    chunk: type[BaseModel] | None = None
    guarded: bool = True


OPERATIONS = (
    Operation(
        "/v1/completions",
        "Continues prompts",
        replies.CompletionReply,
        (protocol.CompletionRequest,),
        ASKED,
        replies.CompletionChunk,
    ),
    Operation(
        "/v1/chat/completions",
        "Answers a conversation",
        replies.ChatReply,
        (protocol.ChatCompletionRequest,),
        ASKED,
        replies.ChatChunk,
    ),
    Operation("/v1/models", "The names the model is served under", replies.ModelsReply),
    Operation("/v1/models/{name}", "One of them", replies.ModelReply, errors=(404,)),
    Operation(
        "/tokenize",
        "The token ids of a text or a conversation",
        replies.TokenizeReply,
        (protocol.TokenizeTextRequest, protocol.TokenizeChatRequest),
        ASKED,
    ),
    Operation(
        "/detokenize",
        "The text of token ids",
        replies.DetokenizeReply,
        (protocol.DetokenizeRequest,),
        ASKED,
    ),
    Operation("/tokenizer_info", "The tokenizer", replies.TokenizerReply, errors=(503,)),
    Operation(
        "/v1/edge", "What a device that drafts must know", replies.EdgeReply, errors=(404, 503)
    ),
    Operation("/status", "Who does what, and how busy all are", replies.StatusReply),
    Operation(
        "/health",
        "Whether requests are taken",
        replies.HealthReply,
        errors=(503,),
        guarded=False,
    ),
    Operation("/metrics", "Metrics in Prometheus' text format", None, guarded=False),
    Operation("/version", "lexshard's version", replies.VersionReply, guarded=False),
)


@lru_cache(maxsize=1)
def describe(root_path: str | None, has_keys: bool, version: str) -> dict[str, Any]:
    """What ``/openapi.json`` tells of a server at ``root_path``."""
    requests = [model for each in OPERATIONS for model in each.requests]
    answers: list[type[BaseModel]] = [replies.ErrorReply]
    answers += [model for each in OPERATIONS for model in (each.reply, each.chunk) if model]
    _, schemas = models_json_schema(
        [(model, "validation") for model in requests]
        + [(model, "serialization") for model in answers],
        ref_template=SCHEMAS + "{model}",
    )
    for model in requests:
        schema = schemas["$defs"][model.__name__]
        schema["properties"] = {
            name: schema["properties"][name] | {"description": meaning}
            for name, meaning in MEANINGS.items()
            if name in model.model_fields
        }
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "lexshard", "version": version},
        "servers": [{"url": root_path or "/"}],
        "paths": {each.path: _path(each, has_keys) for each in OPERATIONS},
        "components": {"schemas": schemas["$defs"]},
    }
    if has_keys:
        bearer = {"type": "http", "scheme": "bearer"}
        description["components"]["securitySchemes"] = {SECURITY: bearer}
    return description


def _path(operation: Operation, has_keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if operation.reply is not None:
        content = _json(operation.reply)
    if operation.chunk is not None:
        content["text/event-stream"] = {"itemSchema": _event(operation.chunk)}
    told: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer", "content": content}},
    }
    errors = {*operation.errors}
    if has_keys and operation.guarded:
        errors.add(401)
        told["security"] = [{SECURITY: []}]
    for status in sorted(errors):
        error = {"description": REASONS[status], "content": _json(replies.ErrorReply)}
        told["responses"][str(status)] = error
    if operation.requests:
        told["requestBody"] = {"required": True, "content": _json(*operation.requests)}
    if "{name}" in operation.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        told["parameters"] = [name]
    return {"post" if operation.requests else "get": told}


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """One of a stream: a chunk, or the failure that ends it, or that nothing follows."""
    held = {
        "contentMediaType": "application/json",
        "contentSchema": _any(chunk, replies.ErrorReply),
    }
    data = {"anyOf": [{"const": "[DONE]"}, {"type": "string", **held}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _json(*models: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _any(*models)}}


def _any(*models: type[BaseModel]) -> dict[str, Any]:
    references = [{"$ref": SCHEMAS + model.__name__} for model in models]
    return references[0] if len(references) == 1 else {"anyOf": references}
