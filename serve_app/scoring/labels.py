"""Prompts after which the engine tells how likely labels are, for all routes that score; and ``POST
/generative_scoring``, in vLLM's shape."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.responses import Response
from starlette.types import ASGIApp

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.serve_app.admission import Ticket
from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.choice import Choice, OutputOptions
from lexshard.serve_app.openai.errors import bad_request, context_length_exceeded, json_response
from lexshard.serve_app.openai.generation import Generation
from lexshard.serve_app.openai.parameters import check_priority
from lexshard.serve_app.openai.prompts import Prompt, RawPrompt, estimated_tokens
from lexshard.serve_app.openai.protocol import (
    MAX_PROMPTS,
    RequestName,
    StrictModel,
    TokenId,
    parse,
    shown_as,
)
from lexshard.serve_app.openai.workers import run_unless_disconnected
from lexshard.serve_app.scoring.template import MAX_LABELS


@dataclass(frozen=True, slots=True)
class Scoring:
    """What one request wants: the probability of the first of the ``labels`` after each of so many
    ``prompts``, among the labels (``softmax``) or all tokens. ``tokens`` is a guess at those of all
    prompts."""

    labels: Sequence[int]
    prompts: int
    tokens: int
    softmax: bool = True
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """One for each prompt, in their order; ``usage`` has no completion tokens."""

    values: list[float]
    usage: dict[str, Any]

    def reply(self, name: str, model: str) -> Response:
        """As vLLM tells them; ``name`` is the id of the reply."""
        told = [
            {"index": i, "object": "score", "score": score} for i, score in enumerate(self.values)
        ]
        head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
        return json_response({**head, "data": told, "usage": self.usage})


async def score(
    call: HttpCall, scoring: Scoring, read: Callable[[], Awaitable[list[Prompt]]]
) -> Scores:
    """Those of the prompts that ``read`` makes once the request is admitted.

    Raises:
        ApiError: where there is no room, what ``read`` raises, and what the engine says.
        ClientDisconnectedError: the client left.
    """
    admission, client = call.state.admission, call.record.client
    ticket = admission.admit(client, scoring.prompts, scoring.tokens)
    with ticket.released_on_error():
        generation = _generation(call, await read(), scoring, ticket)
    try:
        scored = _probabilities(generation, scoring.labels[0])
        values = await run_unless_disconnected(call.request.receive, scored)
        usage = generation.usage()
    finally:
        generation.close()
    return Scores(values, {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]})


def check_length(length: int, what: str, field: str, information: EngineInformation) -> None:
    """Raises:
    ApiError: 400 naming ``field`` where ``what`` has no tokens, or leaves no room for a label.
    """
    if not length:
        raise bad_request(f"{what} have no tokens", field)
    if length >= information.context:
        reason = f"{what} are {length}, which leaves none for a label."
        raise context_length_exceeded(information.context, reason, field)


def check_ids(ids: Sequence[int], field: str, information: EngineInformation) -> None:
    """Raises:
    ApiError: 400 naming ``field`` for ids that are no rows of the model.
    """
    if max(ids, default=0) >= information.vocabulary_size:
        last = information.vocabulary_size - 1
        raise bad_request(f"'{field}' holds {max(ids)}, outside 0..{last}", field)


def _generation(
    call: HttpCall, prompts: Sequence[Prompt], scoring: Scoring, ticket: Ticket
) -> Generation:
    """A sequence of one token for each prompt, of which the engine tells how likely each label is:
    among all labels, whose rows of the head are all that is read, or the first one among all
    tokens."""
    state, record = call.state, call.record
    labels = scoring.labels if scoring.softmax else scoring.labels[:1]
    sampling = SamplingParameters(
        temperature=0.0,
        allowed_ids=tuple(labels),
        labels=scoring.softmax,
        logprobs=len(labels) if scoring.softmax else 0,
        max_tokens=1,
        ignore_eos=True,
    )
    name, visible = uuid.uuid4().hex, state.tokenizer.token_bytes
    priority = max(0, record.lowest_priority) if scoring.priority is None else scoring.priority
    client, salt = record.client, record.cache_salt
    requests = (
        Request(f"{name}-{i}", 0, prompt.ids, sampling, priority, client=client, cache_salt=salt)
        for i, prompt in enumerate(prompts)
    )
    options = OutputOptions(logprobs=0)
    choices = [Choice(i, request, "", options, visible) for i, request in enumerate(requests)]
    return Generation(state.client, choices, ticket, record)


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


async def create_generative_scoring(call: HttpCall) -> ASGIApp:
    """Raises:
    ApiError: whatever is wrong with the request, and what the engine says of it.
    """
    asked = await call.read(partial(parse, GenerativeScoringRequest))
    state, record = call.state, call.record
    record.request_id = asked.request_id or record.request_id
    model = state.model_name(asked.model)
    information = state.information()
    labels = list(dict.fromkeys(asked.label_token_ids))
    check_priority(asked.priority, record)
    check_ids(labels, "label_token_ids", information)
    items: Sequence[RawPrompt] = asked.items
    tokens = estimated_tokens([*items, *[asked.query] * len(items)], information.max_model_len)
    softmax = asked.apply_softmax is not False
    scoring = Scoring(labels, len(items), tokens, softmax, asked.priority)

    scores = await score(call, scoring, partial(_prompts, call, asked, information))
    return scores.reply(f"generative-scoring-{record.request_id}", model)


async def _prompts(
    call: HttpCall, asked: GenerativeScoringRequest, information: EngineInformation
) -> list[Prompt]:
    """The query and an item each, in their order; what comes first begins as texts begin."""
    special = asked.add_special_tokens is not False
    first, reader = bool(asked.item_first), call.reader()
    [query] = await reader.prompts([asked.query], special and not first, "query")
    items = await reader.prompts(asked.items, special and first, "items")
    lengths = [len(query.ids) + len(item.ids) for item in items]
    for length in lengths:
        check_length(length, "your query and an item", "items", information)

    def together() -> list[Prompt]:
        check_ids(query.ids, "query", information)
        for item in items:
            check_ids(item.ids, "items", information)
        pairs = ((item, query) if first else (query, item) for item in items)
        return [Prompt(before.ids + after.ids, None) for before, after in pairs]

    return await call.run(sum(lengths), together)  # a short body may ask for much of it
