"""Requests that say what a reply must match: what engines are handed, and what clients are told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from openai import OpenAI
from pydantic import BaseModel

from lexshard.actors.messages import SamplingParameters
from tests.support.mock_engine import MockEngine
from tests.support.mock_server import HELLO, Client, listening, post, says, serve, stream

PATHS = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": HELLO}}
LOOSE = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
NOTE = "'not' at '#/properties/a/not' was left to the model"


def schema_format(schema: Any, **others: Any) -> dict[str, Any]:
    named = {"name": "answer", "schema": schema, **others}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def handed(engine: MockEngine) -> list[SamplingParameters]:
    return [request.parameters for request in engine.requests]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}'),
        (schema_format({"enum": ["x", 3]}, strict=True, description="one of two"), '"x"'),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "aba"),
        ({"guided_choice": ["one", "two"]}, "two"),
    ],
)
def test_the_engine_is_handed_a_grammar(path: str, fields: dict[str, Any], right: str) -> None:
    engine = says(right)
    reply = post(path, {**PATHS[path], **fields, "n": 2, "max_tokens": 20}, engine)
    assert reply.status_code == 200, reply.text
    assert "constraint_notes" not in reply.json()
    first, second = handed(engine)
    assert first.grammar == second.grammar
    matcher = LLMatcher(LLTokenizer("byte"), str(first.grammar), log_level=0)
    assert matcher.try_consume_tokens(list(right.encode())) == len(right)
    assert matcher.is_accepting()


@pytest.mark.parametrize("path", PATHS)
def test_what_asks_for_nothing_is_no_grammar(path: str) -> None:
    engine = says("x")
    nothing = dict.fromkeys(("structured_outputs", "guided_json", "guided_whitespace_pattern"))
    for fields in ({}, {"response_format": {"type": "text"}}, nothing):
        assert post(path, {**PATHS[path], **fields}, engine).status_code == 200
    assert [parameters.grammar for parameters in handed(engine)] == [None] * 3


@pytest.mark.parametrize("path", PATHS)
def test_a_reply_tells_what_was_left_to_the_model(path: str) -> None:
    body = {**PATHS[path], **schema_format(LOOSE)}
    assert post(path, body, says("{}")).json()["constraint_notes"] == [NOTE]
    chunks = stream(path, {**body, "n": 2}, says("{}"))
    told = [chunk["choices"][0]["index"] for chunk in chunks if "constraint_notes" in chunk]
    assert sorted(told) == [0, 1]


CHOICE = {"guided_choice": ["a"]}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format", "'json_schema'"),
    ({"response_format": "json"}, "response_format", "dictionary"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        "needs a 'schema'",
    ),
    (schema_format(["object"]), "response_format.json_schema.schema", "dictionary"),
    (schema_format({"type": "objekt"}), "response_format", "objekt"),
    (schema_format({"enum": []}), "response_format", "Unsatisfiable"),
    (schema_format(LOOSE, strict=True), "response_format", "'#/properties/a/not'"),
    (schema_format({"$ref": "http://a.example/b"}), "response_format", "http://a.example/b"),
    (schema_format({"$ref": "#"}), "response_format", "nothing matches it"),
    (schema_format({"x-guidance": {}}), "response_format", "'x-guidance' is set by this server"),
    (schema_format({"pattern": "(?=a)"}, strict=True), "response_format", "looks around"),
    (schema_format({"const": 2**53 + 1}, strict=True), "response_format", "'const' at '#/const'"),
    ({"guided_json": f'{{"const": {2**64}}}'}, "guided_json", "an integer of more than 64 bits"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "unknown field"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "string"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.choice",
        "beside 'structured_outputs.regex'",
    ),
    (
        {"structured_outputs": {"json": "[1]"}},
        "structured_outputs.json",
        "must be a JSON object",
    ),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "valid dictionary"),
    (
        {"structured_outputs": {"structural_tag": {"structures": []}}},
        "structured_outputs.structural_tag",
        "'structures'",
    ),
    (
        {"response_format": {"type": "json_object"}, **CHOICE},
        "guided_choice",
        "beside 'response_format'",
    ),
    ({"guided_json": "{"}, "guided_json", "is no JSON"),
    ({"guided_json": '{"a":' * 600}, "guided_json", "is no JSON"),
    ({"guided_json": '{"a":' * 300 + "1" + "}" * 300}, "guided_json", "nested too deeply"),
    # As deep as JSON is written, and a grammar stands around it.
    *(
        ({"guided_json": '{"a":' * depth + "1" + "}" * depth}, "guided_json", "nested too deeply")
        for depth in range(248, 256)
    ),
    ({"guided_regex": "["}, "guided_regex", "unclosed"),
    ({"guided_regex": "a" * 270_000}, "guided_regex", "bytes, more than 262144"),
    ({"guided_grammar": "a: b"}, "guided_grammar", "neither Lark"),
    ({"guided_grammar": "start: a"}, "guided_grammar", "a"),
    ({"guided_grammar": "start: start"}, "guided_grammar", "nothing matches it"),
    ({"guided_grammar": "start: a\na[max_tokens=3]: /.*/"}, "guided_grammar", "'max_tokens'"),
    ({"guided_grammar": "root ::= " + "(" * 9000}, "guided_grammar", "nested too deeply"),
    ({"guided_grammar": 'root ::= "' + "a" * 17_000}, "guided_grammar", "characters of GBNF"),
    ({"guided_choice": []}, "guided_choice", "at least 1"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs 'guided_json'"),
    ({**CHOICE, "min_tokens": 2}, "min_tokens", "beside 'guided_choice'"),
    ({**CHOICE, "ignore_eos": True}, "ignore_eos", "beside 'guided_choice'"),
    ({**CHOICE, "allowed_token_ids": [97]}, "allowed_token_ids", "beside 'guided_choice'"),
]


def test_what_is_wrong_is_told_by_its_field() -> None:
    async def check(client: Client) -> None:
        for path, base in PATHS.items():
            for fields, parameter, words in BAD:
                reply = await client.post(path, json={**base, **fields})
                error = reply.json()["error"]
                assert reply.status_code == 400, (fields, reply.text)
                assert error["param"] == parameter, (fields, error)
                assert words in error["message"], (fields, error)
                assert len(error["message"]) < 400

    serve(check, engine := says("x"))
    assert engine.requests == []


UNKNOWN: list[tuple[Any, str]] = [
    ({"type": "text", "schema": {}}, "response_format.schema"),
    ({"type": "json_object", "json_schema": {}}, "response_format.json_schema"),
    (
        {"type": "json_schema", "json_schema": {"schema": {}, "strikt": True}},
        "response_format.json_schema.strikt",
    ),
    ({"type": "structural_tag", "format": {"type": "any_text"}, "x": 1}, "response_format.x"),
]


def test_unknown_names_ask_for_nothing_where_they_are_null() -> None:
    async def check(client: Client) -> None:
        async def asked(**fields: Any) -> Any:
            return await client.post("/v1/completions", json={"prompt": "a", **fields})

        def told(reply: Any) -> tuple[str, str]:
            error = reply.json()["error"]
            return error["code"], error["param"]

        for wanted, name in UNKNOWN:
            assert told(await asked(response_format=wanted)) == ("unknown_parameter", name)
        nothing = {"regexp": None, "json": {"type": "object"}, "schema": None}
        for known in (
            {"response_format": {"type": "json_object", "json_schema": None}},
            {"response_format": {"type": "text", "schema": None}},
            {"structured_outputs": nothing},
        ):
            assert (await asked(**known)).status_code == 200
        for key, value in (("x", 1), ("x", None)):
            tag = {"format": {"type": "const_string", "value": "a", key: value}, key: None}
            reply = await asked(structured_outputs={"structural_tag": tag})
            if value is None:
                assert reply.status_code == 200, reply.text
            else:
                place = "structured_outputs.structural_tag.format.const_string.x"
                assert told(reply) == ("unknown_parameter", place)

    serve(check, says("{}"))


def test_nothing_but_an_echo_cannot_be_constrained() -> None:
    body = {"prompt": "a", "echo": True, "max_tokens": 0}
    assert post("/v1/completions", body, says("")).status_code == 200
    reply = post("/v1/completions", {**body, **CHOICE}, says(""))
    assert reply.json()["error"]["param"] == "max_tokens"


class Step(BaseModel):
    thought: str
    done: bool


class Answer(BaseModel):
    steps: list[Step]
    number: int | None


def test_openais_own_client_parses_a_reply_into_its_class() -> None:
    text = '{"steps": [{"thought": "é", "done": true}], "number": null}'
    with listening(engine := says(text)) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        reply = client.chat.completions.parse(
            model="mock", messages=[{"role": "user", "content": "Hi"}], response_format=Answer
        )
    assert reply.choices[0].message.parsed == Answer(
        steps=[Step(thought="é", done=True)], number=None
    )
    matcher = LLMatcher(LLTokenizer("byte"), str(handed(engine)[0].grammar), log_level=0)
    data = list(text.encode())
    assert matcher.try_consume_tokens(data) == len(data)
    assert matcher.is_accepting()


def test_logprobs_and_streams_are_as_ever() -> None:
    body = {"messages": HELLO, **schema_format({"const": "é"}), "logprobs": True}
    chunks = stream("/v1/chat/completions", body, says('"é"'))
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert json.loads(text) == "é"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
