"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lexshard.serve_app.openai.chat_fields import TokenizeChatRequest
from lexshard.serve_app.openai.errors import bad_request, json_response
from lexshard.serve_app.openai.prompts import TextReader
from lexshard.serve_app.openai.protocol import (
    DetokenizeRequest,
    TokenizeTextRequest,
    parse,
)
from lexshard.serve_app.openai.tokenization import BYTES_PER_TOKEN, most_text_bytes
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState


async def tokenize(
    state: ServerState, request: Request, body: Any, record: RequestRecord
) -> Response:
    """Raises:
    ApiError: 400, 404 for an unknown model, 429 for a client with too much open, 503 before the
        engine is ready.
    """
    asked: TokenizeTextRequest | TokenizeChatRequest
    if isinstance(body, dict) and body.get("messages") is not None:
        asked = parse(TokenizeChatRequest, body)
    else:
        asked = parse(TokenizeTextRequest, body)
    state.model_name(asked.model)
    context = state.information().max_model_len
    reader = TextReader(state.tokenizer, context, request.receive)
    special = asked.add_special_tokens
    with state.admission.admit(record.client, 0, 0).released():
        if isinstance(asked, TokenizeChatRequest):
            prompt = await reader.conversation(asked, bool(special))
        else:
            [prompt] = await reader.prompts([asked.prompt], special is not False)
        strings = None
        if asked.return_token_strs:
            strings = await state.tokenizer.workers.run(
                len(prompt.ids), lambda: state.tokenizer.token_strings(prompt.ids), request.receive
            )
    told = {"count": len(prompt.ids), "max_model_len": context}
    return json_response({**told, "tokens": prompt.ids, "token_strs": strings})


async def detokenize(
    state: ServerState, request: Request, body: Any, record: RequestRecord
) -> Response:
    """Raises:
    ApiError: 400, 404 for an unknown model, 429 for a client with too much open, 503 before the
        engine is ready.
    """
    asked = parse(DetokenizeRequest, body)
    state.model_name(asked.model)
    information = state.information()
    tokens, vocabulary = asked.tokens, information.vocabulary_size
    most = most_text_bytes(information.max_model_len) // BYTES_PER_TOKEN
    if len(tokens) > most:
        raise bad_request(f"'tokens' holds {len(tokens)} ids, more than {most}", "tokens")
    if max(tokens, default=0) >= vocabulary:
        raise bad_request(f"'tokens' holds an id outside 0..{vocabulary - 1}", "tokens")
    with state.admission.admit(record.client, 0, 0).released():
        text = await state.tokenizer.workers.run(
            len(tokens), lambda: state.tokenizer.decode(tokens), request.receive
        )
    return json_response({"prompt": text})
