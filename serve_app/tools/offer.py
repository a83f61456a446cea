"""The tools of one request: the fields that offer them, and how they are to be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, WrapValidator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidatorFunctionWrapHandler

from lexshard.serve_app.openai.errors import bad_request, shortened
from lexshard.serve_app.openai.protocol import Ignored, StrictModel

MAX_TOOLS = 512
MAX_GRAMMAR_CHARACTERS = 65_536
# Names become part of what models write, between their families' marks.
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
# What clients call the parts of a tool, which stand under the name of its type.
Kind = Literal["function", "custom"]


class TypedPart(StrictModel):
    """An object whose ``type`` is the name of the one other field that it has."""

    type: str

    @model_validator(mode="after")
    def _one_part(self) -> Self:
        for name in type(self).model_fields:
            if name != "type" and (getattr(self, name) is None) == (name == self.type):
                told = "is missing" if name == self.type else f"is of the type '{name}'"
                raise PydanticCustomError("part", f"'{name}' {told}; 'type' is '{self.type}'")
        return self

    @property
    def part(self) -> Any:
        """That field, which is there."""
        return getattr(self, self.type)


class FunctionDefinition(StrictModel):
    """``parameters`` is a JSON schema of an object. ``strict``: what of it cannot be held to is an
    error."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomGrammar(StrictModel):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class CustomFormat(StrictModel):
    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None

    @model_validator(mode="after")
    def _grammar_where_it_belongs(self) -> Self:
        if (self.grammar is None) == (self.type == "grammar"):
            raise PydanticCustomError("part", "'grammar' goes with the type 'grammar', and only it")
        return self


class CustomDefinition(StrictModel):
    """A tool whose input is a text; without ``format`` any."""

    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class ToolDefinition(TypedPart):
    type: Kind
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None
    cache_control: Ignored = None


class ToolReference(StrictModel):
    name: str


class AllowedTool(TypedPart):
    type: Kind
    function: ToolReference | None = None
    custom: ToolReference | None = None


class ToolSubset(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class NamedChoice(TypedPart):
    type: Literal["function", "custom", "allowed_tools"]
    function: ToolReference | None = None
    custom: ToolReference | None = None
    allowed_tools: ToolSubset | None = None


ChoiceWord = Literal["none", "auto", "required"]


def _word_or_object(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, str) and value not in ("none", "auto", "required"):
        raise PydanticCustomError("choice", "must be 'none', 'auto', 'required' or an object")
    return read(value)


ToolChoice = Annotated[
    ChoiceWord | NamedChoice,
    WrapValidator(_word_or_object, json_schema_input_type=ChoiceWord | NamedChoice),
]


# What models know of a custom tool: a function of one text, under this name.
INPUT = "input"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as models are told of it: a function whose arguments match the JSON schema
    ``parameters``. ``custom``: clients get the one argument as a text. ``lark``: what this text
    must match; a regular expression is in the schema. ``place``: the field that has the tool.
    """

    name: str
    description: str | None
    parameters: dict[str, Any]
    place: str
    strict: bool = False
    custom: bool = False
    lark: str | None = None

    def for_template(self) -> dict[str, Any]:
        """What chat templates read."""
        told: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            told["description"] = self.description
        return {"type": "function", "function": told | {"parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class Offer:
    """``callable`` are the tools that may be called, by name; ``required``: one must be.
    ``single``: at most one call."""

    callable: Mapping[str, OfferedTool]
    required: bool
    single: bool


def offered_tools(definitions: Sequence[ToolDefinition] | None) -> tuple[OfferedTool, ...]:
    """Raises:
    ApiError: 400 for two tools of one name, or parameters that are those of no object.
    """
    tools: dict[str, OfferedTool] = {}
    for i, definition in enumerate(definitions or ()):
        place = f"tools.{i}.{definition.type}"
        name = definition.part.name
        if name in tools:
            where = f"{place}.name"
            raise bad_request(f"'{where}': there are two tools named '{shortened(name)}'", where)
        read = _function if definition.type == "function" else _custom
        tools[name] = read(definition.part, place)
    return tuple(tools.values())


def offer(
    tools: Sequence[OfferedTool], choice: str | NamedChoice | None, parallel: bool | None
) -> Offer | None:
    """How ``tools`` may be called; None where none may.

    Raises:
        ApiError: 400 for a choice of tools that are not there.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("'tool_choice' needs 'tools'", "tool_choice")
        return None
    by_name = {tool.name: tool for tool in tools}
    single = parallel is False
    if choice is None or isinstance(choice, str):
        return None if choice == "none" else Offer(by_name, choice == "required", single)
    if choice.allowed_tools is None:
        tool = _called_for(by_name, choice.type, choice.part.name)
        return Offer({tool.name: tool}, required=True, single=True)
    several = choice.allowed_tools.tools
    allowed = [_called_for(by_name, each.type, each.part.name) for each in several]
    required = choice.allowed_tools.mode == "required"
    return Offer({tool.name: tool for tool in allowed}, required, single)


def _called_for(by_name: Mapping[str, OfferedTool], kind: str, name: str) -> OfferedTool:
    tool = by_name.get(name)
    if tool is None or tool.custom != (kind == "custom"):
        raise bad_request(
            f"'tool_choice' names the {kind} '{shortened(name)}', which is not in 'tools'",
            "tool_choice",
        )
    return tool


def _function(function: FunctionDefinition, place: str) -> OfferedTool:
    parameters = function.parameters
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise bad_request(
            f"'{place}.parameters': a function's arguments are an object: 'type' must be 'object'",
            f"{place}.parameters",
        )
    return OfferedTool(
        function.name,
        function.description,
        {"type": "object"} | parameters,
        place,
        strict=bool(function.strict),
    )


def _custom(custom: CustomDefinition, place: str) -> OfferedTool:
    grammar = custom.format.grammar if custom.format else None
    text: dict[str, Any] = {"type": "string"}
    lark = None
    description = custom.description
    if grammar is not None:
        syntax = {"lark": "the Lark grammar", "regex": "the regular expression"}[grammar.syntax]
        told = f"The {INPUT} must match {syntax}:\n{grammar.definition}"
        description = told if description is None else f"{description}\n{told}"
        if grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
        else:
            lark = grammar.definition
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return OfferedTool(custom.name, description, parameters, place, True, True, lark)
