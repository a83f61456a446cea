"""Chats with tools over HTTP: what replies are, whole and streamed, and what reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from lexshard.serve_app.openai.tokenization import ModelTokenizer
from tests.support.mock_engine import CHAT_TEMPLATE, EOS, MockEngine, Script, byte_tokenizer
from tests.support.mock_server import HELLO, Client, events, listening, serve
from tests.support.tool_chats import (
    CALLED,
    CLOCK,
    MARKS,
    RESULT,
    SHELL,
    TEMPLATE,
    WEATHER,
    added_up,
    saying,
    tool_tokenizer,
)

PATH = "/v1/chat/completions"
SPELLED = tool_tokenizer()
MARKED = tool_tokenizer(marks=MARKS)
ARGUMENTS = '{"city":  "Os\\u006co"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
REPLY = f"<think>\nHm, 日本?\n</think>\n\nLet me see.\n{CALL}\n{OTHER}"
TOOLS = [WEATHER, CLOCK]


def chat(engine: MockEngine, tokenizer: ModelTokenizer = SPELLED, **fields: Any) -> dict[str, Any]:
    async def request(client: Client) -> Any:
        return await client.post(PATH, json={"messages": HELLO, "tools": TOOLS, **fields})

    reply = serve(request, engine, tokenizer)
    assert reply.status_code == 200, reply.text
    content: dict[str, Any] = reply.json()
    return content


def chunks(
    engine: MockEngine, tokenizer: ModelTokenizer = SPELLED, **fields: Any
) -> list[dict[str, Any]]:
    body = {"messages": HELLO, "tools": TOOLS, "stream": True, **fields}

    async def request(client: Client) -> Any:
        return await client.post(PATH, json=body)

    return events(serve(request, engine, tokenizer))


@pytest.mark.parametrize("tokenizer", [SPELLED, MARKED], ids=["spelled", "tokens"])
def test_a_whole_reply_has_its_reasoning_text_and_calls(tokenizer: ModelTokenizer) -> None:
    [choice] = chat(saying(REPLY, tokenizer), tokenizer)["choices"]
    message = choice["message"]
    assert message["reasoning"] == "Hm, 日本?"
    assert message["content"] == "Let me see."
    assert choice["finish_reason"] == "tool_calls"
    first, second = message["tool_calls"]
    assert first.keys() == {"id", "type", "function"}
    assert first["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert second["function"] == {"name": "clock", "arguments": "{}"}
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]


@pytest.mark.parametrize("tokenizer", [SPELLED, MARKED], ids=["spelled", "tokens"])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_stream_adds_up_to_the_whole(tokenizer: ModelTokenizer, step: int) -> None:
    told = chunks(saying(REPLY, tokenizer, step), tokenizer, logprobs=step == 3)
    message = added_up(told)
    assert message["reasoning"] == "Hm, 日本?"
    assert message["content"] == "Let me see."
    assert message["finish_reason"] == "tool_calls"
    assert [call["function"] for call in message["calls"]] == [
        {"name": "get_weather", "arguments": ARGUMENTS},
        {"name": "clock", "arguments": "{}"},
    ]
    if step == 1:
        pieces = [
            piece for chunk in told for piece in chunk["choices"][0]["delta"].get("tool_calls", [])
        ]
        assert len(pieces) > len(ARGUMENTS)  # as they come


@pytest.mark.parametrize("step", [1, 3, 40, 1000])
def test_a_chunk_tells_of_one_call_in_one_piece(step: int) -> None:
    """As OpenAI's do: LlamaIndex and Instructor read the first piece of each chunk alone."""
    told = chunks(saying(REPLY, SPELLED, step), return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in told]
    assert {len(choice["delta"].get("tool_calls", [0])) for choice in choices} == {1}
    assert added_up(told)["calls"][0]["function"]["arguments"] == ARGUMENTS
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "tool_calls"
    spoken = [token for choice in choices for token in choice.get("token_ids", [])]
    assert spoken == [*SPELLED.encode(REPLY, add_special_tokens=False), 256]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_marks_that_are_tokens_are_not_what_others_spell(step: int) -> None:
    """A model that thinks or writes of marks ends nothing and calls nothing."""

    def spelled(text: str) -> list[int]:
        return [each for letter in text for each in MARKED.encode(letter, add_special_tokens=False)]

    def marked(text: str) -> list[int]:
        return MARKED.encode(text, add_special_tokens=False)

    ids = [*marked("<think>"), *spelled("No </think> yet."), *marked("</think>")]
    ids += [*spelled(f"Write {CALL}, <think>."), *marked(CALL)]
    script = Script([*(ids[i : i + step] for i in range(0, len(ids), step)), (EOS,)])
    engine = MockEngine(script=lambda _: script)
    for stop in ([], ["l>no", "ink>no"]):  # a stop text holds the ends of marks back
        [choice] = chat(engine, MARKED, stop=stop)["choices"]
        message = added_up(chunks(engine, MARKED, stop=stop))
        for told in (choice["message"], message):
            assert told["reasoning"] == "No </think> yet."
            assert told["content"] == f"Write {CALL}, <think>."
        calls = [choice["message"]["tool_calls"], message["calls"]]
        assert [[call["function"]["arguments"] for call in each] for each in calls] == [
            *([ARGUMENTS], [ARGUMENTS])
        ]


