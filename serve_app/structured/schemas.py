"""JSON Schemas as grammars: how their JSON is written, and where a schema says what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import orjson

from lexshard.serve_app.openai.errors import bad_request, shortened
from lexshard.serve_app.structured.constraint import check_size, left_to_model, not_held

OPTIONS = "x-guidance"  # where llguidance reads options, at the top of a schema
# What a schema stands in, at most, where a whole reply is one grammar:
# {"grammars": [{"json_schema": {"properties": {"arguments": ...}}}]}
_LEVELS_AROUND = 5
# Between two values, and not after the last: a model that likes spaces never came to its end.
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,8}"
_MAPS = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties")
# In regular expressions: what is ahead, behind, or a word's edge.
_LOOKS_AROUND = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[bB])")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# llguidance keeps numbers as float64, to which it adds 1 for a bound that is none of the numbers,
# writes whole ones as int64, of which this is the largest and what larger ones become, and bounds
# of others as decimals. It makes no numbers with more digits than a lone bound of so many.
_LARGEST = 2**63 - 1
_LARGEST_DECIMAL = 2**53
_LARGEST_LONE = 10**18 - 1


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """How JSON is written. ``whitespace`` is a regular expression of what may stand between two
    values, None for nothing; without ``additional``, objects that name their properties have no
    others unless their schema says so."""

    whitespace: str | None = WHITESPACE
    additional: bool = True


def json_grammar(
    schema: dict[str, Any], style: JsonStyle, *, strict: bool, field: str
) -> dict[str, Any]:
    """The grammar of JSON that fits ``schema``. One that is not ``strict`` leaves to the model what
    grammars cannot hold.

    Raises:
        ApiError: 400 naming ``field`` for a schema that is too long or has options of its own.
    """
    if OPTIONS in schema:
        raise bad_request(f"'{field}': '{OPTIONS}' is set by this server", field)
    data = schema_bytes(schema, field)
    check_size(len(data), field)
    schema = orjson.loads(data)
    for _, part in parts(schema):
        if not style.additional and part.keys() & set(_MAPS):
            part.setdefault("additionalProperties", False)
        if not strict:
            for keyword, _ in list(_left_out(part)):
                del part[keyword]
    options: dict[str, Any] = {"lenient": not strict, "coerce_one_of": not strict}
    if style.whitespace is None:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = style.whitespace
    return {**schema, OPTIONS: options}


def schema_bytes(schema: dict[str, Any], field: str) -> bytes:
    """A schema as JSON.

    Raises:
        ApiError: 400 naming ``field`` for one that no grammar could be written around.
    """
    nested: Any = schema
    for _ in range(_LEVELS_AROUND):
        nested = [nested]
    try:
        return orjson.dumps(nested)[_LEVELS_AROUND:-_LEVELS_AROUND]
    except orjson.JSONEncodeError as error:  # it came as JSON
        long = "64-bit" in str(error)
        told = "holds an integer of more than 64 bits" if long else "is nested too deeply"
        raise bad_request(f"'{field}' {told}", field) from error


def _left_out(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keywords that a grammar cannot have, and why."""
    pattern = part.get("pattern")
    if isinstance(pattern, str) and _LOOKS_AROUND.search(pattern):
        yield "pattern", "it looks around"
    named, required = part.get("properties"), part.get("required")
    required = required if isinstance(required, list) else []
    optional = isinstance(named, dict) and any(name not in required for name in named)
    least, others = part.get("minProperties"), part.get("additionalProperties") is not False
    if isinstance(least, int) and least > len(required) and optional and others:
        yield "minProperties", "it would count names that 'properties' has not"
    fractions = "number" in str(part.get("type", "number"))
    for name in ("const", "enum", *_BOUNDS):
        value = part.get(name)
        if _is_inexact(value) or (name in _BOUNDS and _is_far(name, value, fractions)):
            yield name, "a number is too large"


def _is_far(name: str, bound: Any, fractions: bool) -> bool:
    """Whether grammars of numbers up to, or from, such a bound are of others, or cannot be made."""
    if not isinstance(bound, int | float):
        return False
    if fractions:
        return abs(bound) > _LARGEST_DECIMAL
    if name.startswith("exclusive"):
        return abs(bound) >= _LARGEST_DECIMAL
    outwards = bound if name == "minimum" else -bound
    return outwards > _LARGEST_LONE or abs(bound) > _LARGEST


