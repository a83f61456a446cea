"""The bodies of ``POST /v1/responses``: the fields of the body here, what its lists hold beside it
in `lexshard.serve_app.responses.items` and `lexshard.serve_app.responses.translation`."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from lexshard.serve_app.openai.protocol import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    AtLeastOne,
    Ignored,
    NotImplementedField,
    RequestName,
    SeedNumber,
    StrictModel,
    shown_as,
    told_as,
)
from lexshard.serve_app.tools.offer import MAX_TOOLS

MAX_METADATA = 16
MAX_INCLUDED = 64
LOGPROBS: Final = "message.output_text.logprobs"
# All but the first: nothing here ever has it.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Items = str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)]
TOOL_CHOICE_SCHEMA: Final = {
    "anyOf": [
        {"enum": [None, "none", "auto", "required"]},
        {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}},
    ]
}


class ReasoningOptions(StrictModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # There are no summaries: the reasoning itself is told.
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Annotated[Any, NotImplementedField("auto")] = None
    mode: Annotated[Any, NotImplementedField("standard")] = None


class TextOptions(StrictModel):
    """``format`` is read in ``translation.py``, where other JSON schemas are."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStreamOptions(StrictModel):
    include_obfuscation: Annotated[Any, NotImplementedField(False)] = None
    reasoning_summary_delivery: Ignored = None  # there are no summaries


class ResponsesRequest(StrictModel):
    """``POST /v1/responses``. ``input`` is read in ``items.py``, ``tools`` and ``tool_choice`` in
    ``translation.py``."""

    model_config = ConfigDict(
        json_schema_extra=shown_as({"input": "Hello!", "max_output_tokens": 60})
    )

    model: str | None = None
    input: Annotated[Any, told_as(Items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: Tools | None = None
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Included], Field(fail_fast=True, max_length=MAX_INCLUDED)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: AtLeastOne | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
    seed: SeedNumber | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: RequestName | None = None
    receipt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None

    # Accepted because clients send them; they change nothing here.
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    max_tool_calls: AtLeastOne | None = None
    client_metadata: Ignored = None
    access_programs: Ignored = None

    background: Annotated[Any, NotImplementedField(False)] = None
    conversation: Annotated[Any, NotImplementedField()] = None
    prompt: Annotated[Any, NotImplementedField()] = None
    context_management: Annotated[Any, NotImplementedField([])] = None
    moderation: Annotated[Any, NotImplementedField()] = None
    image: Annotated[Any, NotImplementedField()] = None


def flat_name(namespace: str | None, name: str) -> str:
    """What models know a tool in a namespace by, as with vLLM."""
    return name if namespace is None else f"{namespace}__{name}"


def tool_spaces(tools: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Namespace and name of tools in one, by what models know them by."""
    spaces = (tool for tool in tools if tool["type"] == "namespace")
    pairs = ((space["name"], each["name"]) for space in spaces for each in space["tools"])
    return {flat_name(*pair): pair for pair in pairs}
