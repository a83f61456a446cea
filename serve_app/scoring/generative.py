"""``POST /generative_scoring``: how likely labels are as the next token, in vLLM's shape."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.serve_app.admission import Ticket
from lexshard.serve_app.openai.choice import Choice, OutputOptions
from lexshard.serve_app.openai.errors import bad_request, context_length_exceeded, json_response
from lexshard.serve_app.openai.generation import Generation
from lexshard.serve_app.openai.prompts import (
    Prompt,
    RawPrompt,
    TextReader,
    check_and_truncate,
    estimated_tokens,
)
from lexshard.serve_app.openai.protocol import (
    MAX_PROMPTS,
    RequestName,
    StrictModel,
    TokenId,
    parse,
    shown_as,
)
from lexshard.serve_app.openai.workers import run_unless_disconnected
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState

MAX_LABELS = 64
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]


class GenerativeScoringRequest(StrictModel):
    """``POST /generative_scoring``."""

    model_config = ConfigDict(
        json_schema_extra=shown_as(
            {"query": "Is a capital: ", "items": ["Paris", "Lyon"], "label_token_ids": [5, 7]}
        )
    )

    model: str | None = None
    query: Text | TokenIds
    items: (
        Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    label_token_ids: Annotated[
        list[TokenId], Field(min_length=1, max_length=MAX_LABELS, fail_fast=True)
    ]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: RequestName | None = None


async def create_generative_scoring(
    state: ServerState, request: HttpRequest, body: Any, record: RequestRecord
) -> ASGIApp:
    """Raises:
    ApiError: whatever is wrong with the request, and what the engine says of it.
    """
    asked = parse(GenerativeScoringRequest, body)
    record.request_id = asked.request_id or record.request_id
    model = state.model_name(asked.model)
    information = state.information()
    labels = list(dict.fromkeys(asked.label_token_ids))
    _check(asked, labels, information, record)
    reader = TextReader(state.tokenizer, information.max_model_len, request.receive)
    items: Sequence[RawPrompt] = asked.items
    tokens = estimated_tokens([*items, *[asked.query] * len(items)], information.max_model_len)
    ticket = state.admission.admit(record.client, len(items), tokens)
    with ticket.released_on_error():
        prompts = await _prompts(asked, reader, information)
        among = labels if asked.apply_softmax is not False else labels[:1]
        sampling = _sampling(among, softmax=asked.apply_softmax is not False)
        generation = _generation(state, prompts, sampling, asked.priority, ticket, record)
    try:
        scored = _probabilities(generation, labels[0])
        scores = await run_unless_disconnected(request.receive, scored)
        usage = {**generation.usage(), "completion_tokens": 0}
    finally:
        generation.close()
    told: Response = json_response(
        {
            "id": f"generative-scoring-{record.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {"index": i, "object": "score", "score": score} for i, score in enumerate(scores)
            ],
            "usage": {**usage, "total_tokens": usage["prompt_tokens"]},
        }
    )
    return told


def _check(
    asked: GenerativeScoringRequest,
    labels: Sequence[int],
    information: EngineInformation,
    record: RequestRecord,
) -> None:
    if max(labels) >= information.vocabulary_size:
        raise bad_request(
            f"'label_token_ids' holds {max(labels)}, outside 0..{information.vocabulary_size - 1}",
            "label_token_ids",
        )
    if asked.priority is not None and asked.priority < record.lowest_priority:
        raise bad_request(
            f"'priority' is {asked.priority}; the lowest you may ask for is "
            f"{record.lowest_priority}",
            "priority",
        )


async def _prompts(
    asked: GenerativeScoringRequest, reader: TextReader, information: EngineInformation
) -> list[Prompt]:
    """The query and an item each, in their order; what comes first begins as texts begin."""
    special = asked.add_special_tokens is not False
    first = bool(asked.item_first)
    [query] = await reader.prompts([asked.query], special and not first)
    items = await reader.prompts(asked.items, special and first)
    context = min(information.max_model_len, information.kv_tokens)
    prompts = []
    for item in items:
        ids = item.ids + query.ids if first else query.ids + item.ids
        if len(ids) >= context:
            reason = f"your query and an item are {len(ids)}, which leaves none for a label."
            raise context_length_exceeded(context, reason, "items")
        prompts.append(check_and_truncate(Prompt(ids, None), None, information))
    return prompts


def _sampling(labels: Sequence[int], *, softmax: bool) -> SamplingParameters:
    """One token, of which the engine tells how likely each label is: among all labels, whose rows
    of the head are all that is read, or the first one among all tokens."""
    return SamplingParameters(
        temperature=0.0,
        allowed_ids=tuple(labels),
        labels=softmax,
        logprobs=len(labels) if softmax else 0,
        max_tokens=1,
        ignore_eos=True,
    )


def _generation(
    state: ServerState,
    prompts: Sequence[Prompt],
    sampling: SamplingParameters,
    priority: int | None,
    ticket: Ticket,
    record: RequestRecord,
) -> Generation:
    """A sequence for each prompt."""
    name = uuid.uuid4().hex
    visible = state.tokenizer.token_bytes
    options = OutputOptions(logprobs=0)
    lowest = max(0, record.lowest_priority) if priority is None else priority
    choices = []
    for i, prompt in enumerate(prompts):
        request = Request(
            f"{name}-{i}",
            0,
            prompt.ids,
            sampling,
            lowest,
            client=record.client,
            cache_salt=record.cache_salt,
        )
        choices.append(Choice(i, request, "", options, visible))
    return Generation(state.client, choices, visible, ticket, record)


async def _probabilities(generation: Generation, label: int) -> list[float]:
    """That of ``label`` in every sequence."""
    found = [0.0] * len(generation.choices)
    async for deltas in generation.batches():
        for delta in deltas:
            for entry in delta.logprobs:
                if entry is not None:
                    told = {entry.token_id: entry.logprob, **dict(entry.top)}
                    found[delta.choice.index] = math.exp(told[label])
    return found
