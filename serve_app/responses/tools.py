"""Tools, the choice of one, and the format of text: what has JSON schemas in it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lexshard.serve_app.openai.errors import bad_request, shortened
from lexshard.serve_app.openai.protocol import NotImplementedField, StrictModel
from lexshard.serve_app.over_chat.reading import inside, kind_of, read_at, refused_kind
from lexshard.serve_app.responses.items import CUSTOM_ARGUMENT, Name

# A tool that takes text alone is a function of one argument to the model.
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
    "additionalProperties": False,
}


class ToolFields(StrictModel):
    name: Name
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


class NamedTool(StrictModel):
    type: Literal["function", "custom"]
    name: str


class AllowedTools(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


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
    told = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    seen: set[str] = set()
    for index, tool in enumerate(told):
        name = tool["function"]["name"]
        if name in seen:
            where = f"tools[{index}].name"
            raise bad_request(f"'{where}': there are two tools named '{shortened(name)}'", where)
        seen.add(name)
    return told


def _chat_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = kind_of(tool, place)
    function: dict[str, Any]
    if kind == "function":
        fields = read_at(FunctionFields, tool, place)
        function = {"name": fields.name, "description": fields.description}
        function |= {"parameters": fields.parameters, "strict": fields.strict}
    elif kind == "custom":
        custom = read_at(CustomFields, tool, place)
        if custom.format is not None:
            where = inside(place, "format")
            if (form := kind_of(custom.format, where)) != "text":
                raise refused_kind(where, form, "not implemented by this server")
        function = {"name": custom.name, "description": custom.description}
        function |= {"parameters": CUSTOM_PARAMETERS}
    else:
        raise refused_kind(place, kind, "this server runs no tools; 'function' and 'custom' are")
    known = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": known}


def custom_names(tools: list[dict[str, Any]]) -> frozenset[str]:
    """The names of the tools that take text alone; of `chat_tools` that were read without error."""
    return frozenset(tool["name"] for tool in tools if tool["type"] == "custom")


def chosen_tools(
    choice: Any, tools: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """The tools of a chat completion that may be called, and its ``tool_choice``.

    Raises:
        ApiError: 400 for a choice that is none, or is of a tool that there is not.
    """
    place = "tool_choice"
    if choice is None or (isinstance(choice, str) and choice in ("none", "auto", "required")):
        return tools, choice
    if isinstance(choice, str):
        raise bad_request(f"'{place}' must be none, auto, required or an object", place)
    kind = kind_of(choice, place)
    if kind == "allowed_tools":
        allowed = read_at(AllowedTools, choice, place)
        names = {
            _named(tool, f"{place}.tools[{index}]", tools)
            for index, tool in enumerate(allowed.tools)
        }
        return [tool for tool in tools if tool["function"]["name"] in names], allowed.mode
    if kind not in ("function", "custom"):
        raise refused_kind(place, kind, "this server runs no tools; 'function' and 'custom' are")
    return tools, {"type": "function", "function": {"name": _named(choice, place, tools)}}


def _named(tool: Any, place: str, tools: list[dict[str, Any]]) -> str:
    name = read_at(NamedTool, tool, place).name
    if all(each["function"]["name"] != name for each in tools):
        where = inside(place, "name")
        raise bad_request(f"'{where}': there is no tool named '{shortened(name)}'", where)
    return name


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
