"""Grammars of constraints, token by token: what they let through and what they do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher

from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.structured.applying import checked_notes
from lexshard.serve_app.structured.compiling import Compiled
from lexshard.serve_app.structured.constraint import Constraint
from lexshard.serve_app.structured.schemas import parts
from tests.support.constraint_texts import BYTES, LIMITS, matches, read
from tests.support.paths import ROOT

SUITE = json.loads(
    (ROOT / "tests/data/json-schema-test-suite/draft2020-12.json").read_text(encoding="utf-8")
)
POINT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def compiled(constraint: Constraint) -> tuple[LLMatcher, tuple[str, ...]]:
    matcher = LLMatcher(BYTES, constraint.text(), log_level=0, limits=LIMITS)
    outcome = Compiled(matcher.get_error() or None, tuple(matcher.get_grammar_warnings()))
    return matcher, checked_notes(outcome, constraint)


def said(fields: dict[str, Any], text: str) -> bool:
    return matches(compiled(read(fields))[0], text)


def schema_format(schema: Any, strict: bool = False) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":1}', True),
        ('{ "a" : 1 }', True),
        ("{" + "\n" * 8 + '"a":1}', True),
        ("{" + " " * 9 + '"a":1}', False),
        ('{"a":1' + "\t" * 9 + "}", False),
        (' {"a":1}', False),
        ('{"a":1} ', False),
        ('{"a":1}{', False),
        ('{"a":"1"}', False),
        ("{}", False),
    ],
)
def test_json_has_bounded_space_inside_and_none_around(text: str, expected: bool) -> None:
    assert said(schema_format(POINT), text) is expected
    assert said({"guided_json": json.dumps(POINT)}, text) is expected
    assert said({"structured_outputs": {"json": POINT}}, text) is expected


def test_how_json_is_written_can_be_asked_for() -> None:
    tight = {"structured_outputs": {"json": POINT, "disable_any_whitespace": True}}
    assert said(tight, '{"a":1}')
    assert not said(tight, '{"a": 1}')
    one = {"structured_outputs": {"json": POINT, "whitespace_pattern": " ?"}}
    assert said(one, '{ "a": 1}')
    assert not said(one, '{  "a": 1}')
    older = {"guided_json": POINT, "guided_whitespace_pattern": " ?"}
    assert not said(older, '{  "a": 1}')
    beside = {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"disable_any_whitespace": True},
    }
    assert said(beside, '{"a":[1,{}]}')
    assert not said(beside, '{"a": 1}')


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("const", 2**53 + 1),
        ("const", {"a": [0, 2**64 - 1]}),
        ("enum", [1, 1234567890123456789]),
        ("minimum", 2**53 + 1),
        ("minimum", -(2**63)),
        ("maximum", 2**64 - 1),
        ("maximum", 1e19),
        ("exclusiveMaximum", 2**63 - 1),
        *(("exclusiveMaximum", each) for each in (2**60, -(2**53))),
        *(("exclusiveMinimum", each) for each in (2**53, -(2**60))),
        ("minimum", 10**18),
        ("maximum", -(10**18)),
    ],
)
@pytest.mark.parametrize(
    ("place", "referring"),
    [
        ("#", lambda part: part),
        ("#/$defs/Of%3CA%3E", lambda part: {"$ref": "#/$defs/Of%3CA%3E", "$defs": {"Of<A>": part}}),
        ("#/$defs/a", lambda part: {"$ref": "#b", "$defs": {"a": part | {"$anchor": "b"}}}),
        ("#/$defs/a", lambda part: {"$ref": "x:b", "$defs": {"a": part | {"$id": "x:b"}}}),
        ("x:c#/a", lambda part: {"$id": "x:c", "$ref": "x:c#/a", "a": part}),
        ("#/$defs/a", lambda part: {"$id": "x:c", "$ref": "#/$defs/a", "$defs": {"a": part}}),
    ],
)
def test_a_number_that_would_be_taken_for_another_is_left_to_the_model(
    keyword: str, value: Any, place: str, referring: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    schema = referring({"type": ["integer", "object"], keyword: value})
    matcher, notes = compiled(read(schema_format(schema)))
    place = f"'{keyword}' at '{place}/{keyword}' (a number is too large)"
    assert notes == (f"{place} was left to the model",)
    assert matches(matcher, str(2**53 + 1))
    assert matches(matcher, str(2**64))
    with pytest.raises(ApiError, match="no grammar holds "):
        read(schema_format(schema, strict=True))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((each, json.dumps(each)) for each in (0, True, -7, 2**53, 2**60, 2**63 - 1, 0.1)),
        (1.0, "1"),
        (1e22, "1" + "0" * 22),
    ],
)
def test_numbers_that_float64_holds_are_held(value: Any, text: str) -> None:
    for schema in ({"const": value}, {"enum": ["a", {"b": value}, value]}):
        assert said(schema_format(schema, strict=True), text)
        assert not said(schema_format(schema, strict=True), text + "1")
    if type(value) is int:
        schema = {"type": "integer", "maximum": value}
        assert said(schema_format(schema, strict=True), text)
        assert not said(schema_format(schema, strict=True), str(value + 1))


ANY_OBJECT = {"type": "json_object"}
TAG = {"triggers": ["<"], "structures": [{"begin": "<", "schema": POINT, "end": ""}]}


@pytest.mark.parametrize(
    ("fields", "before"),
    [
        (schema_format(POINT), ""),
        ({"response_format": ANY_OBJECT}, ""),
        ({"response_format": {"type": "structural_tag", **TAG}}, "<"),
        ({"structured_outputs": {"json": POINT}}, ""),
        ({"structured_outputs": {"json_object": True}}, ""),
        ({"structured_outputs": {"structural_tag": TAG}}, "<"),
        ({"guided_json": POINT}, ""),
    ],
)
def test_whatever_asks_for_json_can_be_told_how_it_is_written(
    fields: dict[str, Any], before: str
) -> None:
    outputs = fields.get("structured_outputs", {})

    def allowed(**options: Any) -> list[str]:
        older = options.pop("guided_whitespace_pattern", None)
        asked = {**fields, "guided_whitespace_pattern": older}
        if outputs or options:
            asked["structured_outputs"] = {**outputs, **options}
        return [text for text in ('{"a":1}', '{"a": 1}', '{"a":  1}') if said(asked, before + text)]

    assert len(allowed()) == 3
    assert len(allowed(whitespace_pattern=" ?")) == 2
    assert len(allowed(guided_whitespace_pattern=" ?")) == 2
    assert len(allowed(whitespace_pattern="")) == 1
    assert len(allowed(guided_whitespace_pattern="")) == 1
    assert len(allowed(disable_any_whitespace=True)) == 1
    assert len(allowed(disable_any_whitespace=True, whitespace_pattern=None)) == 1
    assert len(allowed(disable_any_whitespace=False, whitespace_pattern=" ?")) == 2


OPTIONS: dict[str, dict[str, Any]] = {
    "guided_whitespace_pattern": {"guided_whitespace_pattern": " "},
    "structured_outputs.whitespace_pattern": {"structured_outputs": {"whitespace_pattern": " "}},
    "structured_outputs.disable_any_whitespace": {
        "structured_outputs": {"disable_any_whitespace": True}
    },
    "structured_outputs.disable_additional_properties": {
        "structured_outputs": {"disable_additional_properties": True}
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a"},
        {"guided_choice": ["a"]},
        {"guided_grammar": 'start: "a"'},
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
    ],
)
def test_an_option_of_json_is_refused_where_there_is_none(
    name: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ApiError, match="has no effect beside") as refused:
        read({**fields, **OPTIONS[name]})
    assert (refused.value.status, refused.value.parameter) == (400, name)


@pytest.mark.parametrize(
    ("older", "options", "name"),
    [
        (" ", {"whitespace_pattern": " "}, "whitespace_pattern"),
        (" ", {"disable_any_whitespace": True}, "disable_any_whitespace"),
        (
            None,
            {"disable_any_whitespace": True, "whitespace_pattern": " "},
            "disable_any_whitespace",
        ),
    ],
)
def test_space_is_asked_for_once(older: str | None, options: dict[str, Any], name: str) -> None:
    fields = {"guided_whitespace_pattern": older, "structured_outputs": options}
    with pytest.raises(ApiError, match="cannot be used beside") as refused:
        read({"response_format": ANY_OBJECT, **fields})
    assert refused.value.parameter == f"structured_outputs.{name}"


def test_objects_can_be_closed() -> None:
    nested = {"type": "object", "properties": {"b": POINT, "c": {"additionalProperties": True}}}
    text = '{"b":{"a":1,"x":2},"c":{"x":2}}'
    assert said({"structured_outputs": {"json": nested}}, text)
    closed = {"structured_outputs": {"json": nested, "disable_additional_properties": True}}
    assert not said(closed, text)
    assert said(closed, '{"b":{"a":1},"c":{"x":2}}')
    assert "additionalProperties" not in nested


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"x":[null]}', "[]"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"guided_regex": r"[ab]/\d"}, "a/7", "a/x"),
        ({"structured_outputs": {"regex": "^(ab)+$"}}, "abab", "aba"),
        ({"guided_choice": ["a", 'é😀/"\n', "<|end|>", "\\x41"]}, 'é😀/"\n', "A"),
        ({"guided_choice": ["a", ""]}, "", "b"),
        ({"structured_outputs": {"choice": ["<|end|>", "b"]}}, "<|end|>", "<"),
        ({"guided_grammar": 'start: "a" b\nb: "b" | "c" b'}, "accb", "acc"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | b-c\nb-c ::= [0-9]+'}}, "07", "a0"),
        ({"guided_grammar": 'root ::= "\\u00e9" [\\u00e0-\\u00ff]'}, "éà", "éa"),
        ({"guided_grammar": 'root ::= "\\U0001F389\\u4e00"'}, "\U0001f389一", "\U0001f389"),
    ],
)
def test_what_is_asked_for_is_let_through(fields: dict[str, Any], right: str, wrong: str) -> None:
    assert said(fields, right)
    assert not said(fields, wrong)


def test_a_structural_tag_holds_what_follows_its_trigger() -> None:
    structures = [
        {"begin": "<f=point>", "schema": POINT, "end": "</f>"},
        {"begin": "<f=é😀>", "schema": {"type": "object"}, "end": ""},
    ]
    tag = {"structures": structures, "triggers": ["<f="]}
    for fields in (
        {"response_format": {"type": "structural_tag", **tag}},
        {"structured_outputs": {"structural_tag": tag}},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
    ):
        matcher, _ = compiled(read(fields))
        assert matches(matcher, "none at all, <f")
        assert matches(matcher, 'so: <f=point>{"a": 1}</f> and <f=é😀>{}.')
        assert not matches(matcher, "<f=other>{}")
        assert not matches(matcher, '<f=point>{"b')
        assert not matches(matcher, "<f=point>{" + " " * 9)


def test_a_trigger_may_be_a_special_token() -> None:
    tag = {
        "structures": [{"begin": "<|call|>f", "schema": POINT, "end": ""}],
        "triggers": ["<|call|>"],
    }
    fields = {"structured_outputs": {"structural_tag": tag}}
    assert '"<|call|>"' in read(fields).grammar["lark_grammar"]
    assert '"<|call|>"' not in read(fields, ("<|call|>",)).grammar["lark_grammar"]


NESTED = {
    "type": "object",
    "properties": {"a/b": {"items": {"$ref": "#/$defs/c"}}},
    "$defs": {"c": {"anyOf": [{"type": "null"}, {"not": {"type": "string"}}]}, "d": {"not": {}}},
}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (NESTED, "'not' at '#/$defs/c/anyOf/1/not'"),
        ({"items": [{"format": "iri"}]}, "'format' 'iri' at '#/items/0/format'"),
        ({"properties": {"a~b/c": {"if": {}}}}, "'if' at '#/properties/a~0b~1c/if'"),
        (
            {"prefixItems": [{"oneOf": [{}, {"type": "null"}]}]},
            "'oneOf' at '#/prefixItems/0/oneOf'",
        ),
        ({"minProperties": 3, "required": ["a"]}, "'minProperties' at '#/minProperties'"),
        ({"properties": {"a": {"pattern": r"^(?!\.)x"}}}, "'pattern' at '#/properties/a/pattern'"),
        ({"type": "string", "pattern": r"a\\\bc"}, "'pattern' at '#/pattern'"),
    ],
)
def test_what_no_grammar_holds_is_told_by_its_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(ApiError) as refused:
        compiled(read(schema_format(schema, strict=True)))
    assert (refused.value.status, refused.value.parameter) == (400, "response_format")
    assert f"no grammar holds {place}" in refused.value.message
    _, notes = compiled(read(schema_format(schema)))
    assert len(notes) == 1
    assert notes[0].startswith(place)
    assert notes[0].endswith("was left to the model")


def test_a_pattern_that_looks_around_leaves_the_rest_held() -> None:
    mail = {"type": "string", "maxLength": 3, "pattern": "^(?!x)a"}
    matcher, notes = compiled(read({"guided_json": {"properties": {"m": mail}}}))
    assert notes == (
        "'pattern' at '#/properties/m/pattern' (it looks around) was left to the model",
    )
    assert matches(matcher, '{"m":"xyz"}')
    assert not matches(matcher, '{"m":"abcd"}')
    assert "pattern" in mail
    held = {"type": "string", "pattern": r"^\\b\(?=$"}
    assert compiled(read(schema_format(held, strict=True)))[1] == ()


def test_a_tag_tells_what_of_its_schemas_is_left_to_the_model() -> None:
    schema = {"type": "string", "pattern": "^(?!x)"}
    structures = [{"begin": "<", "schema": schema, "end": ""}]
    for tag in (
        {"triggers": ["<"], "structures": structures},
        {"format": {"type": "json_schema", "json_schema": schema}},
    ):
        fields = {"response_format": {"type": "structural_tag", **tag}}
        assert read(fields).notes == (
            "'pattern' at '#/pattern' (it looks around) was left to the model",
        )


def test_what_a_grammar_holds_is_told_of_nothing() -> None:
    assert compiled(read(schema_format(POINT, strict=True)))[1] == ()
    three = {"minProperties": 2, "required": ["a", "b"]}
    optional = POINT | {"minProperties": 1, "properties": {"a": {}, "b": {}}}
    for schema in (three, optional):
        assert compiled(read(schema_format(schema, strict=True)))[1] == ()


def test_references_are_walked_once() -> None:
    ring = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    assert [place for place, _ in parts(ring)] == ["#", "#/$defs/a", "#/$defs/b"]
    astray = {"anyOf": [{"$ref": "#/x/9/y"}, {"$ref": "http://a/b"}, {"$ref": 3}, True]}
    assert len(list(parts(astray))) == 4


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("keyword", SUITE)
def test_no_wrong_instance_of_the_json_schema_suite_passes(keyword: str, strict: bool) -> None:
    """Where the grammar holds all of the schema: either it is refused, or notes tell."""
    for group in SUITE[keyword]:
        if isinstance(group["schema"], bool):
            continue
        try:
            matcher, notes = compiled(read(schema_format(group["schema"], strict)))
        except ApiError:
            continue
        for description, instance, valid in group["tests"]:
            passes = matches(matcher, json.dumps(instance, ensure_ascii=False))
            assert valid or notes or not passes, (group["description"], description)


def test_most_of_the_json_schema_suite_is_held_strictly() -> None:
    """So that the test above tests something."""
    right = wrong = 0
    for group in (each for groups in SUITE.values() for each in groups):
        if isinstance(group["schema"], bool):
            continue
        try:
            matcher, _ = compiled(read(schema_format(group["schema"], strict=True)))
        except ApiError:
            continue
        for _, instance, valid in group["tests"]:
            passes = matches(matcher, json.dumps(instance, ensure_ascii=False))
            right += passes and valid
            wrong += not passes and not valid
    assert right > 300
    assert wrong > 200
