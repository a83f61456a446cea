"""``/v1/responses``: creating one, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.middleware import RECORD_KEY
from lexshard.serve_app.openai.chat import chat_reply
from lexshard.serve_app.openai.errors import (
    ApiError,
    bad_request,
    json_response,
    not_implemented,
    shortened,
)
from lexshard.serve_app.openai.prompts import BYTES_PER_MESSAGE, json_bytes
from lexshard.serve_app.over_chat.chat_body import ChatBody
from lexshard.serve_app.over_chat.reading import check_depth, in_own_terms, read_at
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.responses.items import kept_item
from lexshard.serve_app.responses.protocol import ResponsesRequest
from lexshard.serve_app.responses.store import PREVIOUS, StoredResponse
from lexshard.serve_app.responses.translation import OWN_NAMES, chat_body, input_items
from lexshard.serve_app.responses.writer import ResponsesWriter, beginning
from lexshard.serve_app.server_state import ServerState

RESPONSE = "/v1/responses/{response_id}"
MAX_LISTED, LISTED = 100, 20


@dataclass(frozen=True, slots=True)
class AskedResponse:
    """What there is of a request until it is answered: a decoded body is many times as large as its
    text. ``response`` is as it begins, ``items`` are those to keep, as JSON; None where it is not
    to be kept."""

    chat: ChatBody
    response: dict[str, Any]
    items: bytes | None
    stream: bool


async def create_response(call: HttpCall) -> ASGIApp:
    """Raises:
    ApiError: whatever is wrong with the request.
    """
    asked = await _asked(call)

    async def keep(response: dict[str, Any]) -> None:
        if asked.items is not None:
            await call.state.responses.put(call.record.cache_salt, response, asked.items)

    writer = partial(ResponsesWriter, asked.response, keep)
    try:
        return await chat_reply(call, asked.chat.fields, writer, stream=asked.stream)
    except ApiError as error:
        raise in_own_terms(error, OWN_NAMES, asked.chat) from error


async def _asked(call: HttpCall) -> AskedResponse:
    """Raises:
    ApiError: whatever is wrong with the request.
    """
    state = call.state

    def read(body: Any) -> tuple[ResponsesRequest, str, list[Any]]:
        check_depth(body)
        asked = read_at(ResponsesRequest, body)
        return asked, state.model_name(asked.model), input_items(asked)

    asked, model, items = await call.read(read)
    earlier = await _earlier(call, asked.previous_response_id)

    def translated() -> AskedResponse:
        reads = partial(state.tokenizer.reads, tools=bool(asked.tools))
        chat = chat_body(asked, earlier, reads)
        kept = None if asked.store is False else orjson.dumps([*map(kept_item, items)])
        return AskedResponse(chat, beginning(asked, model), kept, bool(asked.stream))

    size = (len(items) + len(earlier)) * BYTES_PER_MESSAGE
    return await call.run(size + json_bytes([*earlier, *items], "input"), translated)


async def _earlier(call: HttpCall, previous: str | None) -> list[dict[str, Any]]:
    """The items of the response ``previous`` and of those that it followed. They take the room of a
    body of their length, until they are read.

    Raises:
        ApiError: 400 where one of them is not kept, or where they hold more than a body may; 429
            and 503 where there is no room.
    """
    if previous is None:
        return []
    state, owner = call.state, call.record.cache_salt
    store, most = state.responses, state.config.max_body_bytes
    size = await store.chain_bytes(owner, previous)
    if size > most:
        told = f"'{PREVIOUS}': the responses before hold {size} bytes, more than {most}"
        raise bad_request(told, PREVIOUS)
    with state.bodies.body(call.record.client) as held:
        await held.announce(size)
        chain = await store.chain(owner, previous)
    return [item for each in chain for item in (*each.items, *each.response["output"])]


async def kept_response(state: ServerState, request: Request) -> Response:
    """A response that is kept, or, with the method DELETE, no longer.

    Raises:
        ApiError: 404 where it is not kept, or is another key's; 400 for what the query asks of it.
    """
    response_id = request.path_params["response_id"]
    _check_query(request, stream=("false", "0", ""))
    if request.method != "DELETE":
        return json_response((await _stored(state, request)).response)
    if not await state.responses.delete(_owner(request), response_id):
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(state: ServerState, request: Request) -> Response:
    """A page of the items of a response's own request; the last ones first, unless ``order`` says
    otherwise.

    Raises:
        ApiError: 404 where it is not kept, or is another key's; 400 for a page that there is not.
    """
    _check_query(request, order=None, after=None, limit=None)
    query = request.query_params
    items = (await _stored(state, request)).items
    order, after, limit = query.get("order", "desc"), query.get("after"), query.get("limit")
    if order not in ("asc", "desc"):
        raise bad_request("'order' must be asc or desc", "order")
    most = LISTED
    if limit is not None:
        most = int(limit) if limit.isdecimal() and len(limit) <= len(str(MAX_LISTED)) else 0
    if not 1 <= most <= MAX_LISTED:
        raise bad_request(f"'limit' must be from 1 to {MAX_LISTED}", "limit")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        begin = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if begin is None:
            raise bad_request("'after' must be the id of an item", "after")
        items = items[begin + 1 :]
    page = items[:most]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > most,
        }
    )


def _check_query(request: Request, **known: tuple[str, ...] | None) -> None:
    """Raises `ApiError` for what is none of the ``known`` parameters, or has none of its values."""
    for name, value in request.query_params.multi_items():
        values = known.get(name, ())
        if values is not None and value not in values:
            raise not_implemented(shortened(name))


async def _stored(state: ServerState, request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    stored = await state.responses.get(_owner(request), response_id)
    if stored is None:
        raise _not_found(response_id)
    return stored


def _owner(request: Request) -> str:
    record: RequestRecord = request.scope[RECORD_KEY]
    return record.cache_salt


def _not_found(response_id: str) -> ApiError:
    message = f"Response with id '{shortened(response_id)}' not found."
    return ApiError(404, message, "response_id", code="response_not_found")
