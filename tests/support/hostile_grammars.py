"""Schemas and grammars that take what they can: time, memory, the stack."""

from __future__ import annotations

import json
import random
from typing import Any

KEYWORDS = (
    *("type", "properties", "items", "$ref", "$defs", "enum", "const", "anyOf", "oneOf"),
    *("allOf", "not", "if", "pattern", "format", "minLength", "maxItems", "minimum"),
    *("multipleOf", "required", "additionalProperties", "patternProperties", "$id", "$schema"),
    *("minProperties", "prefixItems", "x-guidance", "", "é", "$dynamicRef", "$anchor"),
)
LEAVES = (
    *(None, True, False, 0, -1, 10**18, 1.5, 1e300, "", "string", "object", "#", "#/$defs/a"),
    *("#/properties/é", "(", "^a+$", "\x00", "http://json-schema.org/draft-04/schema#", "date"),
)


def random_schema(chance: random.Random) -> dict[str, Any]:
    """One of the wrong shape everywhere, with names and values that mean something."""

    def value(depth: int) -> Any:
        kind = chance.random()
        if depth == 0 or kind < 0.3:
            return chance.choice(LEAVES)
        if kind < 0.5:
            return [value(depth - 1) for _ in range(chance.randrange(4))]
        return {chance.choice(KEYWORDS): value(depth - 1) for _ in range(chance.randrange(5))}

    return {chance.choice(KEYWORDS): value(4) for _ in range(3)}


def json_schema(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def doubling(levels: int) -> dict[str, Any]:
    """A schema of few bytes that is 2 ** ``levels`` once its references are followed."""

    def pair(i: int) -> dict[str, Any]:
        below = {"$ref": f"#/$defs/{i}", "type": ["array", "string"]}
        return {"type": "array", "prefixItems": [below, below]}

    definitions = {"0": {"type": "string"}, **{str(i + 1): pair(i) for i in range(levels)}}
    top = {"$ref": f"#/$defs/{levels}", "type": "array"}
    return {"properties": {"x": top}, "$defs": definitions}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


# Where the kernel ends it, its name tells how.
HOSTILE = {
    "memory": json_schema(doubling(25)),
    "time of patterns": json_schema(
        {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(1, 300)]}
    ),
    "time of numbers": json_schema(
        {"properties": {f"p{i}": {"type": "integer", "multipleOf": i + 1000} for i in range(1200)}}
    ),
    "time of terminals": "start: T\nT: " + " & ".join(f"/.*a.{{{i}}}.*/" for i in range(1, 200)),
    "depth of rules": "start: t0\n"
    + "\n".join(f"t{i}: t{i + 1}" for i in range(5000))
    + '\nt5000: "a"',
    "depth of a schema": json_schema(nested(200)),
    "depth of brackets": "start: " + "(" * 20_000,
    "brackets of an expression": "start: /" + "(" * 5000 + ")" * 5000 + "/",
    "fuel": json_schema({"type": "integer", "multipleOf": 999_999_937}),
    "length": json_schema({"minLength": 10**18, "type": "string"}),
    "unheld patterns": json_schema(
        {"type": "string", "minLength": 10_000, "maxLength": 20_000, "pattern": "^(ab|cd)*$"}
    ),
    "a panic": json_schema({"type": "string", "minLength": "a" * 98 + "é" * 200}),
    "half a character": '{"grammars":[{"json_schema":{"const":"\\ud800"}}]}',
    "no grammar": "start: @other",
}
HARMLESS = {
    "repeated choices": "start: /(a|b)*a(a|b){1000}/",
    "repeated repeats": "start: /((a|b){100}){100}/",
    "many items": json_schema({"type": "array", "minItems": 10**9, "items": {"type": "string"}}),
    "a long string": json_schema({"type": "string", "minLength": 10**9}),
    "a large enum": json_schema({"enum": [f"word{i * 7919}" for i in range(5000)]}),
    "ambiguous": 'start: s\ns: s s | "a" | ""',
    "a ring": json_schema({"properties": {"a": {"$ref": "#"}}}),
}
