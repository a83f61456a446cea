"""The server's API in OpenAPI's words, made of the models that requests are checked by."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lexshard.serve_app.description import replies
from lexshard.serve_app.description import translated_replies as translated
from lexshard.serve_app.description.fields import MEANINGS, TRANSLATED_MEANINGS
from lexshard.serve_app.messages_api.errors import (
    API_KEY_HEADER,
    COUNT_TOKENS,
    MESSAGES,
    OVERLOADED,
)
from lexshard.serve_app.messages_api.protocol import CountTokensRequest, MessagesRequest
from lexshard.serve_app.openai import protocol
from lexshard.serve_app.openai.chat_fields import ChatCompletionRequest, TokenizeChatRequest
from lexshard.serve_app.receipts.verifying import VERIFY, VerifyRequest
from lexshard.serve_app.responses.protocol import ResponsesRequest
from lexshard.serve_app.scoring import pairs
from lexshard.serve_app.scoring.labels import GenerativeScoringRequest

REASONS = {
    400: "something in the request is wrong, or is not implemented: the message says what",
    401: "the API key is missing or wrong",
    404: "there is no such model, or response",
    408: "the body did not arrive in time",
    413: "the body is too large",
    429: "this client has too much open",
    500: "a failure; the server's log has it",
    503: "the server is full or not ready; `Retry-After` says when to try again",
    OVERLOADED: "the server is full or not ready; `Retry-After` says when to try again",
}
# Of every route that takes a body.
ASKED = (400, 404, 408, 413, 429, 500)
SCHEMAS = "#/components/schemas/"
SECURITY, OWN_SECURITY = "API key", "API key of Messages"
TEXT = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Operation:
    """``reply`` None is plain text. ``requests`` are the bodies it takes, ``errors`` the statuses
    of its failures, besides those of a wrong key and of bodies, in the shape of ``error``, and
    ``chunk`` what events of a stream hold, which ends with ``[DONE]`` unless it ``ends_by_type``.
    """

    path: str
    summary: str
    reply: type[BaseModel] | None
    requests: tuple[type[BaseModel], ...] = ()
    chunk: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()
    guarded: bool = True
    method: str = ""  # post where it takes a body, else get
    error: type[BaseModel] = replies.ErrorReply
    ends_by_type: bool = False
    query: tuple[str, ...] = ()

    @property
    def statuses(self) -> set[int]:
        """Of its failures, but for a wrong key."""
        full = OVERLOADED if self.error is translated.MessagesErrorReply else 503
        return {*self.errors, *((*ASKED, full) if self.requests else ())}


RESPONSE = "/v1/responses/{response_id}"
OPERATIONS = (
    Operation(
        "/v1/completions",
        "Continues prompts",
        replies.CompletionReply,
        (protocol.CompletionRequest,),
        replies.CompletionChunk,
    ),
    Operation(
        "/v1/chat/completions",
        "Answers a conversation",
        replies.ChatReply,
        (ChatCompletionRequest,),
        replies.ChatChunk,
    ),
    Operation(
        "/v1/responses",
        "Answers a conversation, in OpenAI's newer protocol",
        translated.ResponsesReply,
        (ResponsesRequest,),
        translated.ResponsesEvent,
        ends_by_type=True,
    ),
    Operation(
        RESPONSE,
        "A response that was kept",
        translated.ResponsesReply,
        errors=(400, 404, 503),
        query=("stream",),
    ),
    Operation(
        RESPONSE,
        "Forgets a response",
        translated.DeletedReply,
        errors=(400, 404, 503),
        method="delete",
    ),
    Operation(
        f"{RESPONSE}/input_items",
        "The items of its request",
        translated.ItemsReply,
        errors=(400, 404, 503),
        query=("order", "after", "limit"),
    ),
    Operation(
        MESSAGES,
        "Answers a conversation, in Anthropic's protocol",
        translated.MessagesReply,
        (MessagesRequest,),
        translated.MessagesEvent,
        error=translated.MessagesErrorReply,
        ends_by_type=True,
    ),
    Operation(
        COUNT_TOKENS,
        "How many tokens such a conversation has",
        translated.TokenCountReply,
        (CountTokensRequest,),
        error=translated.MessagesErrorReply,
    ),
    Operation("/v1/models", "The names the model is served under", replies.ModelsReply),
    Operation("/v1/models/{name}", "One of them", replies.ModelReply, errors=(404,)),
    Operation(
        "/tokenize",
        "The token ids of a text or a conversation",
        replies.TokenizeReply,
        (protocol.TokenizeTextRequest, TokenizeChatRequest),
    ),
    Operation(
        "/detokenize",
        "The text of token ids",
        replies.DetokenizeReply,
        (protocol.DetokenizeRequest,),
    ),
    Operation(
        "/generative_scoring",
        "How likely the first label is as the next token, after each item",
        replies.ScoresReply,
        (GenerativeScoringRequest,),
    ),
    Operation(
        VERIFY,
        "Makes replies again from their receipts: are they what these say?",
        replies.VerdictsReply,
        (VerifyRequest,),
        replies.ReplayEvent,
    ),
    *(
        Operation(
            path,
            "How well documents fit queries, each or all the one",
            replies.ScoresReply,
            (pairs.ScoreTextsRequest, pairs.ScoreQueriesRequest),
        )
        for path in pairs.SCORE_PATHS
    ),
    *(
        Operation(
            path,
            "The documents that fit a query, the best first",
            replies.RerankReply,
            (pairs.RerankRequest,),
        )
        for path in pairs.RERANK_PATHS
    ),
    Operation("/tokenizer_info", "The tokenizer", replies.TokenizerReply, errors=(503,)),
    Operation(
        "/v1/edge", "What a device that drafts must know", replies.EdgeReply, errors=(404, 503)
    ),
    Operation("/status", "Who does what, and how busy all are", replies.StatusReply),
    Operation(
        "/health", "Whether requests are taken", replies.HealthReply, errors=(503,), guarded=False
    ),
    *(
        Operation(
            "/ping", "The same, as SageMaker asks", None, errors=(503,), guarded=False, method=each
        )
        for each in ("get", "post")
    ),
    Operation("/load", "How many sequences are open", replies.LoadReply, guarded=False),
    Operation(
        "/server_info",
        "What the engine decided, in vLLM's shape",
        replies.ServerInfoReply,
        errors=(503,),
    ),
    Operation("/metrics", "Metrics in Prometheus' text format", None, guarded=False),
    Operation("/version", "lexshard's version", replies.VersionReply, guarded=False),
)


@lru_cache(maxsize=1)
def describe(
    root_path: str | None, has_keys: bool, version: str, scores_pairs: bool
) -> dict[str, Any]:
    """What ``/openapi.json`` tells of a server at ``root_path``."""
    absent = () if scores_pairs else (*pairs.SCORE_PATHS, *pairs.RERANK_PATHS)
    operations = [each for each in OPERATIONS if each.path not in absent]
    requests = list(dict.fromkeys(model for each in operations for model in each.requests))
    answers = list(dict.fromkeys(each.error for each in operations))
    answers += [model for each in operations for model in (each.reply, each.chunk) if model]
    _, schemas = models_json_schema(
        [(model, "validation") for model in requests]
        + [(model, "serialization") for model in answers],
        ref_template=SCHEMAS + "{model}",
    )
    for model in requests:
        schema = schemas["$defs"][model.__name__]
        schema["properties"] = {
            name: schema["properties"][name] | {"description": meaning}
            for name, meaning in meanings_of(model).items()
            if name in model.model_fields
        }
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "lexshard", "version": version},
        "servers": [{"url": root_path or "/"}],
        "paths": {
            path: {
                _method(each): _operation(each, has_keys)
                for each in operations
                if each.path == path
            }
            for path in dict.fromkeys(each.path for each in operations)
        },
        "components": {"schemas": schemas["$defs"]},
    }
    if has_keys:
        description["components"]["securitySchemes"] = {
            SECURITY: {"type": "http", "scheme": "bearer"},
            OWN_SECURITY: {"type": "apiKey", "in": "header", "name": API_KEY_HEADER},
        }
    return description


def meanings_of(model: type[BaseModel]) -> dict[str, str]:
    """What the fields of a request mean, in the order in which they are told."""
    own = TRANSLATED_MEANINGS.get(model.__name__, {})
    return own | {name: meaning for name, meaning in MEANINGS.items() if name not in own}


def _method(operation: Operation) -> str:
    return operation.method or ("post" if operation.requests else "get")


def _operation(operation: Operation, has_keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if operation.reply is not None:
        content = _json(operation.reply)
    if operation.chunk is not None:
        content["text/event-stream"] = {"itemSchema": _event(operation)}
    told: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer", "content": content}},
    }
    errors = operation.statuses
    if has_keys and operation.guarded:
        errors.add(401)
        told["security"] = [{SECURITY: []}]
        if operation.error is translated.MessagesErrorReply:
            told["security"].append({OWN_SECURITY: []})  # either of both
    for status in sorted(errors):
        error = {"description": REASONS[status], "content": _json(operation.error)}
        told["responses"][str(status)] = error
    if operation.requests:
        told["requestBody"] = {"required": True, "content": _json(*operation.requests)}
    names = re.findall(r"{(\w+)}", operation.path)
    if parameters := [
        *({"name": name, "in": "path", "required": True, "schema": TEXT} for name in names),
        *({"name": name, "in": "query", "schema": TEXT} for name in operation.query),
    ]:
        told["parameters"] = parameters
    return told


def _event(operation: Operation) -> dict[str, Any]:
    """One of a stream: a chunk, or the failure that ends it, or that nothing follows."""
    assert operation.chunk is not None
    errors = () if operation.ends_by_type else (operation.error,)
    held = {
        "contentMediaType": "application/json",
        "contentSchema": _any(operation.chunk, *errors),
    }
    data: dict[str, Any] = {"type": "string", **held}
    if not operation.ends_by_type:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _json(*models: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _any(*models)}}


def _any(*models: type[BaseModel]) -> dict[str, Any]:
    references = [{"$ref": SCHEMAS + model.__name__} for model in models]
    return references[0] if len(references) == 1 else {"anyOf": references}
