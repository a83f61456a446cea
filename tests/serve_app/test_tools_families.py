"""The family of a model is found by its chat template, and by what its tokenizer says itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from lexshard.cluster.config import ToolFormat
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.tools.families import FAMILIES_BY_NAME, ReplyFormat, reply_format
from lexshard.serve_app.tools.reply_parser import ReplyParser
from tests.support.mock_server import model_folder
from tests.support.paths import ROOT
from tests.support.reply_scripts import THINK, TOOLS, parsed
from tests.support.tool_chats import MARKS, TEMPLATE, WEATHER, tool_tokenizer

# What tells of each family, as its chat templates have it.
TEMPLATES = {
    "hermes": "{% if tools %}return a json object within <tool_call></tool_call> XML tags",
    "qwen3-coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "mistral": "{{ '[TOOL_CALLS][' }}{% for tool_call in message.tool_calls %}",
    "mistral-named": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "llama3": '<|start_header_id|>system {"name": function name, "parameters": dictionary',
    "json": "{{ tools }} Answer with the call as JSON.",
}
JSON_CALLS = {
    "open": "<calls>",
    "close": "</calls>",
    "content": "json",
    "transform_each": True,
    "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}},
}
TAGGED_CALLS = {
    "open": "<call>",
    "close": "</call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
XML_CALLS = {
    "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
    "close": "</tool_call>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>"},
}
THOUGHTS = {"open": "<|thought|>\n", "close": "<|/thought|>", "content": "text"}


@pytest.mark.parametrize("family", TEMPLATES)
def test_marks_in_a_template_tell_the_family(family: str) -> None:
    found = reply_format(TEMPLATES[family], True, None, {})
    assert found.tools is not None
    assert found.tools.name == family
    assert found.reasoning is None
    assert reply_format(TEMPLATES[family], False, None, {}).tools is None
    thinks = reply_format(TEMPLATES[family] + "</think>", True, None, {"</think>": 7, "x": 8})
    assert thinks.reasoning == THINK
    assert thinks.token_ids == {"</think>": 7}
    forced = reply_format(TEMPLATES[family], True, None, {}, forced="llama3").tools
    assert forced is not None
    assert forced.name == "llama3"


def test_the_option_names_every_family(tmp_path: Path) -> None:
    assert set(get_args(ToolFormat)) == FAMILIES_BY_NAME.keys()
    folder = model_folder(tmp_path)
    assert ModelTokenizer.load(folder).reply_format.tools is None
    named = ModelTokenizer.load(folder, "mistral").reply_format.tools
    assert named is FAMILIES_BY_NAME["mistral"]


def described(**fields: Any) -> ReplyFormat:
    return reply_format(TEMPLATES["llama3"] + "</think>", True, {"fields": fields}, {})


def test_what_a_tokenizer_says_of_replies_goes_first() -> None:
    text = '<|thought|>Hm<|/thought|>Well<calls>[{"tool_name": "get", "parameters": {}}]</calls>'
    said = parsed(ReplyParser(described(thinking=THOUGHTS, tool_calls=JSON_CALLS), TOOLS), [text])
    assert (said.reasoning, said.content, said.calls) == ("Hm", "Well", [("get", "{}")])
    text = '<call>{"name": "get", "arguments": {"a": 1}}</call>'
    said = parsed(ReplyParser(described(tool_calls=TAGGED_CALLS), TOOLS), [text])
    assert said.calls == [("get", '{"a": 1}')]
    xml = described(tool_calls=XML_CALLS).tools
    assert xml is not None
    assert xml.name == "qwen3-coder"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tool_calls": None, "thinking": 3},
        {"tool_calls": {"open_pattern": "x", "content": "json"}},
        {"tool_calls": {**TAGGED_CALLS, "content_args": {"unquoted_keys": True}}},
        {"tool_calls": TAGGED_CALLS, "thinking": THOUGHTS, "content": {"open": "<answer>"}},
    ],
)
def test_what_is_not_understood_is_left_to_the_template(fields: dict[str, Any]) -> None:
    found = described(**fields)
    assert found.tools is not None
    assert found.tools.name == "llama3"
    assert found.reasoning == THINK


def test_marks_that_are_tokens_are_seen_and_other_special_tokens_are_not() -> None:
    tokenizer = tool_tokenizer(TEMPLATE, MARKS)
    assert tokenizer.reply_format.token_ids.keys() == set(MARKS)
    ids = tokenizer.encode("<tool_call>a<|end|>", add_special_tokens=False)
    assert b"".join(tokenizer.marked_token_bytes[each] for each in ids) == b"<tool_call>a"
    assert b"".join(tokenizer.visible_token_bytes[each] for each in ids) == b"a"


@pytest.mark.parametrize("name", ["lexshard-demo", "lexshard-demo-draft"])
def test_the_demo_reads_tools_and_writes_other_prompts_as_it_always_did(name: str) -> None:
    tokenizer = ModelTokenizer.load(ROOT / "models" / name)
    messages = [
        {"role": role, "content": f" {role}, \n"}
        for role in ("system", "user", "assistant", "user")
    ]
    plain = "".join(f"<|{each['role']}|>\n{each['content']}<|end|>\n" for each in messages)
    assert tokenizer.render_chat(messages, True, False, {}) == f"{plain}<|assistant|>\n"
    assert tokenizer.render_chat(messages, False, False, {}, []) == plain
    assert tokenizer.reply_format.tools is not None
    assert tokenizer.reply_format.tools.name == "hermes"
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {"a": 1}}}
    messages += [{"role": "assistant", "content": "Well", "tool_calls": [call, call]}]
    messages += [{"role": "tool", "content": "12:00", "tool_call_id": "1"}]
    told = tokenizer.render_chat(messages, True, False, {}, [WEATHER])
    written = '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|assistant|>\nWell\n{written}\n{written}<|end|>\n<|user|>\n<tool_response>" in told
    assert told.startswith("<|system|>\n system, \n\n\nYou may call functions.")
    assert '"name": "get_weather"' in told
