"""Tools and thinking through both translated protocols, with real chats beneath them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.support.mock_server import Client, serve
from tests.support.tool_chats import MARKS, saying, tool_tokenizer

TOKENIZER = tool_tokenizer(marks=MARKS)
REPLY = (
    "<think>Hm</think>I look.<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
SHELL_REPLY = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls \\"x\\""}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_of_responses_with_a_tool(stream: bool) -> None:
    engine = saying(REPLY, TOKENIZER)
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]

    async def test(http: Client) -> None:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
        made: Any = await client.responses.create(input="Hi", tools=tools, stream=stream)
        if stream:
            *_, last = [event async for event in made]
            made = last.response
        thought, said, call = made.output
        assert thought.content[0].text == "Hm"
        assert said.content[0].text == "I look."
        assert (call.name, call.arguments) == ("get_weather", '{"city": "Bern"}')
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
        await client.responses.create(input=[result], previous_response_id=made.id, tools=tools)
        prompt = TOKENIZER.decode(engine.requests[-1].prompt_ids)
        assert prompt.endswith(
            "<user>Hi<assistant><think>Hm</think>I look.<tool_call>get_weather:city=Bern;"
            f"</tool_call><tool get_weather {call.call_id}>warm<assistant>"
        )

    serve(test, engine, TOKENIZER)


def test_a_custom_tool_takes_text() -> None:
    async def test(http: Client) -> None:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
        made: Any = await client.responses.create(
            input="Hi", tools=[{"type": "custom", "name": "shell"}]
        )
        [call] = made.output
        assert (call.type, call.name, call.input) == ("custom_tool_call", "shell", 'ls "x"')

    serve(test, saying(SHELL_REPLY, TOKENIZER), TOKENIZER)


def test_a_conversation_of_messages_with_a_tool() -> None:
    engine = saying(REPLY, TOKENIZER)
    asked: dict[str, Any] = {
        "max_tokens": 500,
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "messages": [{"role": "user", "content": "Hi"}],
    }

    async def test(client: Client) -> None:
        told = (await client.post("/v1/messages", json=asked)).json()
        thought, said, call = told["content"]
        assert (thought["thinking"], said["text"]) == ("Hm", "I look.")
        assert (call["name"], call["input"]) == ("get_weather", {"city": "Bern"})
        assert told["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "warm"}
        messages = [
            *asked["messages"],
            {"role": "assistant", "content": told["content"]},
            {"role": "user", "content": [result]},
        ]
        counted = {"tools": asked["tools"], "messages": messages}
        tokens = (await client.post("/v1/messages/count_tokens", json=counted)).json()
        await client.post("/v1/messages", json=asked | {"messages": messages})
        ids = engine.requests[-1].prompt_ids
        assert tokens["input_tokens"] == len(ids)
        assert TOKENIZER.decode(ids).endswith(
            "<user>Hi<assistant><think>Hm</think>I look.<tool_call>get_weather:city=Bern;"
            f"</tool_call><tool get_weather {call['id']}>warm<assistant>"
        )

    serve(test, engine, TOKENIZER)


@pytest.mark.parametrize("step", [1, 2, 5, 13, 200])
@pytest.mark.parametrize("stream", [False, True])
def test_parts_stand_in_their_order_however_many_tokens_come_at_once(
    step: int, stream: bool
) -> None:
    """What ends a call and what is said behind it may come together."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    reply = f"First.{call}\n{call}Then.{call}"
    asked = {
        "max_tokens": 500,
        "stream": stream,
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "messages": [{"role": "user", "content": "Hi"}],
    }
    expected = [("text", "First."), *[("tool_use", '{"city": "Bern"}')] * 2]
    expected += [("text", "Then."), ("tool_use", '{"city": "Bern"}')]

    async def test(client: Client) -> None:
        told = await client.post("/v1/messages", json=asked)
        if not stream:
            blocks = told.json()["content"]
            texts = [each.get("text") or json.dumps(each["input"]) for each in blocks]
            assert list(zip((each["type"] for each in blocks), texts, strict=True)) == expected
            return
        found: list[tuple[str, str]] = []
        for line in told.text.splitlines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if event.get("type") == "content_block_start":
                found.append((event["content_block"]["type"], ""))
            elif event.get("type") == "content_block_delta":
                assert event["index"] == len(found) - 1
                delta = event["delta"]
                kind, text = found[-1]
                found[-1] = kind, text + (delta.get("text") or delta["partial_json"])
        assert found == expected

    serve(test, saying(reply, TOKENIZER, step), TOKENIZER)


@pytest.mark.parametrize(
    ("stop", "reason"), [("ern", "stop_sequence"), ("</tool_call>", "tool_use")]
)
def test_a_call_that_a_stop_sequence_cuts_is_not_to_be_run(stop: str, reason: str) -> None:
    asked = {
        "max_tokens": 500,
        "stop_sequences": [stop],
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "messages": [{"role": "user", "content": "Hi"}],
    }

    async def test(client: Client) -> None:
        told = (await client.post("/v1/messages", json=asked)).json()
        [call] = told["content"]
        assert call["input"] == ({"city": "Bern"} if reason == "tool_use" else {})
        assert (told["stop_reason"], told["stop_sequence"]) == (reason, stop)

    spelled = tool_tokenizer()
    reply = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    serve(test, saying(reply, spelled), spelled)


