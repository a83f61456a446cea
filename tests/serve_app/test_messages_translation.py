"""From the Messages protocol to chat completions: what a model is asked, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.serve_app.messages_api.protocol import MessagesRequest
from lexshard.serve_app.messages_api.translation import OWN_NAMES, message_body
from lexshard.serve_app.openai.errors import ApiError, bad_request
from lexshard.serve_app.over_chat.chat_body import ChatBody, Reads, thinking_fields
from lexshard.serve_app.over_chat.reading import in_own_terms, read_at

USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "2"}
TEXT = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
ADD = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
CHAT_ADD = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


HELLO = {"role": "user", "content": "Hi"}


def translated(*messages: Any, reads: Reads | None = None, **fields: Any) -> dict[str, Any]:
    body = {"messages": [*messages] or [HELLO], "max_tokens": 100, **fields}
    return message_body(read_at(MessagesRequest, body), reads or set().__contains__).fields


def test_system_and_messages_are_a_conversation() -> None:
    told = translated(HELLO, system="Be short")["messages"]
    assert told == [{"role": "system", "content": "Be short"}, HELLO]
    told = translated(user(TEXT, TEXT), system=[TEXT, TEXT])["messages"]
    texts = [{"type": "text", "text": "x"}] * 2
    assert told == [{"role": "system", "content": "x\nx"}, {"role": "user", "content": texts}]


def test_what_claude_code_counts_by_is_no_part_of_the_prompt() -> None:
    """Its hash is another one with each request: no prefix would be found in the cache."""
    for number in ("00000", "fa690"):
        line = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={number};"
        for system in ([{"type": "text", "text": line}, TEXT], f"{line}\n\nx"):
            told = translated(HELLO, system=system)["messages"]
            assert told == [{"role": "system", "content": "x"}, HELLO]
        assert translated(HELLO, system=line)["messages"] == [HELLO]


def test_a_reply_with_thinking_and_calls_and_their_results() -> None:
    thinking = {"type": "thinking", "thinking": "Hm", "signature": "unsigned"}
    redacted = {"type": "redacted_thinking", "data": "?"}
    second = USE | {"id": "c2"}
    results = (RESULT, {"type": "tool_result", "tool_use_id": "c2", "content": [TEXT, TEXT]})
    told = translated(
        HELLO, assistant(thinking, redacted, TEXT, USE, second), user(*results, TEXT)
    )["messages"]
    function = {"name": "add", "arguments": '{"a":1}'}
    assert told[1:] == [
        {
            "role": "assistant",
            "content": "x",
            "tool_calls": [
                {"id": i, "type": "function", "function": function} for i in ("c1", "c2")
            ],
            "reasoning": "Hm",
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "x\nx"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]


def test_what_a_chat_completion_refuses_of_a_tool_is_told_of_its_schema() -> None:
    error = bad_request("'tools.0.function.parameters' is wrong", "tools.0.function.parameters")
    told = in_own_terms(error, OWN_NAMES, ChatBody({}, {}))
    assert told.parameter == "tools[0].input_schema"
    assert told.message == "'tools[0].input_schema' is wrong"


def test_turns_of_the_assistant_that_follow_each_other_are_one() -> None:
    """Agents keep each block as a message."""
    thinking = {"type": "thinking", "thinking": "Hm"}
    said = {"role": "assistant", "content": "I "}
    second = USE | {"id": "c2"}
    results = user(RESULT, RESULT | {"tool_use_id": "c2"})
    turns = [assistant(thinking), said, assistant(TEXT), assistant(USE), assistant(second)]
    begun = [{"role": "assistant", "content": "Ye"}, assistant({"type": "text", "text": "s"})]
    body = translated(HELLO, *turns, results, *begun)
    _, reply, *told, last = body["messages"]
    assert (reply["content"], reply["reasoning"]) == ("I x", "Hm")
    assert [call["id"] for call in reply["tool_calls"]] == ["c1", "c2"]
    assert [each["role"] for each in told] == ["tool", "tool"]
    assert last == {"role": "assistant", "content": "Yes"}
    assert body["continue_final_message"] is True


def test_a_result_without_content_is_empty() -> None:
    empty = {"type": "tool_result", "tool_use_id": "c1", "is_error": True}
    told = translated(HELLO, assistant(USE), user(empty))["messages"]
    assert told[-1] == {"role": "tool", "tool_call_id": "c1", "content": ""}


def test_an_answer_that_has_begun_is_gone_on_with() -> None:
    body = translated(HELLO, {"role": "assistant", "content": "Ye"})
    assert body["continue_final_message"] is True
    assert "continue_final_message" not in translated(HELLO)


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        (
            {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "add"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_tools_and_the_choice_of_one(choice: dict[str, Any], told: dict[str, Any]) -> None:
    body = translated(tools=[ADD], tool_choice=choice)
    assert body["tools"] == [CHAT_ADD]
    assert body.items() >= told.items()


def test_a_choice_among_no_tools_asks_for_nothing() -> None:
    for kind in ("auto", "none"):
        assert "tool_choice" not in translated(tool_choice={"type": kind})


@pytest.mark.parametrize(
    ("read", "effort", "on", "told"),
    [
        ({"reasoning_effort"}, "low", None, {"reasoning_effort": "low"}),
        ({"reasoning_effort"}, "max", True, {"reasoning_effort": "max"}),
        ({"reasoning_effort"}, "low", False, {"reasoning_effort": "none"}),
        ({"enable_thinking"}, "low", True, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking"}, None, False, {"chat_template_kwargs": {"thinking": False}}),
        (
            {"thinking", "reasoning_effort"},
            "none",
            False,
            {"chat_template_kwargs": {"thinking": False}},
        ),
        (set(), "low", True, {}),
        ({"reasoning_effort", "thinking"}, None, None, {}),
    ],
)
def test_thinking_is_asked_for_in_the_words_of_the_template(
    read: set[str], effort: str | None, on: bool | None, told: dict[str, Any]
) -> None:
    assert thinking_fields(read.__contains__, effort, on) == told


def test_thinking_and_the_format_of_the_output() -> None:
    reads = {"enable_thinking", "reasoning_effort"}.__contains__
    for kind, fields in (
        ("disabled", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("enabled", {"chat_template_kwargs": {"enable_thinking": True}}),
        ("adaptive", {}),
        ("between_tools", {}),
    ):
        thinking = {"type": kind, "budget_tokens": 50}
        body = translated(reads=reads, thinking=thinking)
        assert body.items() >= fields.items()
        assert ("chat_template_kwargs" in body) == bool(fields)
    form = {"type": "json_schema", "schema": {"type": "object"}}
    body = translated(reads=reads, output_config={"effort": "low", "format": form})
    assert body["reasoning_effort"] == "low"
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_other_fields() -> None:
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body = translated(
        context_management=kept,
        model="m",
        stop_sequences=["a"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        metadata={"user_id": "me"},
        service_tier="auto",
    )
    del body["messages"]
    assert body == {
        "model": "m",
        "stop": ["a"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "max_completion_tokens": 100,
    }


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [user()]}, "messages[0].content"),
        ({"messages": [user(5)]}, "messages[0].content[0]"),
        ({"messages": [user(IMAGE)]}, "messages[0].content[0].type"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user(RESULT)]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [HELLO, assistant(USE), user(TEXT, RESULT)]}, "messages[2].content[1]"),
        ({"messages": [HELLO, assistant(USE)]}, "messages[1]"),
        ({"messages": [HELLO, assistant(USE), assistant(TEXT)]}, "messages[1]"),
        ({"messages": [HELLO, assistant(TEXT), assistant(IMAGE)]}, "messages[2].content[0].type"),
        (
            {"messages": [assistant(IMAGE), {"role": "x", "content": ""}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [HELLO, assistant(USE | {"input": 5})]}, "messages[1].content[0].input"),
        ({"messages": [assistant({"type": "server_tool_use"})]}, "messages[0].content[0].type"),
        (
            {"messages": [assistant(USE), user(RESULT | {"content": [IMAGE]})]},
            "messages[1].content[0].content[0].type",
        ),
        ({"system": 5}, "system"),
        ({"system": {}}, "system"),
        ({"system": False}, "system"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear"}]}}, "context_management"),
        ({"wrong": 1}, "wrong"),
    ],
)
def test_mistakes_are_told_by_their_place(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(ApiError) as told:
        translated(**fields)
    assert told.value.status == 400
    assert told.value.parameter == place
    assert f"'{place}'" in told.value.message


# -- nothing a client sends is a failure of the server ---------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "name", "text"]), inner)
    ),
    max_leaves=6,
)
FIELDS = [*MessagesRequest.model_fields]


def status(body: dict[str, Any]) -> int:
    try:
        message_body(read_at(MessagesRequest, body), set().__contains__)
    except ApiError as error:
        return error.status
    return 200


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_body_is_translated_or_refused(data: st.DataObject) -> None:
    blocks = [dict(block) for block in data.draw(st.lists(st.sampled_from([USE, RESULT, TEXT])))]
    for block in blocks:
        block[data.draw(st.sampled_from([*block]))] = data.draw(ANYTHING)
    role = data.draw(st.sampled_from(["user", "assistant", "system"]))
    fields = {name: data.draw(ANYTHING) for name in data.draw(st.sets(st.sampled_from(FIELDS)))}
    body = {"messages": [HELLO, {"role": role, "content": blocks}], "max_tokens": 9, **fields}
    assert status(body) in (200, 400)
