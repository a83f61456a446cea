"""From a request for a response to one for a chat completion, with what has JSON schemas in it:
tools, the choice of one, and the format of text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lexshard.serve_app.openai.errors import bad_request, shortened
from lexshard.serve_app.openai.protocol import NotImplementedField, StrictModel
from lexshard.serve_app.over_chat.chat_body import (
    NO_THINKING,
    ChatBody,
    Reads,
    given,
    thinking_fields,
)
from lexshard.serve_app.over_chat.reading import inside, kind_of, read_at, refused_kind
from lexshard.serve_app.responses.items import Conversation
from lexshard.serve_app.responses.protocol import LOGPROBS, ResponsesRequest
from lexshard.serve_app.tools.offer import MAX_TOOLS, CustomGrammar, FunctionDefinition, ToolName

NO_SERVER_TOOLS = "this server runs no tools; there are function and custom"


class ToolFields(StrictModel):
    defer_loading: Annotated[Any, NotImplementedField(False)] = None
    allowed_callers: Annotated[Any, NotImplementedField(["direct"])] = None


class FunctionFields(FunctionDefinition, ToolFields):
    type: Literal["function"]
    output_schema: dict[str, Any] | None = None  # tells only who runs it


class CustomFields(ToolFields):
    name: ToolName
    description: str | None = None
    type: Literal["custom"]
    format: dict[str, Any] | None = None


class GrammarFields(CustomGrammar):
    type: Literal["grammar"]


class NamedTool(StrictModel):
    type: Literal["function", "custom"]
    name: str


class AllowedTools(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_TOOLS)]


class JsonSchemaFields(StrictModel):
    """Without the schema itself."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    strict: bool | None = None


def chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as those of a chat completion.

    Raises:
        ApiError: 400 naming the place of what is wrong, or of a tool that the server would run.
    """
    return [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _chat_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = kind_of(tool, place)
    told: dict[str, Any]
    if kind == "function":
        function = read_at(FunctionFields, tool, place)
        told = {name: getattr(function, name) for name in FunctionDefinition.model_fields}
    elif kind == "custom":
        custom = read_at(CustomFields, tool, place)
        told = {"name": custom.name, "description": custom.description}
        if custom.format is not None:
            told["format"] = _custom_format(custom.format, inside(place, "format"))
    else:
        raise refused_kind(place, kind, NO_SERVER_TOOLS)
    return {"type": kind, kind: {name: value for name, value in told.items() if value is not None}}


def _custom_format(form: dict[str, Any], place: str) -> dict[str, Any]:
    kind = kind_of(form, place)
    if kind == "text":
        return {"type": "text"}
    if kind != "grammar":
        raise refused_kind(place, kind, "there are text and grammar")
    read = read_at(GrammarFields, form, place)
    return {"type": kind, kind: {"syntax": read.syntax, "definition": read.definition}}


def chat_tool_choice(choice: Any, tools: list[dict[str, Any]]) -> str | dict[str, Any]:
    """The ``tool_choice`` of a chat completion with those ``tools``.

    Raises:
        ApiError: 400 for a choice that is none, or is of a tool that there is not.
    """
    place = "tool_choice"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise bad_request(f"'{place}' must be none, auto, required or an object", place)
        return choice
    kind = kind_of(choice, place)
    if kind == "allowed_tools":
        allowed = read_at(AllowedTools, choice, place)
        named = [
            _named(tool, f"{place}.tools[{index}]", tools)
            for index, tool in enumerate(allowed.tools)
        ]
        return {"type": kind, kind: {"mode": allowed.mode, "tools": named}}
    if kind not in ("function", "custom"):
        raise refused_kind(place, kind, NO_SERVER_TOOLS)
    return _named(choice, place, tools)


def _named(tool: Any, place: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    named = read_at(NamedTool, tool, place)
    kind, name = named.type, named.name
    if all(each["type"] != kind or each[kind]["name"] != name for each in tools):
        where = inside(place, "name")
        raise bad_request(f"'{where}': there is no {kind} named '{shortened(name)}'", where)
    return {"type": kind, kind: {"name": name}}


def response_format(text_format: dict[str, Any]) -> dict[str, Any]:
    """``text.format`` as ``response_format`` of a chat completion.

    Raises:
        ApiError: 400 naming the place of what is wrong.
    """
    place = "text.format"
    kind = kind_of(text_format, place)
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema":
        raise refused_kind(place, kind, "there are text, json_object and json_schema")
    fields = dict(text_format)
    schema = fields.pop("schema", None)
    read = read_at(JsonSchemaFields, fields, place)
    if not isinstance(schema, dict):
        where = inside(place, "schema")
        raise bad_request(f"'{where}' must be an object", where, "invalid_type")
    told = {"name": read.name, "schema": schema, **given(read, ("strict", "description"))}
    return {"type": "json_schema", "json_schema": told}


# Fields of chat completions by those of responses, for what is refused later.
OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
# Told to the model as they are.
SAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "priority",
    "request_id",
    "parallel_tool_calls",
    "user",
)


def input_items(asked: ResponsesRequest) -> list[Any]:
    """Raises:
    ApiError: 400 where ``input`` is neither text nor a list.
    """
    if isinstance(asked.input, str):
        return [{"type": "message", "role": "user", "content": asked.input}]
    if not isinstance(asked.input, list):
        message = "'input' must be a string or a list of items"
        raise bad_request(message, "input", "invalid_type")
    return asked.input


def chat_body(asked: ResponsesRequest, earlier: list[dict[str, Any]], reads: Reads) -> ChatBody:
    """What a chat completion is asked to answer; ``earlier`` are the items of the responses that
    this one follows, and ``reads`` tells whether the chat template reads a variable.

    Raises:
        ApiError: 400 naming the place of what is wrong or is not implemented.
    """
    conversation = Conversation()
    if asked.instructions is not None:
        message = {"role": "system", "content": asked.instructions}
        conversation.add(message, "instructions")
    conversation.read(earlier, "previous_response_id")
    conversation.read(input_items(asked), "input")
    if not conversation.messages:
        raise bad_request("'input' must not be empty", "input")
    body = {**given(asked, SAME), "messages": conversation.messages}
    if asked.max_output_tokens is not None:
        body["max_completion_tokens"] = asked.max_output_tokens
    if asked.truncation == "auto":
        body["truncate_prompt_tokens"] = -1
    if LOGPROBS in (asked.include or ()) or asked.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    effort = None if asked.reasoning is None else asked.reasoning.effort
    body |= thinking_fields(reads, effort, None if effort is None else effort != NO_THINKING)
    if asked.text is not None and asked.text.format is not None:
        body["response_format"] = response_format(asked.text.format)
    tools = chat_tools(asked.tools or [])
    if tools:
        body["tools"] = tools
    if asked.tool_choice is not None:
        choice = chat_tool_choice(asked.tool_choice, tools)
        if choice == "required" and not tools:
            raise bad_request("'tool_choice' is required, but there are no tools", "tool_choice")
        body["tool_choice"] = choice
    return ChatBody(body, conversation.places)
