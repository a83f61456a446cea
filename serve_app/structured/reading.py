"""From the fields of a request to the one constraint they ask for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import orjson
from pydantic import ValidationError

from lexshard.serve_app.known_fields import UNKNOWN_FIELD
from lexshard.serve_app.openai.errors import bad_request, shortened, unknown_parameter
from lexshard.serve_app.openai.protocol import read_object
from lexshard.serve_app.structured.constraint import (
    MAX_GBNF_CHARACTERS,
    Constraint,
    check_size,
)
from lexshard.serve_app.structured.fields import (
    ConstraintFields,
    JsonFormat,
    Schema,
    StructuralTag,
    StructuredOutputs,
)
from lexshard.serve_app.structured.formats import Format, FormatError, FormatGrammar
from lexshard.serve_app.structured.schemas import (
    WHITESPACE,
    JsonStyle,
    check_held,
    json_grammar,
    unheld_notes,
    unheld_places,
)

ANY_OBJECT: Schema = {"type": "object"}
# By which llguidance, too, tells Lark from GBNF.
_LARK = re.compile(r"\s*(%llguidance\b|start\s*:(?!:=))")
# llguidance's reader of GBNF loses the zeros that these begin with.
_ESCAPED = re.compile(r"(\\\\)|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")
Reader = Callable[[], Constraint]


def read_constraint(
    fields: ConstraintFields, special_tokens: Collection[str] = ()
) -> Constraint | None:
    """The constraint that ``fields`` ask for, not compiled yet, or None. ``special_tokens`` of the
    model are no text: a trigger may be one of them.

    Raises:
        ApiError: 400 naming the field for several constraints at once, or for one that is none.
    """
    style, options = _style(fields)
    asked = [
        *_openai(fields, style, special_tokens),
        *_outputs(fields, style, special_tokens),
        *_guided(fields, style),
    ]
    _check_one([name for name, _ in asked])
    for name, reader in asked:
        constraint = reader()
        if options and not constraint.schemas:
            told = f"'{options[0]}' has no effect beside '{name}', which asks for no JSON"
            raise bad_request(told, options[0])
        return constraint
    if fields.structured_outputs is not None:
        raise bad_request(
            "'structured_outputs' needs one of 'json', 'json_object', 'regex', 'choice', "
            "'grammar' and 'structural_tag'",
            "structured_outputs",
        )
    if fields.guided_whitespace_pattern is not None:
        raise bad_request(
            "'guided_whitespace_pattern' needs 'guided_json', or another field that asks for JSON",
            "guided_whitespace_pattern",
        )
    return None


def _check_one(names: Sequence[str]) -> None:
    """Raises:
    ApiError: 400 naming the second of several fields.
    """
    if len(names) > 1:
        raise bad_request(f"'{names[1]}' cannot be used beside '{names[0]}'", names[1])


def _style(fields: ConstraintFields) -> tuple[JsonStyle, list[str]]:
    """How JSON is written, and the fields that say so.

    Raises:
        ApiError: 400 for two that contradict each other.
    """
    wanted = fields.structured_outputs or StructuredOutputs()
    asked = {
        "guided_whitespace_pattern": fields.guided_whitespace_pattern,
        "structured_outputs.whitespace_pattern": wanted.whitespace_pattern,
        "structured_outputs.disable_any_whitespace": "" if wanted.disable_any_whitespace else None,
    }
    spaces = {name: pattern for name, pattern in asked.items() if pattern is not None}
    _check_one([*spaces])
    closed = ["structured_outputs.disable_additional_properties"]
    closed = closed if wanted.disable_additional_properties else []
    space = next(iter(spaces.values()), WHITESPACE) or None
    return JsonStyle(space, additional=not closed), [*spaces, *closed]


def _openai(
    fields: ConstraintFields, style: JsonStyle, specials: Collection[str]
) -> Iterator[tuple[str, Reader]]:
    wanted, name = fields.response_format, "response_format"
    if isinstance(wanted, StructuralTag):
        yield name, lambda: _tagged(wanted, style, name, specials)
    elif isinstance(wanted, JsonFormat):
        asked = wanted.json_schema
        if asked.schema_ is None:
            raise bad_request(f"'{name}': 'json_schema' needs a 'schema'", name)
        yield name, partial(_json, asked.schema_, style, name, strict=bool(asked.strict))
    elif wanted is not None and wanted.type == "json_object":
        yield name, partial(_json, ANY_OBJECT, style, name)


def _outputs(
    fields: ConstraintFields, style: JsonStyle, specials: Collection[str]
) -> Iterator[tuple[str, Reader]]:
    wanted, name = fields.structured_outputs, "structured_outputs"
    if wanted is None:
        return
    if wanted.json_ is not None:
        yield f"{name}.json", partial(_json, wanted.json_, style, f"{name}.json")
    if wanted.json_object:
        yield f"{name}.json_object", partial(_json, ANY_OBJECT, style, f"{name}.json_object")
    if wanted.structural_tag is not None:
        field = f"{name}.structural_tag"
        yield field, partial(_tag, wanted.structural_tag, style, field, specials)
    yield from _texts(name + ".", wanted.regex, wanted.choice, wanted.grammar)


def _guided(fields: ConstraintFields, style: JsonStyle) -> Iterator[tuple[str, Reader]]:
    if fields.guided_json is not None:
        yield "guided_json", partial(_json, fields.guided_json, style, "guided_json")
    yield from _texts("guided_", fields.guided_regex, fields.guided_choice, fields.guided_grammar)


def _texts(
    prefix: str, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[tuple[str, Reader]]:
    if regex is not None:
        yield f"{prefix}regex", partial(_regex, regex, f"{prefix}regex")
    if choice is not None:
        yield f"{prefix}choice", partial(_choice, choice, f"{prefix}choice")
    if grammar is not None:
        yield f"{prefix}grammar", partial(_grammar, grammar, f"{prefix}grammar")


def _json(
    schema: Schema | str, style: JsonStyle, field: str, *, strict: bool = False
) -> Constraint:
    schema = _object(schema, field)
    made = json_grammar(schema, style, strict=strict, field=field)
    if strict:
        check_held(unheld_places(schema), field)
    return Constraint({"json_schema": made}, field, (schema,), unheld_notes([schema]))


def _object(value: Schema | str, field: str) -> Schema:
    """Raises:
    ApiError: 400 for a text that is no JSON object.
    """
    return read_object(value, field) if isinstance(value, str) else value


def _regex(regex: str, field: str) -> Constraint:
    import llguidance  # 8 MB, of which most servers have no need

    check_size(len(regex), field)
    return Constraint({"lark_grammar": f"start: /{llguidance.regex_to_lark(regex)}/"}, field)


def _choice(choice: list[str], field: str) -> Constraint:
    # One terminal: thousands of choices are one state of a lexer, not thousands of rules.
    options = " | ".join(orjson.dumps(each).decode() for each in choice)
    return Constraint({"lark_grammar": f"start: CHOICE\nCHOICE: {options}"}, field)


def _grammar(grammar: str, field: str) -> Constraint:
    check_size(len(grammar), field)
    if any(_LARK.match(line) for line in grammar.splitlines()):
        return Constraint({"lark_grammar": grammar}, field)
    if len(grammar) > MAX_GBNF_CHARACTERS:
        raise bad_request(
            f"'{field}' holds {len(grammar)} characters of GBNF, more than {MAX_GBNF_CHARACTERS}; "
            "Lark may be longer",
            field,
        )
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        lark = gbnf_to_lark(_ESCAPED.sub(_unescaped, grammar))
        return Constraint({"lark_grammar": lark}, field)
    except RecursionError as error:
        raise bad_request(f"'{field}' is nested too deeply", field) from error
    except Exception as error:  # whatever it tells by
        raise bad_request(
            f"'{field}' is neither Lark (no line begins with 'start:') nor GBNF: "
            f"{shortened(str(error))}",
            field,
        ) from error


def _unescaped(escape: re.Match[str]) -> str:
    """The character itself where it is a letter or a sign that a grammar gives no meaning."""
    code = int(escape[2] or escape[3] or "0", 16)
    plain = 0xA0 <= code < 0xD800 or 0xE000 <= code <= 0x10FFFF
    return chr(code) if plain else escape[0]


def _tag(
    value: Schema | str, style: JsonStyle, field: str, special_tokens: Collection[str]
) -> Constraint:
    try:
        tag = StructuralTag.model_validate({"type": "structural_tag", **_object(value, field)})
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, problem["loc"]))
        if problem["type"] == UNKNOWN_FIELD:
            name = ".".join(filter(None, (field, path, problem["msg"])))
            raise unknown_parameter(shortened(name), problem["ctx"]["near"]) from error
        place = f"'{shortened(path)}': " if path else ""
        raise bad_request(f"'{field}': {place}{problem['msg']}", field) from error
    return _tagged(tag, style, field, special_tokens)


def _tagged(
    tag: StructuralTag, style: JsonStyle, field: str, special_tokens: Collection[str]
) -> Constraint:
    from llguidance import StructTag

    if tag.format is not None:
        return _formatted(tag.format, style, field, special_tokens)
    structures, triggers = tag.structures or [], tag.triggers or []
    tags: list[Any] = []
    for structure in structures:
        trigger = next((each for each in triggers if structure.begin.startswith(each)), None)
        if trigger is None:
            raise bad_request(
                f"'{field}': none of 'triggers' begins '{shortened(structure.begin)}'", field
            )
        schema = json_grammar(structure.schema_, style, strict=False, field=field)
        tags.append(
            StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end)
        )
    special = any(each.trigger in special_tokens for each in tags)
    lark = StructTag.to_grammar(tags, assume_special=special)
    schemas = tuple(structure.schema_ for structure in structures)
    return Constraint({"lark_grammar": lark}, field, schemas, unheld_notes(schemas))


def _formatted(
    format: Format, style: JsonStyle, field: str, special_tokens: Collection[str]
) -> Constraint:
    from llguidance import regex_to_lark

    grammar = FormatGrammar(
        json_of=partial(json_grammar, style=style, strict=False, field=field),
        lark_of=lambda text: str(_grammar(text, field).grammar["lark_grammar"]),
        regex_of=regex_to_lark,
        special_tokens=special_tokens,
    )
    try:
        lark = grammar.text(format)
    except FormatError as error:
        raise bad_request(f"'{field}': {shortened(str(error))}", field) from error
    check_size(len(lark), field)
    schemas = tuple(grammar.schemas)
    return Constraint({"lark_grammar": lark}, field, schemas, unheld_notes(schemas))
