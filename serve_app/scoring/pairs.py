"""``POST /v1/score`` and ``POST /v1/rerank``: how well documents fit queries, in vLLM's shapes, by
the labels and the template that the operator names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from starlette.types import ASGIApp

from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.errors import bad_request, json_response
from lexshard.serve_app.openai.parameters import check_priority
from lexshard.serve_app.openai.prompts import Prompt, check_texts, estimated_tokens
from lexshard.serve_app.openai.protocol import (
    MAX_PROMPTS,
    NotImplementedField,
    RequestName,
    StrictModel,
    parse,
    shown_as,
)
from lexshard.serve_app.openai.tokenization import (
    BYTES_PER_TOKEN,
    MAX_TEMPLATE_MESSAGE,
    text_bytes,
)
from lexshard.serve_app.scoring.labels import Scores, Scoring, check_ids, check_length, score

SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class PairFields(StrictModel):
    """What requests for scores of pairs share."""

    model: str | None = None
    use_activation: Annotated[Any, NotImplementedField(True)] = None
    truncate_prompt_tokens: Annotated[Any, NotImplementedField()] = None
    user: Any = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: RequestName | None = None


class ScoreTextsRequest(PairFields):
    """``POST /v1/score``, as its fields were called first."""

    model_config = ConfigDict(
        json_schema_extra=shown_as(
            {"text_1": "Where is Paris?", "text_2": ["In France.", "Bees fly."]}
        )
    )

    text_1: Texts
    text_2: Texts


class ScoreQueriesRequest(PairFields):
    """``POST /v1/score``."""

    model_config = ConfigDict(
        json_schema_extra=shown_as(
            {"queries": "Where is Paris?", "documents": ["In France.", "Bees fly."]}
        )
    )

    queries: Texts
    documents: Texts


class DocumentText(StrictModel):
    text: str


def _as_object(document: Any) -> Any:
    """A document that may be a text."""
    if isinstance(document, str):
        return {"text": document}
    if not isinstance(document, dict):
        raise PydanticCustomError("string_type", "must be a text or an object with a 'text'")
    return document


# Of two types, places of mistakes would tell which one a document was taken for.
Document = Annotated[
    DocumentText, BeforeValidator(_as_object, json_schema_input_type=str | DocumentText)
]


class RerankRequest(PairFields):
    """``POST /v1/rerank``."""

    model_config = ConfigDict(
        json_schema_extra=shown_as(
            {"query": "Where is Paris?", "documents": ["Bees fly.", "In France."], "top_n": 1}
        )
    )

    query: str
    documents: Annotated[
        list[Document], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
    ]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None


async def create_score(call: HttpCall) -> ASGIApp:
    """Raises:
    ApiError: whatever is wrong with the request, and what the engine says of it.
    """
    asked = await call.read(_read_score)
    if isinstance(asked, ScoreQueriesRequest):
        fields, texts = ("queries", "documents"), (asked.queries, asked.documents)
    else:
        fields, texts = ("text_1", "text_2"), (asked.text_1, asked.text_2)
    record = call.record
    record.request_id = asked.request_id or record.request_id
    model = call.state.model_name(asked.model)
    pairs = _pairs(*texts, fields)
    scores = await _scores(call, asked, pairs, fields[1])
    return scores.reply(f"score-{record.request_id}", model)


def _read_score(body: Any) -> ScoreQueriesRequest | ScoreTextsRequest:
    given = body if isinstance(body, dict) else {}
    if given.get("queries") is not None or given.get("documents") is not None:
        return parse(ScoreQueriesRequest, body)
    return parse(ScoreTextsRequest, body)


async def create_rerank(call: HttpCall) -> ASGIApp:
    """Raises:
    ApiError: whatever is wrong with the request, and what the engine says of it.
    """
    asked = await call.read(partial(parse, RerankRequest))
    record = call.record
    record.request_id = asked.request_id or record.request_id
    model = call.state.model_name(asked.model)
    texts = [each.text for each in asked.documents]
    pairs = [(asked.query, text) for text in texts]
    scores = await _scores(call, asked, pairs, "documents")
    values = scores.values
    best = sorted(range(len(values)), key=values.__getitem__, reverse=True)  # ties as they came
    results: list[dict[str, Any]] = []
    for i in best[: asked.top_n or None]:
        told = {} if asked.return_documents is False else {"document": {"text": texts[i]}}
        results.append({"index": i, "relevance_score": values[i], **told})
    usage = {name: scores.usage[name] for name in ("prompt_tokens", "total_tokens")}
    head = {"id": f"rerank-{record.request_id}", "model": model}
    return json_response({**head, "results": results, "usage": usage})


def _pairs(
    queries: str | list[str], documents: str | list[str], fields: tuple[str, str]
) -> list[tuple[str, str]]:
    """One query with every document, or each with its own.

    Raises:
        ApiError: 400 naming the first of the ``fields`` where it is neither.
    """
    first = [queries] if isinstance(queries, str) else queries
    second = [documents] if isinstance(documents, str) else documents
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise bad_request(
            f"'{fields[0]}' holds {len(first)} texts and '{fields[1]}' {len(second)}: give one, or "
            "as many",
            fields[0],
        )
    return list(zip(first, second, strict=True))


async def _scores(
    call: HttpCall, asked: PairFields, pairs: Sequence[tuple[str, str]], field: str
) -> Scores:
    """Those of ``pairs``, whose documents are of such a ``field``.

    Raises:
        ApiError: whatever is wrong with the request, and what the engine says of it.
    """
    how, information = call.state.pairs, call.state.information()
    assert how is not None  # else there is no such route
    check_priority(asked.priority, call.record)
    template = how.template

    def render() -> list[str]:
        try:
            return [template.render(*pair) for pair in pairs]
        except Exception as error:  # it is a program run on the client's data
            reason = " ".join(str(error).split())[:MAX_TEMPLATE_MESSAGE]
            raise bad_request(f"the score template refuses these texts: {reason}", field) from error

    async def read() -> list[Prompt]:
        sizes = [sum(map(text_bytes, pair)) + template.size for pair in pairs]
        check_texts(sizes, field, information.max_model_len)
        texts = await call.run(sum(sizes), render)
        # What begins a text stands in the template, as in those of chats.
        prompts = await call.reader().prompts(texts, False, field)
        what = "a query and a document, as the score template writes them,"
        for each in prompts:
            check_length(len(each.ids), what, field, information)
            check_ids(each.ids, field, information)
        return prompts

    parts = [text for pair in pairs for text in pair]
    tokens = estimated_tokens(parts, information.max_model_len)
    tokens += len(pairs) * template.size // BYTES_PER_TOKEN
    scoring = Scoring(how.labels, len(pairs), tokens, priority=asked.priority)
    return await score(call, scoring, read)
