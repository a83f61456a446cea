"""The fields by which clients offer tools, and what they say of their calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, WrapValidator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidatorFunctionWrapHandler

from lexshard.serve_app.openai.protocol import StrictModel

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

    @property
    def name(self) -> str:
        part = self.function or self.custom
        assert part is not None  # checked
        return part.name


class ToolReference(StrictModel):
    name: str


class AllowedTool(TypedPart):
    type: Kind
    function: ToolReference | None = None
    custom: ToolReference | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Its type and name."""
        part = self.function or self.custom
        assert part is not None  # checked
        return self.type, part.name


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
