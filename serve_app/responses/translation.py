"""From a request for a response to one for a chat completion, with what has JSON schemas in it:
tools, the choice of one, and the format of text."""

from __future__ import annotations

from collections.abc import Iterator
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
from lexshard.serve_app.over_chat.reading import Piece, read_at
from lexshard.serve_app.responses.items import Conversation
from lexshard.serve_app.responses.protocol import LOGPROBS, ResponsesRequest, Tools, flat_name
from lexshard.serve_app.tools.offer import MAX_TOOLS, CustomGrammar, FunctionDefinition, ToolName

NO_SERVER_TOOLS = "this server runs no tools; there are function, custom and namespace"


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


class NamespaceFields(StrictModel):
    type: Literal["namespace"]
    name: ToolName
    description: str | None = None  # changes nothing
    tools: Tools


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


def chat_tools(tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Tools as those of a chat completion, and where each is in the client's own body.

    Raises:
        ApiError: 400 naming the place of what is wrong, or of a tool that the server would run.
    """
    each = list(_each_tool(Piece(tools, "tools")))
    if len(each) > MAX_TOOLS:
        raise bad_request(f"'tools' holds {len(each)} tools, more than {MAX_TOOLS}", "tools")
    places = {number: tool.place for number, (tool, _) in enumerate(each)}
    return [_chat_tool(*one) for one in each], places


def _each_tool(tools: Piece) -> Iterator[tuple[Piece, str | None]]:
    """Those that a client runs, each with the namespace that it is in. Not `web_search`, which
    Codex sends unasked and vLLM leaves out, too."""
    for tool in tools.entries():
        kind = tool.kind(("function", "custom", "namespace", "web_search"), NO_SERVER_TOOLS)
        if kind == "namespace":
            name = tool.read(NamespaceFields).name
            yield from ((each, name) for each in tool.part("tools").entries())
        elif kind != "web_search":
            yield tool, None


def _chat_tool(tool: Piece, namespace: str | None) -> dict[str, Any]:
    kind = tool.kind(("function", "custom"), NO_SERVER_TOOLS)
    if kind == "function":
        told = given(tool.read(FunctionFields), FunctionDefinition.model_fields)
    else:
        custom = tool.read(CustomFields)
        told = given(custom, ("name", "description"))
        if custom.format is not None:
            told["format"] = _custom_format(tool.part("format"))
    return {"type": kind, kind: told | {"name": flat_name(namespace, told["name"])}}


def _custom_format(form: Piece) -> dict[str, Any]:
    kind = form.kind(("text", "grammar"), "there are text and grammar")
    if kind == "text":
        return {"type": kind}
    return {"type": kind, kind: given(form.read(GrammarFields), CustomGrammar.model_fields)}


def chat_tool_choice(choice: Any, tools: list[dict[str, Any]]) -> str | dict[str, Any]:
    """The ``tool_choice`` of a chat completion with those ``tools``.

    Raises:
        ApiError: 400 for a choice that is none, or is of a tool that there is not.
    """
    piece = Piece(choice, "tool_choice")
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise piece.wrong(" must be none, auto, required or an object")
        return choice
    kind = piece.kind(("function", "custom", "allowed_tools"), NO_SERVER_TOOLS)
    if kind != "allowed_tools":
        return _named(piece, tools)
    mode = piece.read(AllowedTools).mode
    named = [_named(tool, tools) for tool in piece.part("tools").entries()]
    return {"type": kind, kind: {"mode": mode, "tools": named}}


def _named(tool: Piece, tools: list[dict[str, Any]]) -> dict[str, Any]:
    named = tool.read(NamedTool)
    kind, name = named.type, named.name
    if all(each["type"] != kind or each[kind]["name"] != name for each in tools):
        raise tool.part("name").wrong(f": there is no {kind} named '{shortened(name)}'")
    return {"type": kind, kind: {"name": name}}


def response_format(text_format: dict[str, Any]) -> dict[str, Any]:
    """``text.format`` as ``response_format`` of a chat completion.

    Raises:
        ApiError: 400 naming the place of what is wrong.
    """
    form = Piece(text_format, "text.format")
    known = ("text", "json_object", "json_schema")
    kind = form.kind(known, "there are text, json_object and json_schema")
    if kind != "json_schema":
        return {"type": kind}
    schema = form.part("schema")
    others = {name: value for name, value in text_format.items() if name != "schema"}
    read = read_at(JsonSchemaFields, others, form.place)
    if not isinstance(schema.value, dict):
        raise schema.wrong(" must be an object", "invalid_type")
    told = {"name": read.name, "schema": schema.value, **given(read, ("strict", "description"))}
    return {"type": kind, kind: told}


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
    *("model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "priority", "request_id", "receipt", "parallel_tool_calls"),
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
    if asked.instructions:
        message = {"role": "system", "content": asked.instructions}
        conversation.add(message, "instructions")
    conversation.read(earlier, "previous_response_id")
    conversation.read(input_items(asked), "input")
    if not conversation.messages:
        raise bad_request("'input' must not be empty", "input")
    for message in conversation.messages:
        if "reasoning" in message:
            message["reasoning"] = "\n".join(message["reasoning"])
    body = {**given(asked, SAME), "messages": conversation.messages}
    if asked.max_output_tokens is not None:
        body["max_completion_tokens"] = asked.max_output_tokens
    if asked.truncation == "auto":
        body["truncate_prompt_tokens"] = -1
    if LOGPROBS in (asked.include or ()) or asked.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    effort = None if asked.reasoning is None else asked.reasoning.effort
    body |= thinking_fields(reads, effort, None if effort is None else effort != NO_THINKING)
    if asked.chat_template_kwargs:
        body.setdefault("chat_template_kwargs", {}).update(asked.chat_template_kwargs)
    if asked.text is not None and asked.text.format is not None:
        body["response_format"] = response_format(asked.text.format)
    tools, tool_places = chat_tools(asked.tools or [])
    if tools:
        body["tools"] = tools
    if asked.tool_choice is not None:
        choice = chat_tool_choice(asked.tool_choice, tools)
        if choice == "required" and not tools:
            raise bad_request("'tool_choice' is required, but there are no tools", "tool_choice")
        body["tool_choice"] = choice
    return ChatBody(body, conversation.places, tool_places)
