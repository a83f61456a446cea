"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.messages_api.protocol import CountTokensRequest, MessagesRequest
from lexshard.serve_app.messages_api.translation import (
    OWN_NAMES,
    message_body,
    prompt_body,
)
from lexshard.serve_app.messages_api.writer import MessagesWriter
from lexshard.serve_app.openai.chat import chat_prompt_tokens, chat_reply
from lexshard.serve_app.openai.errors import ApiError, json_response
from lexshard.serve_app.over_chat.chat_body import ChatBody
from lexshard.serve_app.over_chat.reading import check_depth, in_own_terms, read_at

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
# Context, prompt and completion, in what a chat is told, and as Claude Code reads them.
LENGTHS = re.compile(r"length is (\d+) tokens.*\((\d+) in the \w+, (\d+) in the completion\)")
TOO_MUCH = (
    r"input length and `max_tokens` exceed context limit: \2 + \3 > \1, decrease input length or "
    "`max_tokens` and try again"
)


async def create_message(call: HttpCall) -> ASGIApp:
    """Raises:
    ApiError: whatever is wrong with the request.
    """
    state = call.state

    def read(body: Any) -> tuple[bool, str, ChatBody]:
        """What changes nothing is left behind: a reply would hold it to its end."""
        check_depth(body)
        asked = read_at(MessagesRequest, body)
        reads = partial(state.tokenizer.reads, tools=bool(asked.tools))
        return bool(asked.stream), state.model_name(asked.model), message_body(asked, reads)

    stream, model, chat = await call.read(read)
    writer = partial(MessagesWriter, model, call.record)
    try:
        return await chat_reply(call, chat.fields, writer, stream=stream)
    except ApiError as error:
        raise _in_own_terms(error, chat) from error


async def count_tokens(call: HttpCall) -> Response:
    """How many tokens the prompt of a message would have.

    Raises:
        ApiError: whatever is wrong with the request.
    """

    def read(body: Any) -> ChatBody:
        check_depth(body)
        asked = read_at(CountTokensRequest, body)
        call.state.model_name(asked.model)
        reads = partial(call.state.tokenizer.reads, tools=bool(asked.tools))
        return prompt_body(asked, reads)

    chat = await call.read(read)
    try:
        tokens = await chat_prompt_tokens(call, chat.fields)
    except ApiError as error:
        raise _in_own_terms(error, chat) from error
    return json_response({"input_tokens": tokens})


def _in_own_terms(error: ApiError, chat: ChatBody) -> ApiError:
    told = in_own_terms(error, OWN_NAMES, chat)
    if told.code == CONTEXT_LENGTH_EXCEEDED:
        found = LENGTHS.search(told.message)
        if found and int(found[2]) < int(found[1]):
            told.message = found.expand(TOO_MUCH)
        else:  # clients shorten when they read this beginning
            told.message = f"prompt is too long: {told.message}"
    return told
