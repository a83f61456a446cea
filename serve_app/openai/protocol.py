"""The bodies clients send, field by field.

A field is implemented, listed among the accepted-and-ignored, or listed as not implemented: then
anything but null (or the value that asks for nothing) is refused by name. Unknown fields are
refused, unless they are null: that asks for nothing, whatever server they were meant for. Numbers
are strict: a bool is no int, a string is no number; an int may stand for a float.

What a body costs is bounded before it is understood: how many values it has before they are made,
and of many that are wrong only the first is looked at.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from serve_app.openai.errors import bad_request, nearest, shortened, unknown_parameter

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_MESSAGES = 16_384
MAX_TEMPLATE_KWARGS_BYTES = 65_536
MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1024
MAX_LIST_ENTRIES = 1024
MAX_LOGPROBS = 20
# Of all prompts of a request, for each of their choices: what takes an API process half a second to
# write, and 35 MB.
MAX_PROMPT_LOGPROBS = 500_000
# All bad words of a request together: every choice carries their tokens and looks for them.
MAX_BAD_WORD_CHARACTERS = 16_384
# Of a whole body, at every depth: values take up to 24 times the memory of their JSON, and names
# ten times the time of numbers.
MAX_JSON_VALUES = 1_000_000
MAX_JSON_NAMES = 100_000
NO_STRUCTURE = bytes(set(range(256)) - set(b'"[{,:'))
PIECE_BYTES = 1 << 20

Count = Annotated[int, Field(ge=0)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
SeedNumber = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
RequestName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]

Model = TypeVar("Model", bound="StrictModel")
UNKNOWN_FIELD: Final = "unknown_field"
WRONG_TYPE = "_type"  # so end the names of pydantic's errors about types


def _check_entries(value: Any) -> Any:
    """Bounds an object before its entries are looked at, of which each may become an error."""
    if isinstance(value, dict) and len(value) > MAX_LIST_ENTRIES:
        raise PydanticCustomError("too_long", f"has more than {MAX_LIST_ENTRIES} entries")
    return value


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        """Leaves out what is unknown and null. One that is not ends the matter: a million of them
        would each become an error."""
        if not isinstance(body, dict):
            return body
        known = {name: value for name, value in body.items() if name in cls.model_fields}
        for name, value in body.items() if len(known) < len(body) else ():
            if name not in known and value is not None:
                near = nearest(name, cls.model_fields)
                raise PydanticCustomError(UNKNOWN_FIELD, "{name}", {"name": name, "near": near})
        return known


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class IgnoredFields(StrictModel):
    """Accepted because clients send them; they change nothing here."""

    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    verbosity: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class GenerationFields(IgnoredFields):
    """What completions and chat completions share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: SeedNumber | None = None
    stop: (
        StopString
        | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
        | None
    ) = None
    stop_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_LIST_ENTRIES)] | None
    ) = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None

    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]],
            BeforeValidator(_check_entries),
        ]
        | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, min_length=1)] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
            Field(fail_fast=True, max_length=MAX_LIST_ENTRIES),
        ]
        | None
    ) = None
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None

    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_seed: bool | None = None
    certificate: bool | None = None
    draft: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: RequestName | None = None

    @property
    def choices(self) -> int:
        return self.n or 1


class CompletionRequest(GenerationFields):
    """``POST /v1/completions``. ``prompt`` is checked in ``prompts.py``."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=-1)] | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatFields(StrictModel):
    """A conversation, and how it becomes a prompt. ``messages`` are checked in ``prompts.py``."""

    messages: list[Any]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(ChatFields, GenerationFields):
    """``POST /v1/chat/completions``."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: Count | None = None

    # Means nothing without tools, which are not implemented.
    parallel_tool_calls: bool | None = None

    # Not implemented: refused by name when they ask for something.
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None


class TokenizeFields(StrictModel):
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeTextRequest(TokenizeFields):
    """``POST /tokenize`` with a text."""

    prompt: str


class TokenizeChatRequest(ChatFields, TokenizeFields):
    """``POST /tokenize`` with a conversation."""


class DetokenizeRequest(StrictModel):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def decoded(body: bytes) -> Any:
    """What a JSON body holds.

    Raises:
        ApiError: 400 for one that is no JSON, holds too much or a name twice: of that parsers keep
            one or the other, and what a proxy has checked would not be what is done.
    """
    if len(body) > MAX_JSON_NAMES and _holds_too_much(body):
        raise bad_request(
            f"the body holds more than {MAX_JSON_VALUES} values or {MAX_JSON_NAMES} names"
        )
    try:
        value = orjson.loads(body)
        again = orjson.dumps(value)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    except orjson.JSONEncodeError as error:
        raise bad_request("the body is nested too deeply") from error
    # A name that was given twice is missing there, and so is its colon. Only an escaped colon may
    # make up for it.
    if body.count(b":") != again.count(b":") or b"\\u003" in body:
        json.loads(body, object_pairs_hook=_names_once)
    return value


def _names_once(pairs: list[tuple[str, Any]]) -> None:
    """Raises:
    ApiError: 400 for a name that comes twice.
    """
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            name = shortened(name)
            raise bad_request(f"the body has '{name}' twice in one object", name)
        seen.add(name)


def _holds_too_much(body: bytes) -> bool:
    """Counts what comes before values (brackets, braces and commas) and after names (colons)."""
    values = sum(map(body.count, (b"[", b"{", b",")))
    if values <= MAX_JSON_VALUES and body.count(b":") <= MAX_JSON_NAMES:
        return False  # even with those inside strings
    # Once escapes are gone, every quote begins or ends a string; two side by side change nothing.
    rest = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    rest = rest.translate(None, NO_STRUCTURE).replace(b'""', b"")
    values = names = inside = 0
    for begin in range(0, len(rest), PIECE_BYTES):
        parts = rest[begin : begin + PIECE_BYTES].split(b'"')
        outside = b"".join(parts[inside::2])
        names += outside.count(b":")
        values += len(outside) - outside.count(b":")
        if values > MAX_JSON_VALUES or names > MAX_JSON_NAMES:
            return True
        inside ^= (len(parts) - 1) % 2
    return False


def parse(model: type[Model], body: Any) -> Model:
    """Validates a decoded JSON body.

    Raises:
        ApiError: 400 naming the first field that is wrong.
    """
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problem = _first_problem(error)
        path = [str(part) for part in problem["loc"]]
        if problem["type"] == UNKNOWN_FIELD:
            name = shortened(".".join([*path, problem["msg"]]))
            raise unknown_parameter(name, problem["ctx"]["near"]) from error
        field = path[0] if path else None
        code = "missing_required_parameter" if problem["type"] == "missing" else None
        if problem["type"].endswith(WRONG_TYPE):
            code = "invalid_type"
        raise bad_request(f"'{field}': {problem['msg']}", field, code) from error


def _first_problem(error: ValidationError) -> ErrorDetails:
    """That of the first field. One that may be of several types has a problem with each of them:
    what is wrong with a value of the right type says most."""
    problems = error.errors(include_url=False, include_input=False)
    field = problems[0]["loc"][:1]
    return max(
        (problem for problem in problems if problem["loc"][:1] == field),
        key=lambda problem: (not problem["type"].endswith(WRONG_TYPE), len(problem["loc"])),
    )
