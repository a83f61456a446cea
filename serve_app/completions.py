"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from fastapi import Request, Response

from actors.messages import FinishReason, TokenLogprobs
from serve_app.choice import Choice, Delta
from serve_app.generation import Generation
from serve_app.output_budget import OutputBudget
from serve_app.parameters import check_completion, sampling_parameters
from serve_app.prompts import check_characters, encode_prompts, estimated_tokens, read_prompts
from serve_app.protocol import CompletionRequest, parse
from serve_app.reply import Reply, output_options, prepare
from serve_app.request_record import RequestRecord
from serve_app.server_state import ServerState
from serve_app.streaming import (
    DONE,
    EventStreamResponse,
    json_response,
    server_sent_event,
)

DEFAULT_MAX_TOKENS = 16


async def create_completion(
    state: ServerState, request: Request, body: Any, record: RequestRecord
) -> Response:
    """Raises:
    ApiError: whatever is wrong with the request.
    """
    completion = parse(CompletionRequest, body)
    state.model_name(completion.model)
    check_completion(completion)
    raw_prompts = read_prompts(completion.prompt)
    information = state.information()
    if completion.truncate_prompt_tokens is None:
        longest = max(len(prompt) if isinstance(prompt, str) else 0 for prompt in raw_prompts)
        check_characters(longest, "prompt", information, state.tokenizer)
    n = completion.choices
    estimate = estimated_tokens(raw_prompts, information.max_model_len)
    ticket = state.admission.admit(record.client, len(raw_prompts) * n, estimate * n)
    with ticket.released_on_error():
        special = completion.add_special_tokens
        prompts = await encode_prompts(
            raw_prompts, True if special is None else special, state.tokenizer
        )
        echo = bool(completion.echo)
        scores = completion.prompt_logprobs
        if echo and completion.logprobs is not None:
            scores = max(completion.logprobs, scores or 0)
        reply, generation = prepare(
            state,
            information,
            completion,
            prompts,
            sampling_parameters(
                completion, completion.logprobs, scores, information, state.tokenizer
            ),
            output_options(completion, completion.logprobs, echo, completion.max_tokens == 0),
            OutputBudget("max_tokens", completion.max_tokens, DEFAULT_MAX_TOKENS),
            "cmpl",
            "text_completion",
            ticket,
            record,
        )
    if completion.stream:
        return EventStreamResponse(_blocks(reply, generation), generation, record)
    work = _collect(reply, generation, completion.prompt_logprobs)
    return await json_response(request, generation, work)


def _choice(
    reply: Reply,
    choice: Choice,
    text: str,
    entries: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    finish_reason: FinishReason | None,
) -> dict[str, Any]:
    """``finish_reason`` is given apart: the choice may have ended later than ``text``."""
    options = reply.options
    logprobs = None
    if options.logprobs is not None:
        top = options.logprobs
        entries = [entry and _with_top(entry, top) for entry in entries]
        logprobs = reply.formatter.completion(entries, offsets, choice.request.prompt_ids[0])
    return {
        "index": choice.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": None if finish_reason is None else choice.stop_reason,
    }


def _with_top(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    """``prompt_logprobs`` may have asked the engine for more than ``logprobs`` shows."""
    if len(entry.top) <= count:
        return entry
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top[:count])


async def _collect(reply: Reply, generation: Generation, prompt_logprobs: int | None) -> bytes:
    choices = generation.choices
    texts: list[list[str]] = [[] for _ in choices]
    token_ids: list[list[int]] = [[] for _ in choices]
    entries: list[list[TokenLogprobs | None]] = [[] for _ in choices]
    offsets: list[list[int]] = [[] for _ in choices]
    async for deltas in generation.batches():
        for delta in deltas:
            index = delta.choice.index
            texts[index].append(delta.text)
            token_ids[index].extend(delta.token_ids)
            entries[index].extend(delta.logprobs)
            offsets[index].extend(delta.offsets)
    results = []
    for choice in choices:
        i = choice.index
        text = "".join(texts[i])
        result = _choice(reply, choice, text, entries[i], offsets[i], choice.finish_reason)
        if prompt_logprobs is not None:
            result["prompt_logprobs"] = reply.formatter.prompt(choice.prompt_logprobs or ())
        if reply.options.return_token_ids:
            result["prompt_token_ids"] = choice.request.prompt_ids
            result["token_ids"] = token_ids[i]
        results.append(result)
    body = {**reply.header, "choices": results, "usage": generation.usage()}
    if reply.seed is not None:
        body["seed"] = reply.seed
    return orjson.dumps(body)


async def _blocks(reply: Reply, generation: Generation) -> AsyncIterator[bytes]:
    async for deltas in generation.batches():
        block = [_chunk(reply, generation, delta) for delta in deltas]
        if block := [chunk for chunk in block if chunk]:
            yield b"".join(block)
    closing = b""
    if reply.include_usage:
        closing = server_sent_event({**reply.header, "choices": [], "usage": generation.usage()})
    yield closing + DONE


def _chunk(reply: Reply, generation: Generation, delta: Delta) -> bytes:
    """One delta as an event; nothing while its text is held back and nothing else is new."""
    tells_tokens = reply.options.logprobs is not None or reply.options.return_token_ids
    if not (delta.text or delta.finish_reason or (tells_tokens and delta.token_ids)):
        return b""
    choice = _choice(
        reply, delta.choice, delta.text, delta.logprobs, delta.offsets, delta.finish_reason
    )
    if reply.options.return_token_ids:
        choice["token_ids"] = delta.token_ids
        if delta.first:
            choice["prompt_token_ids"] = delta.choice.request.prompt_ids
    chunk = {**reply.header, "choices": [choice]}
    if reply.continuous_usage:
        chunk["usage"] = generation.usage()
    elif reply.include_usage:
        chunk["usage"] = None
    if reply.seed is not None and delta.first:
        chunk["seed"] = reply.seed
    return server_sent_event(chunk)
