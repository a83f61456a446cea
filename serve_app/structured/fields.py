"""The fields by which requests say what a reply must look like: OpenAI's, and those of vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from lexshard.serve_app.structured.formats import ConstraintPart, Format

Schema = dict[str, Any]
Choices = Annotated[list[str], Field(fail_fast=True, min_length=1)]


class JsonSchemaFormat(ConstraintPart):
    """A schema by its name. ``strict`` asks for a grammar that holds all of it."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class TagStructure(ConstraintPart):
    """What stands between two texts."""

    begin: Annotated[str, Field(min_length=1)]
    schema_: Annotated[Schema, Field(alias="schema")]
    end: str


class StructuralTag(ConstraintPart):
    """A ``format``; or free text in which each of the ``triggers`` begins one of the
    ``structures``."""

    type: Literal["structural_tag"]
    # Formats hold formats: what reads descriptions may follow that without end.
    format: Annotated[Format | None, WithJsonSchema({"type": ["object", "null"]})] = None
    structures: Annotated[list[TagStructure] | None, Field(fail_fast=True, min_length=1)] = None
    triggers: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None, Field(fail_fast=True, min_length=1)
    ] = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> StructuralTag:
        older = self.structures is not None, self.triggers is not None
        if older != ((self.format is None),) * 2:
            raise PydanticCustomError(
                "structural_tag", "give 'format', or both 'structures' and 'triggers'"
            )
        return self


class TextFormat(ConstraintPart):
    """Nothing is asked for."""

    type: Literal["text"]


class JsonObjectFormat(ConstraintPart):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonFormat(ConstraintPart):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonFormat | StructuralTag, Field(discriminator="type")
]


class StructuredOutputs(ConstraintPart):
    """Exactly one constraint, and how its JSON is written; or only the latter, for another field
    beside it that asks for JSON."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: Schema | str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None


class ConstraintFields(BaseModel):
    """What completions and chat completions share."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
