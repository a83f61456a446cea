"""The bodies clients send, field by field.

A field is implemented, listed among the accepted-and-ignored, or listed as not implemented: then
anything but null (or the value that asks for nothing) is refused by name. Unknown fields are
refused, unless they are null: that asks for nothing, whatever server they were meant for. Numbers
are strict: a bool is no int, a string is no number; an int may stand for a float.

What a body costs is bounded while it is understood: of many fields that are wrong only the first is
looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_plain_validator_function

from lexshard.actors.receipts.stop_rule import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from lexshard.serve_app.body_room import MAX_JSON_NAMES, MAX_JSON_VALUES, holds_too_much
from lexshard.serve_app.known_fields import UNKNOWN_FIELD, known_fields
from lexshard.serve_app.openai.errors import (
    bad_request,
    not_implemented,
    shortened,
    unknown_parameter,
)
from lexshard.serve_app.structured.fields import ConstraintFields

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_MESSAGES = 16_384
MAX_TEMPLATE_KWARGS_BYTES = 65_536
MAX_LIST_ENTRIES = 1024
MAX_LOGPROBS = 20
# Of all prompts of a request, for each of their choices: what takes an API process half a second to
# write, and 35 MB.
MAX_PROMPT_LOGPROBS = 500_000
HELLO: Final = [{"role": "user", "content": "Hello!"}]
# All bad words of a request together: every choice carries their tokens and looks for them.
MAX_BAD_WORD_CHARACTERS = 16_384

Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
SeedNumber = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
RequestName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
# At most so many are returned; -1 would be the whole vocabulary, which is refused with its reason.
LogprobCount = Annotated[
    int, Field(ge=-1, json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS})
]

NOTHING: Final = {"type": "null"}
# What `prompts.py` checks.
PromptText = Annotated[str, Field(min_length=1)]
PromptIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Several = Field(min_length=1, max_length=MAX_PROMPTS)
Prompts = (
    PromptText
    | Annotated[list[PromptText], Several]
    | PromptIds
    | Annotated[list[PromptIds], Several]
)
Model = TypeVar("Model", bound="StrictModel")
# Errors of our own, beside pydantic's.
NOT_IMPLEMENTED: Final = "not_implemented"
WRONG_TYPE = "_type"  # so end the names of pydantic's errors about types


def _check_entries(value: Any) -> Any:
    """Bounds an object before its entries are looked at, of which each may become an error."""
    if isinstance(value, dict) and len(value) > MAX_LIST_ENTRIES:
        raise PydanticCustomError("too_long", f"has more than {MAX_LIST_ENTRIES} entries")
    return value


class NotImplementedField:
    """Marks a field that is not implemented. It may be null, or one of the ``harmless`` values,
    which ask for nothing; anything else is refused by name."""

    def __init__(self, *harmless: Any) -> None:
        self.harmless = harmless

    def __get_pydantic_core_schema__(self, _: Any, __: Any) -> CoreSchema:
        return no_info_plain_validator_function(self._checked)

    def __get_pydantic_json_schema__(self, _: Any, __: Any) -> dict[str, Any]:
        return {"enum": [None, *self.harmless]}

    def _checked(self, value: Any) -> Any:
        harmless = (each for each in self.harmless if type(each) is type(value))  # 0 is no False
        if value is not None and value not in harmless:
            raise PydanticCustomError(NOT_IMPLEMENTED, "not implemented")
        return value


def shown_as(*examples: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """What the description of a model has besides its fields."""

    def complete(schema: dict[str, Any]) -> None:
        schema["additionalProperties"] = NOTHING
        schema |= {"examples": [*examples]} if examples else {}

    return complete


def told_as(kind: Any) -> BeforeValidator:
    """Marks a field that is checked elsewhere, and described as of such a type."""
    return BeforeValidator(_unchanged, json_schema_input_type=kind)


def _unchanged(value: Any) -> Any:
    return value


class StrictModel(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=shown_as()
    )

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        return known_fields(body, cls.model_fields) if isinstance(body, dict) else body


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _forgotten(_: Any) -> None:
    """Nothing reads it: decoded it may be many times as large as a body may be, and a reply takes
    long."""


Ignored = Annotated[Any, BeforeValidator(_forgotten)]


class IgnoredFields(StrictModel):
    """Accepted because clients send them; they change nothing here, and are not held."""

    user: Ignored = None
    store: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    verbosity: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None


class GenerationFields(ConstraintFields, IgnoredFields):
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
            Field(
                json_schema_extra={
                    "maxProperties": MAX_LIST_ENTRIES,
                    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                }
            ),
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
    prompt_logprobs: LogprobCount | None = None

    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: (
        Annotated[int, Field(ge=-1, json_schema_extra={"not": {"const": 0}})] | None
    ) = None
    truncation_side: Literal["left", "right"] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_token_bytes: bool | None = None
    return_seed: bool | None = None
    candidates: Annotated[int, Field(ge=1, le=MAX_LOGPROBS)] | None = None
    certificate: bool | None = None
    draft: bool | None = None
    receipt: bool | None = None
    draft_tokens: Annotated[int, Field(ge=0, le=255)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: RequestName | None = None

    @property
    def choices(self) -> int:
        return self.n or 1


class CompletionRequest(GenerationFields):
    """``POST /v1/completions``. ``prompt`` is checked in ``prompts.py``."""

    model_config = ConfigDict(
        json_schema_extra=shown_as({"prompt": "Once upon a time", "max_tokens": 60, "seed": 7})
    )

    prompt: Annotated[Any, told_as(Prompts)]
    echo: bool | None = None
    logprobs: LogprobCount | None = None
    best_of: int | None = None
    suffix: Annotated[Any, NotImplementedField("")] = None


class TokenizeFields(StrictModel):
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeTextRequest(TokenizeFields):
    """``POST /tokenize`` with a text."""

    model_config = ConfigDict(json_schema_extra=shown_as({"prompt": "Once upon a time"}))

    prompt: str


class DetokenizeRequest(StrictModel):
    """``POST /detokenize``."""

    model_config = ConfigDict(json_schema_extra=shown_as({"tokens": [72, 105]}))

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


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
        # Inside others, a place may also tell which of its types a value was taken for.
        if path[:1] in (["response_format"], ["tool_choice"]):
            del path[1:2]
        elif path[:1] == ["structured_outputs"]:
            path = [part for part in path if "[" not in part]
        if problem["type"] == UNKNOWN_FIELD:
            name = shortened(".".join([*path, problem["msg"]]))
            raise unknown_parameter(name, problem["ctx"]["near"]) from error
        path += [context["field"]] if "field" in (context := problem.get("ctx", {})) else []
        nested = path[:1] in (["messages"], ["tools"], ["structured_outputs"], ["response_format"])
        field = ".".join(path) if nested else path[0] if path else None
        if problem["type"] == NOT_IMPLEMENTED:
            raise not_implemented(str(field)) from error
        code = "missing_required_parameter" if problem["type"] == "missing" else None
        if problem["type"].endswith(WRONG_TYPE):
            code = "invalid_type"
        raise bad_request(f"'{field}': {problem['msg']}", field, code) from error


_DIGITS = bytes(48 if 48 <= byte < 58 else 0 for byte in range(256))
_LONG = b"0" * 19  # as an integer of more than 64 bits is at least


def may_hold_long_integers(text: bytes) -> bool:
    """Whether integers of more than 64 bits may be in JSON, of which orjson makes floats."""
    return _LONG in text.translate(_DIGITS)


def read_object(text: str, place: str) -> dict[str, Any]:
    """A JSON object that clients send as a text. Its integers may be of any size.

    Raises:
        ApiError: 400 naming ``place`` where it is none, or holds more than a body may.
    """
    if holds_too_much(text.encode()):
        most = f"{MAX_JSON_VALUES} values or {MAX_JSON_NAMES} names"
        raise bad_request(f"'{place}' holds more than {most}", place)
    try:
        told = orjson.loads(text)
        if may_hold_long_integers(text.encode()):
            told = json.loads(text)  # which keeps them
    except orjson.JSONDecodeError as error:
        raise bad_request(f"'{place}' is no JSON: {error}", place) from error
    except RecursionError as error:
        raise bad_request(f"'{place}' is nested too deeply", place) from error
    if not isinstance(told, dict):
        raise bad_request(f"'{place}' must be a JSON object", place)
    return told


def _first_problem(error: ValidationError) -> ErrorDetails:
    """That of the first field. One that may be of several types has a problem with each of them:
    what is wrong with a value of the right type says most."""
    problems = error.errors(include_url=False, include_input=False)
    field = problems[0]["loc"][:1]
    return max(
        (problem for problem in problems if problem["loc"][:1] == field),
        key=lambda problem: (not problem["type"].endswith(WRONG_TYPE), len(problem["loc"])),
    )
