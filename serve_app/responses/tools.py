"""Tools, the choice of one, and the format of text: what has JSON schemas in it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lexshard.serve_app.openai.errors import bad_request, shortened
from lexshard.serve_app.openai.protocol import NotImplementedField, StrictModel
from lexshard.serve_app.over_chat.reading import inside, kind_of, read_at, refused_kind
from lexshard.serve_app.tools.offer import MAX_GRAMMAR_CHARACTERS, MAX_TOOLS, ToolName

NO_SERVER_TOOLS = "this server runs no tools; there are function and custom"


class ToolFields(StrictModel):
    name: ToolName
    description: str | None = None
    defer_loading: Annotated[Any, NotImplementedField(False)] = None
    allowed_callers: Annotated[Any, NotImplementedField(["direct"])] = None


class FunctionFields(ToolFields):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None  # tells only who runs it


class CustomFields(ToolFields):
    type: Literal["custom"]
    format: dict[str, Any] | None = None


class GrammarFields(StrictModel):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


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
        told = {"name": function.name, "description": function.description}
        told |= {"parameters": function.parameters, "strict": function.strict}
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
    told: dict[str, Any] = {"name": read.name, "schema": schema}
    if read.strict is not None:
        told["strict"] = read.strict
    if read.description is not None:
        told["description"] = read.description
    return {"type": "json_schema", "json_schema": told}
