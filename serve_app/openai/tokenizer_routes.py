"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

from typing import Any

from serve_app.openai.errors import bad_request
from serve_app.openai.prompts import encode_conversation, encode_prompts, read_messages
from serve_app.openai.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    parse,
)
from serve_app.openai.tokenization import off_loop_if_long
from serve_app.server_state import ServerState


async def tokenize(state: ServerState, body: Any) -> dict[str, Any]:
    """Raises:
    ApiError: 400, 404 for an unknown model, 503 before the engine is ready.
    """
    request: TokenizeTextRequest | TokenizeChatRequest
    if isinstance(body, dict) and "messages" in body:
        request = parse(TokenizeChatRequest, body)
    else:
        request = parse(TokenizeTextRequest, body)
    state.model_name(request.model)
    information = state.information()
    special = request.add_special_tokens
    if isinstance(request, TokenizeChatRequest):
        messages = read_messages(request.messages)
        prompt = await encode_conversation(request, messages, bool(special), state.tokenizer)
    else:
        add_special = True if special is None else special
        [prompt] = await encode_prompts([request.prompt], add_special, state.tokenizer)
    result: dict[str, Any] = {
        "count": len(prompt.ids),
        "max_model_len": information.max_model_len,
        "tokens": prompt.ids,
        "token_strs": None,
    }
    if request.return_token_strs:
        result["token_strs"] = state.tokenizer.token_strings(prompt.ids)
    return result


async def detokenize(state: ServerState, body: Any) -> dict[str, Any]:
    """Raises:
    ApiError: 400, 404 for an unknown model, 503 before the engine is ready.
    """
    request = parse(DetokenizeRequest, body)
    state.model_name(request.model)
    vocabulary = state.information().vocabulary_size
    if max(request.tokens, default=0) >= vocabulary:
        raise bad_request(f"'tokens' holds an id outside 0..{vocabulary - 1}", "tokens")
    tokens = request.tokens
    text = await off_loop_if_long(len(tokens), lambda: state.tokenizer.decode(tokens))
    return {"prompt": text}
