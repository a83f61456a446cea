"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from lexshard.actors.messages import TokenLogprobs
from lexshard.serve_app.openai.choice import Delta
from lexshard.serve_app.openai.output_budget import OutputBudget
from lexshard.serve_app.openai.parameters import (
    check_completion,
    encode_bad_words,
    sampling_parameters,
)
from lexshard.serve_app.openai.preparation import admit, output_options, prepare
from lexshard.serve_app.openai.prompts import encode_prompts, read_prompts
from lexshard.serve_app.openai.protocol import CompletionRequest, parse
from lexshard.serve_app.openai.response_writer import ResponseWriter, encoded
from lexshard.serve_app.openai.streaming import respond
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState

DEFAULT_MAX_TOKENS = 16


async def create_completion(
    state: ServerState, request: Request, body: Any, record: RequestRecord
) -> ASGIApp:
    """Raises:
    ApiError: whatever is wrong with the request.
    """
    completion = parse(CompletionRequest, body)
    record.request_id = completion.request_id or record.request_id
    state.model_name(completion.model)
    check_completion(completion, record)
    raw_prompts = read_prompts(completion.prompt)
    information = state.information()
    echo = bool(completion.echo)
    scores = completion.prompt_logprobs
    if echo and completion.logprobs is not None:
        scores = max(completion.logprobs, scores or 0)
    ticket = admit(state, information, completion, raw_prompts, scores, record)
    with ticket.released_on_error():
        special = completion.add_special_tokens
        prompts = await encode_prompts(
            raw_prompts,
            True if special is None else special,
            state.tokenizer,
            information.max_model_len,
            request.receive,
        )
        bad_words = await encode_bad_words(
            completion.bad_words or (), state.tokenizer, request.receive
        )
        generation, writer = prepare(
            state,
            information,
            completion,
            prompts,
            sampling_parameters(completion, completion.logprobs, scores, information, bad_words),
            output_options(completion, completion.logprobs, echo, completion.max_tokens == 0),
            OutputBudget("prompt", completion.max_tokens, DEFAULT_MAX_TOKENS),
            CompletionWriter,
            ticket,
            record,
        )
    return await respond(request, generation, writer, record, stream=bool(completion.stream))


class CompletionWriter(ResponseWriter):
    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        return {"choices": [encoded(self._choice(delta)) for delta in deltas]}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        tells_seed = delta.first and self.seed is not None
        if not (tells_seed or self.has_news(delta)):
            return []
        return [{"choices": [self._choice(delta)]}]

    def _choice(self, delta: Delta) -> dict[str, Any]:
        options = self.options
        choice = delta.choice
        logprobs = None
        if options.logprobs is not None:
            top = options.logprobs
            entries = [entry and _with_top(entry, top) for entry in delta.logprobs]
            first_id = choice.request.prompt_ids[0]
            logprobs = self.formatter.completion(entries, delta.offsets, first_id)
        result = {
            "index": choice.index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": None if delta.finish_reason is None else choice.stop_reason,
            **self.told_tokens(delta),
        }
        if options.prompt_logprobs:
            result["prompt_logprobs"] = self.prompt_scores(choice)
        if options.return_token_ids and delta.first:
            result["prompt_token_ids"] = choice.request.prompt_ids
        return result


def _with_top(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    """``prompt_logprobs`` may have asked the engine for more than ``logprobs`` shows."""
    if len(entry.top) <= count:
        return entry
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top[:count])
