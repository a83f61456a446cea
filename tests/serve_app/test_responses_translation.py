"""From Responses to chat completions: what a model is asked, and what is refused by its place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.serve_app.openai.errors import ApiError, bad_request
from lexshard.serve_app.over_chat.reading import in_own_terms, read_at
from lexshard.serve_app.responses.items import kept_item
from lexshard.serve_app.responses.protocol import ResponsesRequest
from lexshard.serve_app.responses.translation import OWN_NAMES, chat_body, input_items

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
CUSTOM = {"type": "custom_tool_call", "call_id": "c2", "name": "run", "input": 'say "hi"'}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm"}],
}
SAID = {
    "type": "message",
    "role": "assistant",
    "id": "msg_1",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Yes", "annotations": [], "logprobs": []}],
}
CHAT_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
SPACE = {"type": "namespace", "name": "fs", "description": "Files", "tools": [ADD]}


def all_read(_: str) -> bool:
    return True


def translated(**fields: Any) -> dict[str, Any]:
    return chat_body(read_at(ResponsesRequest, {"input": "Hi", **fields}), [], all_read).fields


def messages(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = translated(input=[*items], **fields)["messages"]
    return found


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as told:
        translated(**fields)
    assert told.value.status == 400
    return told.value


def test_variables_of_the_template_go_before_what_effort_says() -> None:
    switched = {"enable_thinking": True, "mine": 1}
    body = translated(reasoning={"effort": "none"}, chat_template_kwargs=switched)
    assert body["chat_template_kwargs"] == switched


def test_text_and_instructions_are_a_conversation() -> None:
    body = translated(instructions="Be short")
    assert body["messages"] == [
        {"role": "system", "content": "Be short"},
        {"role": "user", "content": "Hi"},
    ]


def test_messages_of_every_role_with_text_or_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    told = messages(
        {"role": "developer", "content": "x"},
        {"role": "user", "type": "message", "content": parts},
        SAID,
        {"role": "user", "type": None, "content": "again"},
    )
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert told == [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": texts},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "again"},
    ]


def test_what_one_reply_consisted_of_is_one_message() -> None:
    told = messages(
        {"role": "user", "content": "Hi"},
        THOUGHT,
        SAID,
        CALL,
        CUSTOM,
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "done"}],
        },
        THOUGHT,
        SAID,
        SAID,
    )
    custom = {"name": "run", "input": 'say "hi"'}
    assert told[1:] == [
        {
            "role": "assistant",
            "content": "Yes",
            "reasoning": "Hm",
            "tool_calls": [CHAT_CALL, {"id": "c2", "type": "custom", "custom": custom}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
        {"role": "assistant", "content": 2 * [{"type": "text", "text": "Yes"}], "reasoning": "Hm"},
    ]


@pytest.mark.parametrize("call", [CALL | {"arguments": '{"a'}, CUSTOM])
def test_a_call_that_the_budget_cut_is_forgotten_and_so_is_its_result(call: dict[str, Any]) -> None:
    """Agent frameworks send a result for every call of a response. A later call may have its id."""
    cut = call | {"status": "incomplete"}
    result = {"type": call["type"] + "_output", "call_id": call["call_id"], "output": "no JSON"}
    hello = {"role": "user", "content": "Hi"}
    assert messages(hello, cut) == [hello]
    assert messages(hello, cut, result) == [hello]
    whole = {**CALL, "call_id": call["call_id"]}
    *_, told = messages(hello, cut, result, whole, result)
    assert told == {"role": "tool", "tool_call_id": call["call_id"], "content": "no JSON"}


def test_tools_and_the_choice_of_one() -> None:
    run = {"type": "custom", "name": "run", "description": "runs", "format": {"type": "text"}}
    body = translated(
        tools=[ADD, run],
        tool_choice={"type": "custom", "name": "run"},
        parallel_tool_calls=False,
    )
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True}
    assert body["tools"][0] == {"type": "function", "function": function}
    custom = {"name": "run", "description": "runs", "format": {"type": "text"}}
    assert body["tools"][1] == {"type": "custom", "custom": custom}
    assert body["tool_choice"] == {"type": "custom", "custom": {"name": "run"}}
    assert body["parallel_tool_calls"] is False


def test_the_grammar_of_a_custom_tool() -> None:
    grammar = {"syntax": "regex", "definition": "[a-z]+"}
    run = {"type": "custom", "name": "run", "format": {"type": "grammar", **grammar}}
    [tool] = translated(tools=[run])["tools"]
    assert tool["custom"]["format"] == {"type": "grammar", "grammar": grammar}


@pytest.mark.parametrize("choice", ["none", "auto", "required"])
def test_choices_in_a_word_are_the_same(choice: str) -> None:
    assert translated(tools=[ADD], tool_choice=choice)["tool_choice"] == choice


def test_allowed_tools_may_be_called_alone() -> None:
    allowed = {"type": "function", "name": "add"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [allowed]}
    body = translated(tools=[ADD, {**ADD, "name": "sub"}], tool_choice=choice)
    told = {"type": "function", "function": {"name": "add"}}
    assert len(body["tools"]) == 2
    assert body["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [told]},
    }


def test_formats_of_text() -> None:
    schema = {"type": "object"}
    given = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    told = {"name": "n", "schema": schema, "strict": True}
    assert translated(text={"format": given})["response_format"] == {
        "type": "json_schema",
        "json_schema": told,
    }
    for kind in ("text", "json_object"):
        assert translated(text={"format": {"type": kind}})["response_format"] == {"type": kind}
    assert "response_format" not in translated(text={"verbosity": "low"})


def test_other_fields() -> None:
    body = translated(
        model="m",
        max_output_tokens=7,
        reasoning={"effort": "low", "summary": "auto"},
        truncation="auto",
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        temperature=0,
        top_p=0.5,
        seed=3,
        stream=False,
    )
    expected = {
        "model": "m",
        "max_completion_tokens": 7,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True},
        "truncate_prompt_tokens": -1,
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0,
        "top_p": 0.5,
        "seed": 3,
    }
    assert body.items() >= expected.items()
    assert translated().keys() == {"messages"}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "wrong": 1}]}, "input[0].wrong"),
        ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [CALL | {"call_id": None}]}, "input[0].call_id"),
        (
            {"input": [CALL, {"type": "function_call_output", "call_id": "z", "output": ""}]},
            "input[1].call_id",
        ),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [SPACE | {"tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [SPACE | {"tools": [SPACE]}]}, "tools[0].tools[0].type"),
        ({"tools": [SPACE], "input": [CALL | {"namespace": "a b"}]}, "input[0].namespace"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"tools": [ADD | {"parameters": 5}]}, "tools[0].parameters"),
        (
            {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]},
            "tools[0].format.syntax",
        ),
        ({"input": [CALL | {"arguments": "{"}]}, "input[0].arguments"),
        ({"input": [CALL | {"arguments": "[]"}]}, "input[0].arguments"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"x": 5}}, "metadata.x"),
        ({"include": ["x"]}, "include[0]"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_mistakes_are_told_by_their_place(fields: dict[str, Any], place: str) -> None:
    error = refusal(**fields)
    assert error.parameter == place
    assert f"'{place}'" in error.message


def test_what_a_chat_completion_refuses_is_told_of_the_response() -> None:
    asked = read_at(ResponsesRequest, {"instructions": "x", "input": [THOUGHT, CALL]})
    body = chat_body(asked, [], all_read)
    assert body.places == {0: "instructions", 1: "input[0]"}

    def told(message: str, parameter: str) -> tuple[str, str | None]:
        error = in_own_terms(bad_request(message, parameter), OWN_NAMES, body)
        return error.message, error.parameter

    assert told("'messages.1.content' is wrong", "messages.1.content") == (
        "'input[0].content' is wrong",
        "input[0].content",
    )
    assert told("'max_completion_tokens': no", "max_completion_tokens") == (
        "'max_output_tokens': no",
        "max_output_tokens",
    )
    assert told("'tools.2.custom.format': no", "tools.2.custom.format") == (
        "'tools[2].format': no",
        "tools[2].format",
    )
    assert told("9 in the messages", "messages") == ("9 in the input", "input")
    assert told("'temperature' is hot", "temperature") == ("'temperature' is hot", "temperature")


def test_kept_items_can_be_read_again() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        THOUGHT,
        CALL,
        CUSTOM,
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    kept = list(map(kept_item, items))
    assert all(item["id"] and item["type"] for item in kept)
    told = chat_body(read_at(ResponsesRequest, {"input": "More"}), kept, all_read).fields[
        "messages"
    ]
    assert told[0] == {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    assert told[1:-1] == messages(*items)[1:]


# -- nothing a client sends is a failure of the server ---------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "user", "function"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "name", "text"]), inner)
    ),
    max_leaves=6,
)
FIELDS = [*ResponsesRequest.model_fields]
EXAMPLES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    SAID,
    THOUGHT,
    CALL,
    CUSTOM,
    {"type": "function_call_output", "call_id": "c1", "output": "2"},
]


def status(items: list[dict[str, Any]], fields: dict[str, Any]) -> int:
    try:
        asked = read_at(ResponsesRequest, {"input": items, **fields})
        chat_body(asked, [], all_read)
        list(map(kept_item, input_items(asked)))
    except ApiError as error:
        return error.status
    return 200


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_body_is_translated_or_refused(data: st.DataObject) -> None:
    items = [dict(item) for item in data.draw(st.lists(st.sampled_from(EXAMPLES), max_size=3))]
    for item in items:
        item[data.draw(st.sampled_from([*item, "type"]))] = data.draw(ANYTHING)
    fields = {name: data.draw(ANYTHING) for name in data.draw(st.sets(st.sampled_from(FIELDS)))}
    assert status(items, fields) in (200, 400)
