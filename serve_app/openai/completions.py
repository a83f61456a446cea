"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp

from lexshard.actors.messages import TokenLogprobs
from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.choice import Delta
from lexshard.serve_app.openai.errors import bad_request, not_implemented
from lexshard.serve_app.openai.parameters import check_logprob_count
from lexshard.serve_app.openai.preparation import Wanted, answer, read_fields
from lexshard.serve_app.openai.prompts import read_prompts
from lexshard.serve_app.openai.protocol import CompletionRequest
from lexshard.serve_app.openai.response_writer import ResponseWriter, encoded
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState

DEFAULT_MAX_TOKENS = 16


async def create_completion(call: HttpCall) -> ASGIApp:
    """Raises:
    ApiError: whatever is wrong with the request.
    """

    def read(body: Any) -> tuple[CompletionRequest, Wanted]:
        asked = read_completion(call.state, body, call.record)
        return asked, wanted_of(asked)

    return await answer(call, *await call.read(read))


def read_completion(state: ServerState, body: Any, record: RequestRecord) -> CompletionRequest:
    """A body as the request it is.

    Raises:
        ApiError: whatever is wrong with it, but for its prompts.
    """
    asked = read_fields(CompletionRequest, body, state, record)
    check_logprob_count(asked.logprobs, "logprobs")
    if asked.best_of is not None and asked.best_of != asked.choices:
        raise not_implemented("best_of")
    if asked.max_tokens == 0 and not asked.echo:
        raise bad_request("'max_tokens' must be at least 1 unless 'echo' is set", "max_tokens")
    return asked


def wanted_of(asked: CompletionRequest) -> Wanted:
    """What a request asks for. Raises `ApiError` for prompts that are none."""
    prompts = read_prompts(asked.prompt)
    scores = asked.prompt_logprobs
    if asked.echo and asked.logprobs is not None:
        scores = max(asked.logprobs, scores or 0)
    return Wanted(
        CompletionWriter,
        "prompt",
        texts=prompts,
        encode=lambda reader: reader.prompts(prompts, asked.add_special_tokens is not False),
        max_tokens=asked.max_tokens,
        default_tokens=DEFAULT_MAX_TOKENS,
        logprobs=asked.logprobs,
        prompt_logprobs=scores,
        echo=bool(asked.echo),
    )


class CompletionWriter(ResponseWriter):
    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        none = {"token_ids": None, **self.not_asked}
        return {"choices": [encoded({**none, **self._choice(delta)}) for delta in deltas]}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        tells_first = delta.first and (self.seed is not None or self.notes)
        if not (tells_first or self.has_news(delta)):
            return []
        return [{"choices": [self._choice(delta)]}]

    def _choice(self, delta: Delta) -> dict[str, Any]:
        options = self.options
        choice = delta.choice
        logprobs = None
        if options.logprobs is not None:
            top = options.logprobs
            entries = [entry and _with_top(entry, top) for entry in delta.logprobs]
            offsets, prompt_ids = delta.offsets, choice.request.prompt_ids
            if options.echo and delta.first:
                own = self.formatter.prompt_offsets(prompt_ids, choice.echo_text)
                offsets = [*own, *offsets]
            logprobs = self.formatter.completion(entries, offsets, prompt_ids[0])
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
