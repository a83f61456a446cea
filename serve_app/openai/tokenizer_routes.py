"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.responses import Response

from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.chat_fields import TokenizeChatRequest
from lexshard.serve_app.openai.errors import bad_request, json_response
from lexshard.serve_app.openai.prompts import ToldMessages
from lexshard.serve_app.openai.protocol import (
    DetokenizeRequest,
    TokenizeTextRequest,
    parse,
)
from lexshard.serve_app.openai.tokenization import BYTES_PER_TOKEN, most_text_bytes
from lexshard.serve_app.server_state import ServerState


async def tokenize(call: HttpCall) -> Response:
    """Raises:
    ApiError: 400, 404 for an unknown model, 429 for a client with too much open, 503 before the
        engine is ready.
    """
    asked, messages = await call.read(partial(_read, call.state))
    reader, tokenizer = call.reader(), call.state.tokenizer
    special = asked.add_special_tokens
    with call.without_sequences():
        if isinstance(asked, TokenizeChatRequest):
            assert messages is not None  # as is read
            prompt = await reader.conversation(asked, messages, bool(special))
        else:
            [prompt] = await reader.prompts([asked.prompt], special is not False)
        strings = None
        if asked.return_token_strs:
            work = partial(tokenizer.token_strings, prompt.ids)
            strings = await call.run(len(prompt.ids), work)
    told = {"count": len(prompt.ids), "max_model_len": reader.context}
    return json_response({**told, "tokens": prompt.ids, "token_strs": strings})


def _read(
    state: ServerState, body: Any
) -> tuple[TokenizeTextRequest | TokenizeChatRequest, ToldMessages | None]:
    if isinstance(body, dict) and body.get("messages") is not None:
        chat = parse(TokenizeChatRequest, body)
        state.model_name(chat.model)
        return chat, ToldMessages.of(chat)
    asked = parse(TokenizeTextRequest, body)
    state.model_name(asked.model)
    return asked, None


async def detokenize(call: HttpCall) -> Response:
    """Raises:
    ApiError: 400, 404 for an unknown model, 429 for a client with too much open, 503 before the
        engine is ready.
    """
    asked = await call.read(partial(parse, DetokenizeRequest))
    call.state.model_name(asked.model)
    information = call.state.information()
    tokens, vocabulary = asked.tokens, information.vocabulary_size
    most = most_text_bytes(information.max_model_len) // BYTES_PER_TOKEN
    if len(tokens) > most:
        raise bad_request(f"'tokens' holds {len(tokens)} ids, more than {most}", "tokens")
    if max(tokens, default=0) >= vocabulary:
        raise bad_request(f"'tokens' holds an id outside 0..{vocabulary - 1}", "tokens")
    with call.without_sequences():
        text = await call.run(len(tokens), partial(call.state.tokenizer.decode, tokens))
    return json_response({"prompt": text})
