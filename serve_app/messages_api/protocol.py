"""The bodies of ``POST /v1/messages`` and ``/v1/messages/count_tokens``: their fields, and what the
lists in them hold."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import ConfigDict, Field

from lexshard.actors.receipts.stop_rule import MAX_STOP_STRINGS
from lexshard.serve_app.openai.errors import bad_request, shortened
from lexshard.serve_app.openai.protocol import (
    HELLO,
    MAX_MESSAGES,
    AtLeastOne,
    Ignored,
    NotImplementedField,
    RequestName,
    SeedNumber,
    StopString,
    StrictModel,
    shown_as,
    told_as,
)
from lexshard.serve_app.over_chat.chat_body import given
from lexshard.serve_app.over_chat.reading import Piece
from lexshard.serve_app.tools.offer import MAX_TOOLS, ToolName

# What Claude Code says of a context that is to stay as it is.
KEEPS_ALL: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)
System = str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None


class ThinkingOptions(StrictModel):
    """``budget_tokens`` is of ``enabled``."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: AtLeastOne | None = None
    display: Literal["summarized", "omitted"] | None = None


class MessagesToolChoice(StrictModel):
    """``name`` is of ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(StrictModel):
    """``format`` is read by `response_format`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class PromptFields(StrictModel):
    """What becomes the prompt. ``messages`` and ``system`` are read in ``translation.py``, tools by
    `chat_tools`."""

    model: str | None = None
    messages: Annotated[
        list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    system: Annotated[Any, told_as(System)] = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = (
        None
    )
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None

    # Accepted because clients send them; they change nothing here.
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None

    context_management: Annotated[Any, NotImplementedField(*KEEPS_ALL)] = None
    mcp_servers: Annotated[Any, NotImplementedField([])] = None


class CountTokensRequest(PromptFields):
    """``POST /v1/messages/count_tokens``."""

    model_config = ConfigDict(json_schema_extra=shown_as({"messages": HELLO}))


class MessagesRequest(PromptFields):
    """``POST /v1/messages``."""

    model_config = ConfigDict(json_schema_extra=shown_as({"messages": HELLO, "max_tokens": 60}))

    max_tokens: AtLeastOne
    stream: bool | None = None
    stop_sequences: (
        Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None
    ) = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: SeedNumber | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: RequestName | None = None
    receipt: bool | None = None

    # Accepted because clients send them; they change nothing here.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    diagnostics: Ignored = None

    container: Annotated[Any, NotImplementedField()] = None
    thread: Annotated[Any, NotImplementedField()] = None


NO_IMAGES = "this model reads text only"
NO_SERVER_TOOLS = "this server runs no tools, and knows no schemas of any: send 'input_schema'"
FORMAT_NAME = "output"


class BlockFields(StrictModel):
    cache_control: dict[str, Any] | None = None


class TextBlock(BlockFields):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(BlockFields):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(BlockFields):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    caller: Annotated[Any, NotImplementedField({"type": "direct"})] = None

    def as_call(self) -> dict[str, Any]:
        """As an entry of ``tool_calls``."""
        arguments = orjson.dumps(self.input).decode()
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolResultBlock(BlockFields):
    """``content`` is text, or a list of blocks. The model reads it, and whether it ``is_error``
    only there."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: Any = None
    is_error: bool | None = None


class SchemaTool(BlockFields):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    input_examples: list[Any] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Annotated[Any, NotImplementedField(False)] = None
    allowed_callers: Annotated[Any, NotImplementedField(["direct"])] = None


def read_texts(content: Piece) -> list[str]:
    """The texts of a string or of a list of blocks of text.

    Raises:
        ApiError: 400 for anything else.
    """
    if isinstance(content.value, str):
        return [content.value]
    return list(map(read_text, content.entries("blocks")))


def read_text(block: Piece) -> str:
    """Raises:
    ApiError: 400 for a block that is no text.
    """
    block.kind(("text",), NO_IMAGES)
    return block.read(TextBlock).text


def chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as those of a chat completion.

    Raises:
        ApiError: 400 naming the place of what is wrong, or of a tool without a schema.
    """
    told: list[dict[str, Any]] = []
    for tool in Piece(tools, "tools").entries():
        tool.kind(("custom",), NO_SERVER_TOOLS, usual="custom")
        read = tool.read(SchemaTool)
        function = {"name": read.name, "parameters": read.input_schema}
        function |= given(read, ("description", "strict"))
        told.append({"type": "function", "function": function})
    return told


def chosen(choice: MessagesToolChoice, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """``tool_choice`` as fields of a chat completion.

    Raises:
        ApiError: 400 for the choice of a tool that there is not.
    """
    told: dict[str, Any] = {}
    if choice.disable_parallel_tool_use is not None and tools:
        told["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        name = Piece(choice.name, "tool_choice.name")
        if choice.name is None:
            raise name.wrong(" is required", "missing_required_parameter")
        if all(tool["function"]["name"] != choice.name for tool in tools):
            raise name.wrong(f": there is no tool named '{shortened(choice.name)}'")
        told["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.type == "any":
        if not tools:
            raise bad_request("'tool_choice' is any, but there are no tools", "tool_choice")
        told["tool_choice"] = "required"
    elif tools:
        told["tool_choice"] = choice.type
    return told


def response_format(output_format: dict[str, Any]) -> dict[str, Any]:
    """``output_config.format`` as ``response_format`` of a chat completion.

    Raises:
        ApiError: 400 naming the place of what is wrong.
    """
    form = Piece(output_format, "output_config.format")
    form.kind(("json_schema",), "there is json_schema")
    schema = form.part("schema")
    if not isinstance(schema.value, dict):
        raise schema.wrong(" must be an object", "invalid_type")
    told = {"name": FORMAT_NAME, "schema": schema.value, "strict": True}
    return {"type": "json_schema", "json_schema": told}
