"""``POST /generative_scoring``: how likely labels are as the next token, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from lexshard.actors.configuration import EngineInformation
from lexshard.serve_app.openai.errors import bad_request, json_response
from lexshard.serve_app.openai.parameters import check_priority
from lexshard.serve_app.openai.prompts import Prompt, RawPrompt, TextReader, estimated_tokens
from lexshard.serve_app.openai.protocol import (
    MAX_PROMPTS,
    RequestName,
    StrictModel,
    TokenId,
    parse,
    shown_as,
)
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.scoring.labels import Scoring, checked_prompt, score
from lexshard.serve_app.scoring.template import MAX_LABELS
from lexshard.serve_app.server_state import ServerState

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
    check_priority(asked.priority, record)
    if max(labels) >= information.vocabulary_size:
        raise bad_request(
            f"'label_token_ids' holds {max(labels)}, outside 0..{information.vocabulary_size - 1}",
            "label_token_ids",
        )
    reader = TextReader(state.tokenizer, information.max_model_len, request.receive)
    items: Sequence[RawPrompt] = asked.items
    tokens = estimated_tokens([*items, *[asked.query] * len(items)], information.max_model_len)
    softmax = asked.apply_softmax is not False
    scoring = Scoring(labels, len(items), tokens, softmax, asked.priority)

    async def read() -> list[Prompt]:
        return await _prompts(asked, reader, information)

    scores = await score(state, request.receive, record, scoring, read)
    return json_response(scores.reply(f"generative-scoring-{record.request_id}", model))


async def _prompts(
    asked: GenerativeScoringRequest, reader: TextReader, information: EngineInformation
) -> list[Prompt]:
    """The query and an item each, in their order; what comes first begins as texts begin."""
    special = asked.add_special_tokens is not False
    first = bool(asked.item_first)
    [query] = await reader.prompts([asked.query], special and not first, "query")
    items = await reader.prompts(asked.items, special and first, "items")
    together = (item.ids + query.ids if first else query.ids + item.ids for item in items)
    what = "your query and an item"
    return [checked_prompt(ids, what, "items", information) for ids in together]