def _is_inexact(value: Any) -> bool:
    """Whether it holds an integer that is another one to llguidance."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_is_inexact, value))
    if not isinstance(value, int):
        return False
    return abs(value) > _LARGEST or float(value) != value != _LARGEST


def parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema that grammars are made from, with its JSON Pointer: itself, those
    inside, and those it refers to, each once; all definitions where it refers to any by a name."""
    for maps in (_MAPS, (*_MAPS, "$defs", "definitions")):
        waiting: list[tuple[str, Any]] = [("#", schema)]
        met: dict[int, tuple[str, dict[str, Any]]] = {}
        by_name = False
        while waiting:
            pointer, part = waiting.pop()
            if not isinstance(part, dict) or id(part) in met:
                continue
            met[id(part)] = pointer, part
            by_name |= "$id" in part and part is not schema  # references in it begin there
            reference = part.get("$ref")
            if isinstance(reference, str):
                waiting.append((reference, resolved(schema, reference)))
                by_name |= waiting[-1][1] is None
            inside = list(_inside(part, maps))
            waiting += [(f"{pointer}/{step}", each) for step, each in reversed(inside)]
        if not by_name:
            break
    yield from met.values()


def unheld_places(schema: dict[str, Any]) -> Iterator[str]:
    """What no grammar holds and llguidance does not tell by itself: patterns that look around,
    integers that float64 does not hold, and counts of names. Those of ``properties`` come once, in
    their order, others may come again."""
    for pointer, part in parts(schema):
        for keyword, why in _left_out(part):
            yield f"'{keyword}' at '{shortened(pointer)}/{keyword}' ({why})"
        least, required = part.get("minProperties"), part.get("required")
        known = len(required) if isinstance(required, list) else 0
        if isinstance(least, int) and least > max(1, known):
            yield f"'minProperties' at '{shortened(pointer)}/minProperties' (a name may come twice)"


def check_held(unheld: Iterator[str], field: str) -> None:
    """Raises:
    ApiError: 400 naming ``field`` for a strict schema of which anything is ``unheld``.
    """
    for each in unheld:
        raise bad_request(f"'{field}': {not_held(each)}", field)


def unheld_notes(schemas: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """What `unheld_places` finds, as notes."""
    return tuple(left_to_model(each) for schema in schemas for each in unheld_places(schema))


def _inside(part: dict[str, Any], maps: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for keyword, value in part.items():
        if keyword in maps and isinstance(value, dict):
            yield from ((f"{keyword}/{escaped(name)}", each) for name, each in value.items())
        elif keyword in (*_LISTS, *_SINGLE) and isinstance(value, list):
            yield from ((f"{keyword}/{i}", each) for i, each in enumerate(value))
        elif keyword in _SINGLE:
            yield keyword, value


def escaped(name: str) -> str:
    """As a step of a JSON Pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def resolved(schema: dict[str, Any], reference: str) -> Any:
    """What a JSON Pointer inside ``schema`` means, None where that is nothing, or it is none."""
    pointer = from_root(schema, reference)
    if pointer[:2] not in ("#", "#/"):
        return None
    value: Any = schema
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isascii() and name.isdecimal() and len(name) < 7:
            index = int(name)
            value = value[index] if index < len(value) else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value


def from_root(schema: dict[str, Any], reference: str) -> str:
    """A reference without the name that ``schema`` has itself."""
    own = schema["$id"] if isinstance(schema.get("$id"), str) else ""
    name, _, fragment = reference.partition("#")
    return f"#{fragment}" if name == own.partition("#")[0] else reference


def under_root(schema: dict[str, Any]) -> dict[str, Any]:
    """Definitions of which `root` is ``schema``, changed so that references in it stay in it."""
    every = [part for _, part in parts(schema)]
    named = [part for part in every if "$id" in part and part is not schema]
    apart = {id(each) for part in named for _, each in parts(part)}  # references there begin there
    for part in every:
        reference = part.get("$ref")
        if isinstance(reference, str) and id(part) not in apart:
            part["$ref"] = in_root(from_root(schema, reference))
    return {"root": {name: value for name, value in schema.items() if name != "$id"}}


def in_root(reference: str) -> str:
    """A reference inside a schema, from around the definitions that `under_root` makes of it."""
    return f"#/$defs/root{reference[1:]}" if reference[:2] in ("#", "#/") else reference