THOUGHTFUL = (
    "<think>Hm 1 < 2, \u00e9</think>\n\nI look: \u00e9 < 3.\n\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
)
THOUGHT = "<think>Hm 1 < 2, \u00e9</think>\n\n"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 200])
def test_tokens_belong_to_what_they_say_however_they_come(step: int) -> None:
    """Halves of characters and what might be a mark are held back; marks are no text."""
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
    asked = {"input": "Hi", "tools": tools, "include": ["message.output_text.logprobs"]}
    thoughtful = len(TOKENIZER.encode(THOUGHT, add_special_tokens=False))
    details = {"reasoning_tokens": thoughtful}

    async def test(client: Client) -> None:
        told = (await client.post("/v1/responses", json=asked)).json()
        thought, said, call = told["output"]
        assert thought["content"][0]["text"] == "Hm 1 < 2, \u00e9"
        [part] = said["content"]
        assert part["text"] == "I look: \u00e9 < 3."
        scored = bytes(byte for token in part["logprobs"] for byte in token["bytes"])
        assert scored.decode() == part["text"]
        assert (call["type"], told["status"]) == ("function_call", "completed")
        assert told["usage"]["output_tokens_details"] == details
        streamed = (await client.post("/v1/responses", json=asked | {"stream": True})).text
        pieces = streamed.count("event: response.function_call_arguments.delta")
        assert pieces <= -(-len(call["arguments"]) // step) + 1  # one of each step
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": thoughtful}
        whole = (await client.post("/v1/chat/completions", json=chat)).json()
        assert whole["choices"][0]["message"]["reasoning"] == "Hm 1 < 2, \u00e9"
        # The mark that ends a thought counts when something follows it.
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == thoughtful - 3

    serve(test, saying(THOUGHTFUL, TOKENIZER, step), TOKENIZER)


ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') == (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('after one system message, turns must alternate') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
)
SAID = ("C", [{"type": "text", "text": "C"}])
TURNS = [{"role": role, "content": each} for role in ("user", "assistant") for each in SAID]


@pytest.mark.parametrize(
    ("path", "first", "name", "role"),
    [
        ("/v1/responses", "instructions", "input", "developer"),
        ("/v1/messages", "system", "messages", "system"),
    ],
)
def test_turns_alternate_behind_one_system_message(
    path: str, first: str, name: str, role: str
) -> None:
    tokenizer = tool_tokenizer(ALTERNATING)
    engine = saying("Yes", tokenizer)
    asked = {first: "A", name: [{"role": role, "content": "B"}, *TURNS, TURNS[0]]}
    budget = {"max_tokens": 9} if first == "system" else {}

    async def test(client: Client) -> None:
        reply = await client.post(path, json=asked | budget)
        assert reply.status_code == 200, reply.text

    serve(test, engine, tokenizer)
    prompt = tokenizer.decode(engine.requests[-1].prompt_ids).replace("\n", "")
    assert prompt == "<system>AB<user>CC<assistant>CC<user>C<assistant>"


LOOSE = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/responses",
            {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": LOOSE}]},
        ),
        (
            "/v1/responses",
            {
                "input": "Hi",
                "text": {"format": {"type": "json_schema", "name": "f", "schema": LOOSE}},
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": [{"name": "f", "input_schema": LOOSE}],
            },
        ),
    ],
)
def test_a_reply_tells_what_was_left_to_the_model(path: str, fields: dict[str, Any]) -> None:
    async def test(client: Client) -> None:
        whole = (await client.post(path, json=fields)).json()
        [note] = whole["constraint_notes"]
        assert note.endswith("'not' at '#/properties/a/not' was left to the model")
        streamed = await client.post(path, json=fields | {"stream": True})
        events = [json.loads(line[6:]) for line in streamed.text.split("\n") if "data: " in line]
        told = [event.get("response") or event.get("message") or {} for event in events]
        assert told[0]["constraint_notes"] == [note]
        assert all(each["constraint_notes"] == [note] for each in told if each)

    serve(test, saying("{}", TOKENIZER), TOKENIZER)


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (
            "/v1/responses",
            {
                "input": "Hi",
                "tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}],
            },
            "tools[0].parameters",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": [
                    {
                        "name": "f",
                        "strict": True,
                        "input_schema": {"type": "object", "properties": {"a": {"not": {}}}},
                    }
                ],
            },
            "'tools[0].input_schema': no grammar holds 'not'",
        ),
        (
            "/v1/responses",
            {
                "input": "Hi",
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "f",
                        "strict": True,
                        "schema": {"not": {"type": "string"}},
                    }
                },
            },
            "text.format",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": [{"name": "f", "input_schema": {"type": "string"}}],
            },
            "tools[0].input_schema",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": 2 * [{"name": "f", "input_schema": {"type": "object"}}],
            },
            "'tools[1].name'",
        ),
        (
            "/v1/responses",
            {"input": "Hi", "tools": 2 * [{"type": "function", "name": "f"}]},
            "'tools[1].name'",
        ),
    ],
)
def test_what_the_chat_refuses_is_told_in_own_terms(
    path: str, fields: dict[str, Any], place: str
) -> None:
    async def test(client: Client) -> None:
        reply = await client.post(path, json=fields)
        assert reply.status_code == 400, reply.text
        assert place in reply.text
        assert "response_format" not in reply.text
        assert ".function" not in reply.text

    serve(test, saying("x", TOKENIZER), TOKENIZER)