def test_tokens_of_marks_are_counted_but_not_shown() -> None:
    ids = MARKED.encode(REPLY, add_special_tokens=False)
    [choice] = chat(saying(REPLY, MARKED), MARKED, logprobs=True, return_token_ids=True)["choices"]
    assert choice["token_ids"] == [*ids, 256]
    assert len(choice["logprobs"]["content"]) == len(ids) + 1
    [choice] = chat(saying(f"Well.{CALL}", MARKED), MARKED, include_stop_str_in_output=True)[
        "choices"
    ]
    assert choice["message"]["content"] == "Well."


def test_a_reply_that_is_cut_has_the_part_of_a_call_that_is_there() -> None:
    whole = f"Let me see.\n{CALL}"
    at = len(whole) - len('"}}\n</tool_call>') - 2
    [choice] = chat(saying(whole, SPELLED), max_tokens=at)["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == ARGUMENTS[: len(call["function"]["arguments"])]
    assert call["function"]["arguments"].startswith('{"city"')
    [choice] = chat(saying("<think>Only thought", SPELLED), max_tokens=12)["choices"]
    assert choice["message"]["reasoning"] == "Only "
    assert choice["message"]["content"] is None


def test_stop_strings_end_texts_and_arguments() -> None:
    [choice] = chat(saying(REPLY, SPELLED), stop="me see")["choices"]
    assert choice["message"]["content"] == "Let "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "me see")
    [choice] = chat(saying(CALL, SPELLED), stop="u006c", include_stop_str_in_output=True)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city":  "Os\\u006c'
    # Whoever runs tools where they are called must not run this one.
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "u006c")
    [choice] = chat(saying(CALL, SPELLED), stop="</tool_call>")["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "</tool_call>")


def test_a_stop_token_amid_a_call_is_no_call_to_run() -> None:
    begun = [*CALL[: CALL.index("co")].encode()]
    cut = MockEngine(script=lambda _: Script([begun, (10,)], stop_reason=10))
    whole = MockEngine(script=lambda _: Script([[*CALL.encode()], (10,)], stop_reason=10))
    for engine, reason in ((cut, "stop"), (whole, "tool_calls")):
        [choice] = chat(engine, stop_token_ids=[10])["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, 10)
        message = added_up(chunks(engine, stop_token_ids=[10]))
        assert message["finish_reason"] == reason


def test_a_mark_that_the_end_has_cut_is_no_text() -> None:
    for cut in range(1, len("\n</tool_call>")):
        [choice] = chat(saying(CALL[:-cut], SPELLED))["choices"]
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


def test_what_is_no_call_of_an_offered_tool_is_text() -> None:
    unknown = CALL.replace("get_weather", "get_time")
    [choice] = chat(saying(unknown, SPELLED))["choices"]
    assert choice["message"]["content"] == unknown
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    for fields in ({"tool_choice": "none"}, {"tools": None}):
        [choice] = chat(saying(CALL, SPELLED), **fields)["choices"]
        assert choice["message"]["content"] == CALL


def test_choices_are_read_each_for_itself() -> None:
    def script(request: Any) -> Script:
        text = CALL if request.choice else REPLY
        return Script([text.encode(), (256,)])

    told = chunks(MockEngine(script=script), n=2)
    assert [len(added_up(told, index)["calls"]) for index in (0, 1)] == [2, 1]
    assert [added_up(told, index)["reasoning"] for index in (0, 1)] == ["Hm, 日本?", ""]


def test_custom_tools_are_called_with_a_text() -> None:
    text = '<tool_call>\n{"name": "shell", "arguments": <input>ls</input>}\n</tool_call>'
    [choice] = chat(saying(text, SPELLED), tools=[SHELL])["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "shell", "input": "ls"})
    [call] = added_up(chunks(saying(text, SPELLED), tools=[SHELL]))["calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "shell", "input": "ls"})


def test_the_input_of_a_custom_tool_is_streamed_where_it_is_written_as_it_is() -> None:
    def pieces(arguments: str) -> list[str]:
        text = f'<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>'
        told = chunks(saying(text, SPELLED), tools=[SHELL])
        deltas = [chunk["choices"][0]["delta"] for chunk in told if chunk["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        return [call["custom"]["input"] for call in calls if call["custom"]["input"]]

    assert pieces("<input>ls -l</input>") == [*"ls -l"]
    assert pieces('{"input": "ls -l"}') == ["ls -l"]  # known when all of the JSON is


def test_a_prompt_that_ends_amid_thinking_is_gone_on_with() -> None:
    text = "Hm.\n</think>\nHello"
    fields = {"tools": None, "chat_template_kwargs": {"thinking": True}}
    [choice] = chat(saying(text, SPELLED), **fields)["choices"]
    assert choice["message"]["reasoning"] == "Hm."
    assert choice["message"]["content"] == "Hello"
    last = [*HELLO, {"role": "assistant", "content": "<think>Well"}]
    engine = saying(text, SPELLED)
    [choice] = chat(engine, messages=last, tools=None, continue_final_message=True)["choices"]
    assert choice["message"]["reasoning"] == "Hm."
    assert SPELLED.decode(engine.requests[0].prompt_ids).endswith("<think>Well")


def test_reasoning_is_left_out_on_request() -> None:
    [choice] = chat(saying(REPLY, MARKED), MARKED, include_reasoning=False)["choices"]
    assert choice["message"].keys() == {"role", "content", "refusal", "tool_calls"}
    assert choice["message"]["content"] == "Let me see."
    body = chat(saying("<think>Only thought", SPELLED), include_reasoning=False)
    assert body["choices"][0]["message"]["content"] == ""
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 12
    message = added_up(chunks(saying(REPLY, MARKED), MARKED, include_reasoning=False))
    assert (message["reasoning"], message["content"]) == ("", "Let me see.")


def grammar(**fields: Any) -> dict[str, str]:
    """The grammars that reach the engine, by name; none where any reply will do."""
    engine = saying(CALL, SPELLED)
    engine.max_model_len = engine.kv_tokens = 300_000
    chat(engine, **fields)
    [request] = engine.requests
    if request.parameters.grammar is None:
        return {}
    grammars = json.loads(request.parameters.grammar)["grammars"]
    return {each["name"]: each.get("lark_grammar", str(each)) for each in grammars}


def test_the_engine_gets_a_grammar_of_the_whole_reply() -> None:
    schema = {"name": "x", "schema": {"type": "object"}}
    answer = {"type": "json_schema", "json_schema": schema}
    assert grammar(tools=None) == {}
    assert grammar(tool_choice="none") == {}
    assert grammar().keys() == {"reply", "part_1", "part_2"}
    assert "FIRST" in grammar()["reply"].splitlines()[1]
    assert "start: think? calls" in grammar(tool_choice="required")["reply"]
    assert grammar(response_format=answer).keys() == {"reply", "answer", "part_1", "part_2"}
    assert grammar(tools=None, response_format=answer).keys() == {"reply", "answer"}
    assert grammar(tools=[SHELL]).keys() == {"reply", "part_1"}
    named = {"type": "function", "function": {"name": "clock"}}
    assert "get_weather" not in grammar(tool_choice=named)["reply"]
    allowed = {"mode": "required", "tools": [named]}
    some = grammar(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})["reply"]
    assert "get_weather" not in some
    assert "start: think? calls" in some
    assert "(more inside)*" in grammar()["reply"]
    assert "(more inside)*" not in grammar(parallel_tool_calls=False)["reply"]
    # What never ends cannot be held to anything, unless something insists.
    assert grammar(ignore_eos=True) == {}


def test_templates_get_tools_and_calls_as_objects() -> None:
    listing = {"name": "clock", "arguments": '{"a": [2]}'}
    called = {
        "role": "assistant",
        "content": None,
        "reasoning": "why",
        "tool_calls": [
            {"id": "1", "type": "function", "function": listing},
            {"id": "2", "type": "custom", "custom": {"name": "shell", "input": "ls"}},
            {"id": "3", "index": 0, "function": {"name": "clock", "arguments": ""}},
        ],
    }
    results = [
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "12:00"}]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    engine = saying("Hello", SPELLED)
    chat(engine, messages=[*HELLO, called, *results], tools=[CLOCK])
    prompt = SPELLED.decode(engine.requests[0].prompt_ids)
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    told = {"type": "function", "function": {"name": "clock", "parameters": nothing}}
    assert prompt == (
        f"<tools>{json.dumps(told)}</tools><user>Hi<assistant><think>why</think>"
        "<tool_call>clock:a=[2];</tool_call><tool_call>shell:input=ls;</tool_call>"
        "<tool_call>clock:</tool_call><tool shell 2>12:00<tool clock 1>x<assistant>"
    )


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 12345678901234567890123])
def test_numbers_in_calls_are_told_to_their_last_digit(number: int) -> None:
    """Beyond 64 bits they were floats: the next prompt told of another number."""
    call = {"id": "1", "function": {"name": "clock", "arguments": f'{{"n": {number}}}'}}
    engine = saying("Hello", SPELLED)
    chat(engine, messages=[*HELLO, {**CALLED, "tool_calls": [call]}, RESULT])
    prompt = SPELLED.decode(engine.requests[0].prompt_ids)
    assert f"<tool_call>clock:n={number};</tool_call>" in prompt


def test_chats_with_tools_are_written_by_the_template_that_is_for_them() -> None:
    """As transformers chooses it: of Hermes and Command R the default one reads no tools."""
    templates = {"default": CHAT_TEMPLATE, "tool_use": TEMPLATE + "{{ reasoning_effort }}"}
    tokenizer = byte_tokenizer(templates)
    engine = saying(OTHER, tokenizer)
    history = [{"role": "developer", "content": "Go"}, *HELLO, CALLED, RESULT]
    [choice] = chat(engine, tokenizer, messages=history, reasoning_effort="low")["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["clock"]
    chat(engine, tokenizer, tools=None)
    told, plain = (tokenizer.decode(request.prompt_ids) for request in engine.requests)
    assert told.startswith("<tools>")
    assert "<system>Go<user>Hi<assistant><tool_call>clock:</tool_call>" in told
    assert told.endswith("<assistant>low")
    assert plain == "<user>Hi\n<assistant>"


@pytest.mark.parametrize(("effort", "told"), [("high", "high"), ("max", "xhigh")])
def test_a_template_may_read_how_hard_to_think(effort: str, told: str) -> None:
    template = TEMPLATE + "{{ reasoning_effort }}"
    engine = saying("Hello", SPELLED)
    chat(engine, tool_tokenizer(template), reasoning_effort=effort)
    assert SPELLED.decode(engine.requests[0].prompt_ids).endswith(f"<assistant>{told}")


@pytest.mark.parametrize("content", [None, "", []])
def test_a_turn_of_calls_alone_comes_back_with_any_empty_content(content: Any) -> None:
    engine = saying("Hello", SPELLED)
    chat(engine, SPELLED, messages=[*HELLO, CALLED | {"content": content}, RESULT])
    prompt = SPELLED.decode(engine.requests[0].prompt_ids)
    assert "<assistant><tool_call>clock:</tool_call>" in prompt


def test_tools_that_are_too_much_together_are_held_to_less() -> None:
    """Each alone could be held to; a client that insists on nothing is answered all the same."""

    def large(strict: bool, count: int, fields: int) -> list[dict[str, Any]]:
        properties = {f"property_{i}": {"type": "string"} for i in range(fields)}
        schema = {"type": "object", "properties": properties}
        return [
            {
                "type": "function",
                "function": {"name": f"f{i}", "parameters": schema, "strict": strict},
            }
            for i in range(count)
        ]

    loose = grammar(tools=large(False, 80, 100))
    assert len(loose) == 81
    assert "property_1" not in str(loose)
    with pytest.raises(AssertionError, match=r"'tools' makes a grammar of \d+ bytes"):
        grammar(tools=large(True, 80, 100))


def test_openais_client_reads_calls_whole_and_streamed() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    schema = {**WEATHER["function"]["parameters"], "additionalProperties": False}
    strict["function"]["parameters"] = schema
    fields: dict[str, Any] = {"model": "mock", "messages": HELLO, "tools": [strict]}
    with listening(saying(f"<think>Hm</think>{CALL}", MARKED), MARKED) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        whole = client.chat.completions.create(**fields).choices[0]
        with client.chat.completions.stream(**fields) as stream:
            told = [event.type for event in stream]
            streamed = stream.get_final_completion().choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    assert streamed.message.tool_calls is not None
    for call in (whole.message.tool_calls[0], streamed.message.tool_calls[0]):
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert "tool_calls.function.arguments.delta" in told
    assert "tool_calls.function.arguments.done" in told
    # What the client got goes back as it is.
    back = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "rain"}
    history = [*HELLO, whole.message, back]
    with listening(saying("It rains.", MARKED), MARKED) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        reply = client.chat.completions.create(**{**fields, "messages": history})
    assert reply.choices[0].message.content == "It rains."
