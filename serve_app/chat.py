"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import Request, Response

from actors.messages import TokenLogprobs
from serve_app.choice import Delta
from serve_app.generation import Generation
from serve_app.output_budget import OutputBudget
from serve_app.parameters import check_chat, sampling_parameters
from serve_app.prompts import (
    check_characters,
    conversation_characters,
    encode_conversation,
    estimated_tokens,
    read_messages,
)
from serve_app.protocol import ChatCompletionRequest, parse
from serve_app.reply import Reply, output_options, prepare
from serve_app.request_record import RequestRecord
from serve_app.server_state import ServerState
from serve_app.streaming import (
    DONE,
    EventStreamResponse,
    json_response,
    server_sent_event,
)


async def create_chat_completion(
    state: ServerState, request: Request, body: Any, record: RequestRecord
) -> Response:
    """Raises:
    ApiError: whatever is wrong with the request.
    """
    chat = parse(ChatCompletionRequest, body)
    state.model_name(chat.model)
    check_chat(chat)
    messages = read_messages(chat.messages)
    information = state.information()
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    field = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    if chat.truncate_prompt_tokens is None:
        characters = conversation_characters(messages)
        check_characters(characters, "messages", information, state.tokenizer)
    contents = "".join(message["content"] for message in messages)
    estimate = estimated_tokens([contents], information.max_model_len)
    ticket = state.admission.admit(record.client, chat.choices, estimate * chat.choices)
    with ticket.released_on_error():
        prompt = await encode_conversation(
            chat, messages, bool(chat.add_special_tokens), state.tokenizer
        )
        reply, generation = prepare(
            state,
            information,
            chat,
            [prompt],
            sampling_parameters(chat, logprobs, chat.prompt_logprobs, information, state.tokenizer),
            output_options(chat, logprobs, echo=False, discard_output=False),
            OutputBudget(field, getattr(chat, field), None),
            "chatcmpl",
            "chat.completion.chunk" if chat.stream else "chat.completion",
            ticket,
            record,
        )
    if chat.stream:
        return EventStreamResponse(_blocks(reply, generation), generation, record)
    work = _collect(reply, generation, chat.prompt_logprobs)
    return await json_response(request, generation, work)


async def _collect(reply: Reply, generation: Generation, prompt_logprobs: int | None) -> bytes:
    choices = generation.choices
    texts: list[list[str]] = [[] for _ in choices]
    token_ids: list[list[int]] = [[] for _ in choices]
    entries: list[list[TokenLogprobs | None]] = [[] for _ in choices]
    async for deltas in generation.batches():
        for delta in deltas:
            index = delta.choice.index
            texts[index].append(delta.text)
            token_ids[index].extend(delta.token_ids)
            entries[index].extend(delta.logprobs)
    wants_logprobs = reply.options.logprobs is not None
    results = []
    for choice in choices:
        i = choice.index
        result: dict[str, Any] = {
            "index": i,
            "message": {"role": "assistant", "content": "".join(texts[i]), "refusal": None},
            "logprobs": reply.formatter.chat(entries[i]) if wants_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if reply.options.return_token_ids:
            result["token_ids"] = token_ids[i]
        results.append(result)
    body = {**reply.header, "choices": results, "usage": generation.usage()}
    if prompt_logprobs is not None:
        body["prompt_logprobs"] = reply.formatter.prompt(choices[0].prompt_logprobs or ())
    if reply.options.return_token_ids:
        body["prompt_token_ids"] = choices[0].request.prompt_ids
    if reply.seed is not None:
        body["seed"] = reply.seed
    return orjson.dumps(body)


async def _blocks(reply: Reply, generation: Generation) -> AsyncIterator[bytes]:
    async for deltas in generation.batches():
        block = [_chunks(reply, generation, delta) for delta in deltas]
        if block := [chunk for chunk in block if chunk]:
            yield b"".join(block)
    closing = b""
    if reply.include_usage:
        closing = server_sent_event({**reply.header, "choices": [], "usage": generation.usage()})
    yield closing + DONE


def _chunks(reply: Reply, generation: Generation, delta: Delta) -> bytes:
    """One delta as events: the role before the first, nothing while its text is held back and
    nothing else is new."""
    options = reply.options
    opening = b""
    if delta.first:
        role: dict[str, Any] = _chunk(
            reply, generation, delta, {"role": "assistant", "content": ""}
        )
        if options.return_token_ids:
            role["prompt_token_ids"] = delta.choice.request.prompt_ids
        if reply.seed is not None:
            role["seed"] = reply.seed
        opening = server_sent_event(role)
    tells_tokens = options.logprobs is not None or options.return_token_ids
    if not (delta.text or delta.finish_reason or (tells_tokens and delta.token_ids)):
        return opening
    chunk = _chunk(
        reply,
        generation,
        delta,
        {"content": delta.text} if delta.text or not delta.finish_reason else {},
    )
    choice = chunk["choices"][0]
    if options.logprobs is not None:
        choice["logprobs"] = reply.formatter.chat(delta.logprobs)
    if options.return_token_ids:
        choice["token_ids"] = delta.token_ids
    if delta.finish_reason is not None:
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.choice.stop_reason
    return opening + server_sent_event(chunk)


def _chunk(
    reply: Reply, generation: Generation, delta: Delta, content: dict[str, str]
) -> dict[str, Any]:
    choice = {
        "index": delta.choice.index,
        "delta": content,
        "logprobs": None,
        "finish_reason": None,
    }
    chunk = {**reply.header, "choices": [choice]}
    if reply.continuous_usage:
        chunk["usage"] = generation.usage()
    elif reply.include_usage:
        chunk["usage"] = None
    return chunk
