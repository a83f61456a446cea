"""What is wrong with tools and with histories of calls is a 400 that names the field."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lexshard.serve_app.tools.families import FAMILIES_BY_NAME
from tests.support.mock_engine import MockEngine, byte_tokenizer
from tests.support.mock_server import HELLO, Client, serve
from tests.support.tool_chats import CALL, CALLED, CLOCK, RESULT, SHELL, WEATHER, tool_tokenizer

PATH = "/v1/chat/completions"
NAMED = {"type": "function", "function": {"name": "clock"}}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def custom(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"syntax": syntax, "definition": definition}
    return {
        "type": "custom",
        "custom": {"name": "c", "format": {"type": "grammar", "grammar": grammar}},
    }


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def called(**fields: Any) -> list[Any]:
    """A conversation with a call that differs so."""
    return [*HELLO, {**CALLED, "tool_calls": [{**CALL, **fields}]}]


# Bodies and the field that is named.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": 3}, "tools"),
    ({"tools": [3]}, "tools.0"),
    ({"tools": [{"type": "function"}]}, "tools.0"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    ({"tools": [{**CLOCK, "custom": {"name": "x"}}]}, "tools.0"),
    ({"tools": [CLOCK, function(name="two words")]}, "tools.1.function.name"),
    ({"tools": [function(parameters=[])]}, "tools.0.function.parameters"),
    ({"tools": [function(no_such=1)]}, "tools.0.function.no_such"),
    ({"tools": [WEATHER, CLOCK, WEATHER]}, "tools.2.function.name"),
    ({"tools": [function(parameters={"type": "array"})]}, "tools.0.function.parameters"),
    (
        {"tools": [CLOCK, function(parameters={"properties": {"a": {"type": "sting"}}})]},
        "tools.1.function.parameters",
    ),
    (
        {"tools": [CLOCK, function(parameters={"$ref": "#/nowhere"}, strict=True)]},
        "tools.1.function.parameters",
    ),
    (
        {
            "tools": [
                CLOCK,
                function(
                    parameters={"properties": {"a": {"type": "array", "uniqueItems": True}}},
                    strict=True,
                ),
            ]
        },
        "tools.1.function.parameters",
    ),
    (
        {"tools": [CLOCK, function(parameters={"minProperties": 2}, strict=True)]},
        "tools.1.function.parameters",
    ),
    ({"tools": [function(parameters={"x-guidance": {}})]}, "tools.0.function.parameters"),
    ({"tools": [custom("lark", "no rule")]}, "tools.0.custom.format"),
    ({"tools": [CLOCK, custom("regex", "(")]}, "tools.1.custom.format"),
    ({"tools": [custom("yacc", "x")]}, "tools.0.custom.format.grammar.syntax"),
    (
        {"tools": [{"type": "custom", "custom": {"name": "c", "format": {"type": "grammar"}}}]},
        "tools.0.custom.format",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "custom", "custom": {"name": "clock"}}},
        "tool_choice",
    ),
    ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice"),
    (
        {"tools": [CLOCK], "tool_choice": {**NAMED, "function": {"name": "clock", "no_such": 1}}},
        "tool_choice.function.no_such",
    ),
    ({"response_format": {"type": "text", "no_such": 1}}, "response_format.no_such"),
    (
        {
            "tools": [CLOCK],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "get_weather"}}],
                },
            },
        },
        "tool_choice",
    ),
    ({"tools": [CLOCK], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [CLOCK], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"messages": [*HELLO, RESULT]}, "messages.1.tool_call_id"),
    ({"messages": [*HELLO, CALLED, {**RESULT, "tool_call_id": "2"}]}, "messages.2.tool_call_id"),
    ({"messages": [*HELLO, RESULT, CALLED]}, "messages.1.tool_call_id"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id"),
    ({"messages": [{**HELLO[0], "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
    ({"messages": [{**HELLO[0], "tool_call_id": "1"}]}, "messages.0.tool_call_id"),
    ({"messages": called(id=3)}, "messages.1.tool_calls.0.id"),
    ({"messages": called(id=None)}, "messages.1.tool_calls.0.id"),
    ({"messages": called(type="custom")}, "messages.1.tool_calls.0"),
    ({"messages": called(function={"name": "f"})}, "messages.1.tool_calls.0.function.arguments"),
    (
        {"messages": called(function={"name": "f", "arguments": "{"})},
        "messages.1.tool_calls.0.function.arguments",
    ),
    (
        {"messages": called(function={"name": "f", "arguments": "[1]"})},
        "messages.1.tool_calls.0.function.arguments",
    ),
    ({"messages": [*HELLO, {"role": "assistant", "content": None}]}, "messages.1.content"),
    ({"messages": [*HELLO, {**CALLED, "reasoning": 5}]}, "messages.1.reasoning"),
]


def test_every_mistake_is_named() -> None:
    async def ask(client: Client) -> None:
        for body, field in BAD:
            reply = await client.post(PATH, json={"messages": HELLO, **body})
            assert reply.status_code == 400, (body, reply.text)
            error = reply.json()["error"]
            assert error["param"] == field, (body, error)
            assert error["code"]
            assert len(error["message"]) < 1000

    serve(ask, MockEngine(), tool_tokenizer())


def test_parameters_that_no_grammar_goes_around_are_named() -> None:
    """Of a model whose calls and JSON answers can be told apart only where both are JSON."""
    tokenizer = byte_tokenizer("{{ tools }}{{ messages }}")
    assert tokenizer.reply_format.tools is FAMILIES_BY_NAME["json"]
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}

    async def ask(client: Client) -> None:
        for parameters in (deep(124), {"not": deep(124)}):
            tools = [CLOCK, function(parameters=parameters)]
            body = {"messages": HELLO, "tools": tools, "response_format": answer}
            reply = await client.post(PATH, json=body)
            assert reply.status_code == 400, reply.text
            assert "nested too deeply" in reply.text
            assert reply.json()["error"]["param"] == "tools.1.function.parameters"

    serve(ask, MockEngine(), tokenizer)


def test_parameters_beside_an_answer_are_left_to_the_model_where_no_grammar_holds_them() -> None:
    """As they are without one: calls and answers are JSON as a whole there."""
    tokenizer = byte_tokenizer("{{ tools }}{{ messages }}")
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    parts = {"a": {"pattern": "(?=x)"}, "b": {"const": 2**53 + 1}}
    body = {"messages": HELLO, "response_format": answer}

    async def ask(client: Client) -> None:
        tools = [function(parameters={"properties": parts})]
        reply = await client.post(PATH, json={**body, "tools": tools})
        assert reply.status_code == 200, reply.text
        looked, large = reply.json()["constraint_notes"]
        assert "'#/properties/a/pattern' (it looks around)" in looked
        assert "'#/properties/b/const' (a number is too large" in large

    serve(ask, MockEngine(), tokenizer)


@pytest.mark.parametrize("template", ["plain", None])
def test_a_model_that_reads_no_tools_is_offered_none(template: str | None) -> None:
    tokenizer = byte_tokenizer() if template else byte_tokenizer(None)

    async def ask(client: Client) -> None:
        history = {"messages": [*HELLO, CALLED, RESULT]}
        for body, field in (({"tools": [CLOCK]}, "tools"), (history, "messages.1.tool_calls")):
            reply = await client.post(PATH, json={"messages": HELLO, **body})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == (field if template else "messages")
        nothing = await client.post(PATH, json={"messages": HELLO, "tools": []})
        assert nothing.status_code == (200 if template else 400)

    serve(ask, MockEngine(), tokenizer)


def test_whatever_comes_as_tools_or_calls_is_no_fault_of_the_server() -> None:
    """Bodies with parts replaced by others, from a seed."""
    chance = random.Random(7)
    junk: list[Any] = [
        *(None, True, 0, -1.5, "", "x", "{}", "é" * 50, [], {}, [None], {"type": "object"}, "none"),
        *(WEATHER, CALL, NAMED, SHELL["custom"], {"": {"": []}}, deep(40), {"$ref": "#"}, ["a", 1]),
    ]

    def shaken(value: Any) -> Any:
        if chance.random() < 0.008:
            return chance.choice(junk)
        if isinstance(value, dict):
            kept = {name: each for name, each in value.items() if chance.random() < 0.996}
            if chance.random() < 0.005:
                kept[chance.choice(["type", "name", "$ref", "anyOf", "x"])] = chance.choice(junk)
            return {name: shaken(each) for name, each in kept.items()}
        return [shaken(each) for each in value] if isinstance(value, list) else value

    whole = {
        "messages": [*HELLO, CALLED, RESULT],
        "tools": [WEATHER, CLOCK, SHELL],
        "tool_choice": NAMED,
        "parallel_tool_calls": False,
    }

    async def ask(client: Client) -> None:
        answered = 0
        for _ in range(400):
            reply = await client.post(PATH, json=shaken(whole))
            assert reply.status_code in (200, 400), reply.text
            answered += reply.status_code == 200
        assert 20 < answered < 380

    serve(ask, MockEngine(), tool_tokenizer())
