"""Hostile grammars: each is refused, or let through, in its time, and the next is served."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import pytest

from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.structured.compiling import Compiled, GrammarCompiler
from lexshard.serve_app.structured.constraint import MAX_TEXT_BYTES
from tests.support.mock_engine import MockEngine
from tests.support.mock_server import HELLO, TOKENIZER, Client, says, serve

# By the clock, of half a second of a core that ten others want.
SECONDS = 20.0
GOOD = 'start: "a" | "b"'


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


def outcomes(texts: list[str], compiler: GrammarCompiler | None = None) -> list[Compiled]:
    compiler = compiler or GrammarCompiler(TOKENIZER)
    information = MockEngine().information

    async def run() -> list[Compiled]:
        never = asyncio.Event()
        await compiler.compiled(GOOD, "f", information, never.wait)  # it starts with the first
        found = []
        for text in texts:
            began = time.monotonic()
            found.append(await compiler.compiled(text, "f", information, never.wait))
            assert time.monotonic() - began < SECONDS, text[:200]
        return found

    try:
        return asyncio.run(run())
    finally:
        compiler.close()


def test_hostile_grammars_are_refused_and_the_next_is_served() -> None:
    found = dict(zip(HOSTILE, outcomes([*HOSTILE.values(), GOOD])[:-1], strict=True))
    assert [name for name, outcome in found.items() if outcome.error is None] == []
    slow, large = "it takes too long to compile", "it takes too much memory to compile"
    assert found["memory"].error in (large, slow)  # on a busy machine time ends first
    assert {found[name].error for name in found if name.startswith("time")} == {slow}
    assert found["depth of rules"].error == "it is nested too deeply"


def test_what_only_looks_hostile_is_compiled() -> None:
    for name, outcome in zip(HARMLESS, outcomes([*HARMLESS.values()]), strict=True):
        assert outcome.error is None, name


def test_what_came_of_a_grammar_is_remembered() -> None:
    compiler = GrammarCompiler(TOKENIZER)
    first = outcomes([GOOD, "start: ["], compiler)

    async def again() -> list[Compiled]:
        never = asyncio.Event()
        information: Any = None  # no process would start with it
        return [
            await compiler.compiled(text, "f", information, never.wait)
            for text in (GOOD, "start: [")
        ]

    assert asyncio.run(again()) == first


def test_a_process_that_fails_is_started_again() -> None:
    compiler = GrammarCompiler(TOKENIZER)
    outcomes([GOOD], compiler)
    assert outcomes(['start: "c"'], compiler) == [Compiled(None)]

    async def broken() -> None:
        never = asyncio.Event()
        information = MockEngine().information
        await compiler.compiled('start: "d"', "f", information, never.wait)
        process = compiler._process
        assert process is not None
        process.kill()
        process.wait()
        with pytest.raises(ApiError) as failed:
            await compiler.compiled('start: "e"', "f", information, never.wait)
        assert failed.value.status == 503
        assert (await compiler.compiled('start: "e"', "f", information, never.wait)).error is None

    asyncio.run(broken())
    compiler.close()


def test_the_process_ends_with_its_peer() -> None:
    compiler = GrammarCompiler(TOKENIZER)

    async def compile_one() -> None:
        information = MockEngine().information
        await compiler.compiled(GOOD, "f", information, asyncio.Event().wait)

    asyncio.run(compile_one())
    process = compiler._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()  # as the kernel does for a peer that was killed
    assert process.wait(10) == 0


def test_a_tokenizer_that_llguidance_cannot_read_is_told_of() -> None:
    class Strange(ModelTokenizer):
        def json(self) -> str:
            return "{}"

    found = outcomes([GOOD], GrammarCompiler(Strange(TOKENIZER._tokenizer)))
    assert str(found[0].error).startswith("no grammar can be held with this model's tokenizer")


def test_a_long_grammar_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(ApiError) as refused:
        outcomes(["start: " + " " * MAX_TEXT_BYTES])
    assert (refused.value.status, refused.value.parameter) == (400, "f")


def test_random_schemas_are_answered_by_200_or_400() -> None:
    """Schemas of the wrong shape everywhere, with names and values that mean something."""
    chance = random.Random(7)
    keywords = (
        *("type", "properties", "items", "$ref", "$defs", "enum", "const", "anyOf", "oneOf"),
        *("allOf", "not", "if", "pattern", "format", "minLength", "maxItems", "minimum"),
        *("multipleOf", "required", "additionalProperties", "patternProperties", "$id", "$schema"),
        *("minProperties", "prefixItems", "x-guidance", "", "é", "$dynamicRef", "$anchor"),
    )
    leaves = (
        *(None, True, False, 0, -1, 10**18, 1.5, 1e300, "", "string", "object", "#", "#/$defs/a"),
        *("#/properties/é", "(", "^a+$", "\x00", "http://json-schema.org/draft-04/schema#", "date"),
    )

    def value(depth: int) -> Any:
        kind = chance.random()
        if depth == 0 or kind < 0.3:
            return chance.choice(leaves)
        if kind < 0.5:
            return [value(depth - 1) for _ in range(chance.randrange(4))]
        return {chance.choice(keywords): value(depth - 1) for _ in range(chance.randrange(5))}

    async def check(client: Client) -> None:
        for _ in range(300):
            schema = {chance.choice(keywords): value(4) for _ in range(3)}
            form = {"name": "x", "schema": schema, "strict": chance.random() < 0.5}
            body = {
                "messages": HELLO,
                "response_format": {"type": "json_schema", "json_schema": form},
            }
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.status_code in (200, 400), (schema, reply.text)
            if reply.status_code == 400:
                assert reply.json()["error"]["param"].startswith("response_format"), reply.text

    serve(check, says("{}"))
