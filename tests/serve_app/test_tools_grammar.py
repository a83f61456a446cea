"""What grammars of whole replies allow, step by step, as llguidance reads them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lexshard.actors.text.token_bytes import byte_level_alphabet
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.structured.applying import checked_notes
from lexshard.serve_app.structured.compiling import Compiled
from lexshard.serve_app.structured.constraint import Constraint
from lexshard.serve_app.tools.families import FAMILIES_BY_NAME, ReplyFormat
from lexshard.serve_app.tools.grammar import Beginning, reply_grammar
from lexshard.serve_app.tools.offer import Offer, OfferedTool
from lexshard.serve_app.tools.plan import ReplyPlan
from lexshard.serve_app.tools.reply_parser import ReplyParser
from tests.support.reply_scripts import THINK, parsed

END = "<|end|>"
CALL_MARKS = {mark: None for family in FAMILIES_BY_NAME.values() for mark in family.marks}
MARKS = (*CALL_MARKS, THINK.opening, THINK.closing)
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
WEATHER = OfferedTool("get_weather", None, CITY, "tools.0.function", strict=True)
OTHER = OfferedTool("get", None, CITY, "tools.1.function")
RUN = OfferedTool("run", None, INPUT, "tools.2.custom", True, True, 'start: /[a-z]+/ "!"')
ALL = {tool.name: tool for tool in (WEATHER, OTHER, RUN)}
ANSWER = {"json_schema": CITY}
TEXT = "Hello, a < b."
ANSWERED = '{"city": "Oslo"}'
# A call of `get_weather`, two calls, the second of `run`, and one whose arguments do not fit.
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        '<tool_call>\n{"name": "get", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "run", "arguments": <input>go!</input>}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"town": "Oslo"}}\n</tool_call>',
    ),
    "qwen3-coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"
        "\n</tool_call>",
        "<tool_call>\n<function=get>\n<parameter=city>\nOs\nlo\n</parameter>\n<parameter=days>\n3"
        "\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=run>\n<parameter=input>\ngo!\n</parameter>\n</function>"
        "\n</tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\n</function>"
        "\n</tool_call>",
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        '[TOOL_CALLS][{"name": "get", "arguments": {"city": "Oslo"}}, '
        '{"name": "run", "arguments": <input>go!</input>}]',
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": 5}}]',
    ),
    "mistral-named": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}',
        '[TOOL_CALLS]get[ARGS]{"city": "Oslo"}[TOOL_CALLS]run[ARGS]<input>go!</input>',
        '[TOOL_CALLS]get_weather[ARGS]{"city": 5}',
    ),
    "llama3": (
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        '{"name": "get", "parameters": {"city": "Oslo"}}; '
        '{"name": "run", "parameters": <input>go!</input>}',
        '{"name": "get_weather", "parameters": {"city": 5}}',
    ),
    "json": (
        '[{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        '[{"name": "get", "arguments": {"city": "Oslo"}}, '
        '{"name": "run", "arguments": <input>go!</input>}]',
        '[{"name": "get_weather", "arguments": {"city": 5}}]',
    ),
}


@cache
def tokenizers(marked: bool) -> tuple[Tokenizer, LLTokenizer]:
    """One token for each byte, and where ``marked`` for each mark. Some that text holds reach over
    the ends of what grammars name."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    tokenizer.add_special_tokens([END, *(MARKS if marked else ())])
    longer = [' {"', '": {"', '"}}', "\n\n"]
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in longer])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = tokenizer.token_to_id(END)
    return tokenizer, LLTokenizer(tokenizer.to_str(), eos_token=end)


def format_of(family: str, marked: bool) -> ReplyFormat:
    tokenizer, _ = tokenizers(marked)
    ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS} if marked else {}
    return ReplyFormat(FAMILIES_BY_NAME[family], THINK, ids)


def allows(grammar: str | None, text: str, marked: bool) -> bool:
    """Whether ``text`` may be a whole reply."""
    assert grammar is not None
    tokenizer, for_grammars = tokenizers(marked)
    matcher = LLMatcher(for_grammars, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize("marked", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("beginning", ["free", "thinking", "thought"])
def test_a_reply_thinks_then_calls_or_answers(
    family: str, beginning: Beginning, marked: bool
) -> None:
    format = format_of(family, marked)
    thought = "If a < b, {" if marked else "If a < b, <tool_call> {"
    thinking = {
        "free": f"<think>\n{thought}\n</think>\n\n",
        "thinking": "If a < b,\n</think>\n",
        "thought": "",
    }[beginning]
    one, two, wrong = (thinking + call for call in CALLS[family])
    answered = thinking + ANSWERED
    bare = FAMILIES_BY_NAME[family].bare

    def allowed(offer: Offer | None, answer: Any = None) -> set[str]:
        grammar = reply_grammar(format, beginning, offer, answer)
        texts = {
            "one": one,
            "two": two,
            "wrong": wrong,
            "text": thinking + TEXT,
            "text and one": f"{thinking}Well: {CALLS[family][0]}",
            "text and wrong": f"{thinking}Well: {CALLS[family][2]}",
            "answer": answered,
        }
        return {name for name, text in texts.items() if allows(grammar, text, marked)}

    texts = {"text", "answer", "text and one"} | ({"text and wrong"} if bare else set())
    assert allowed(Offer(ALL, required=False, single=False)) == {"one", "two"} | texts
    assert allowed(Offer(ALL, required=False, single=True)) == {"one"} | texts
    assert allowed(Offer(ALL, required=True, single=False)) == {"one", "two"}
    assert allowed(Offer(ALL, required=True, single=True)) == {"one"}
    assert allowed(Offer({"get": OTHER}, required=True, single=True)) == set()
    several = set() if bare else {"two"}  # without marks calls are told from JSON one at a time
    answered_or_called = allowed(Offer(ALL, required=False, single=False), ANSWER)
    assert answered_or_called == {"answer", *several, *(() if family == "json" else ("one",))}
    assert allowed(None, ANSWER) == {"answer"}
    assert reply_grammar(format, beginning, None, None) is None


def test_no_thought_spells_the_mark_that_ends_it() -> None:
    """It would not end it where the mark is a token: a model is led to that."""
    tokenizer, for_grammars = tokenizers(marked=True)
    grammar = reply_grammar(format_of("hermes", True), "thinking", None, ANSWER)
    matcher = LLMatcher(for_grammars, grammar or "", log_level=0)
    assert matcher.consume_tokens(tokenizer.encode("a </think", add_special_tokens=False).ids)
    [spelled] = tokenizer.encode(">", add_special_tokens=False).ids
    assert matcher.validate_tokens([spelled]) == 0
    rest = tokenizer.encode(f" b</think>{ANSWERED}", add_special_tokens=False).ids
    assert matcher.validate_tokens(rest) == len(rest)


@pytest.mark.parametrize("family", CALLS)
def test_what_a_grammar_allows_is_read_as_calls(family: str) -> None:
    said = parsed(ReplyParser(format_of(family, False), ALL), [CALLS[family][1]])
    assert [name for name, _ in said.calls] == ["get", "run"]
    assert json.loads(said.calls[0][1])["city"].replace("\n", "") == "Oslo"
    assert said.calls[1] == ("run", "go!")
    assert said.content == ""


@pytest.mark.parametrize("marked", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("required", [False, True], ids=["auto", "required"])
def test_whatever_a_grammar_allows_is_read_as_it_was_meant(
    family: str, required: bool, marked: bool
) -> None:
    """Replies of tokens that are drawn from those allowed, whatever they are."""
    format = format_of(family, marked)
    tokenizer, for_grammars = tokenizers(marked)
    chance = random.Random(f"{family} {marked}")
    short = {"type": "string", "minLength": 1, "maxLength": 3}
    words = {"type": "array", "items": short}
    schema = {**CITY, "properties": {"city": short, "deep": words}}
    tools = {
        "get": OfferedTool("get", None, schema, "tools.0.function", strict=True),
        "run": replace(RUN, lark="start: /[a-z{]{1,3}/"),
    }
    grammar = reply_grammar(format, "free", Offer(tools, required, single=False), None)
    opening, bare = FAMILIES_BY_NAME[family].opening, FAMILIES_BY_NAME[family].bare
    endings = [
        tokenizer.encode(each, add_special_tokens=False).ids
        for each in ("</think>", "\n</parameter>\n", '"', END, *([opening] if opening else []))
    ]
    for _ in range(12):
        matcher = LLMatcher(for_grammars, grammar or "", log_level=0)
        ids: list[int] = []
        while not matcher.is_stopped():
            assert len(ids) < 4000
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(tokenizer.get_vocab_size()) if mask[i // 8] >> i % 8 & 1]
            more = [chance.choice(allowed)]
            for ending in endings:  # what may be of any length ends soon
                if chance.random() < 0.4 and matcher.validate_tokens(ending) == len(ending):
                    more = ending
            assert matcher.consume_tokens(more)
            ids += more
        text = tokenizer.decode(ids, skip_special_tokens=False).removesuffix(END)
        parser = ReplyParser(format, tools)
        for end, token_id in enumerate(ids, 1):
            if token_id in format.token_ids.values():
                parser.token(token_id, len(tokenizer.decode(ids[:end], skip_special_tokens=False)))
        said = parsed(parser, [text])
        assert said.calls or not required, text
        assert said.content == "" or not required, text
        assert bare or opening not in said.content, text
        for name, arguments in said.calls:
            if name == "get":
                assert json.loads(arguments).keys() <= {"city", "deep"}, text
            else:
                assert 1 <= len(arguments) <= 3, text


# A call of `f` with such arguments; where an answer may stand in its place, it is no list.
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=f>\n%s</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": %s}]',
    "mistral-named": "[TOOL_CALLS]f[ARGS]%s",
    "llama3": '{"name": "f", "parameters": %s}',
    "json": '[{"name": "f", "arguments": %s}]',
    "json, or an answer": '{"name": "f", "arguments": %s}',
}
INTEGER = {"type": "integer"}
BOTH = {"properties": {"a": INTEGER, "b": INTEGER}}
EITHER = [{"required": ["a"]}, {"required": ["b"]}]
LEAF = {"additionalProperties": False, "properties": {"a": INTEGER, "b": {"$ref": "#/$defs/x"}}}
APART = {"$id": "x:b", "type": "object", "properties": {"a": {"$ref": "#/$defs/c"}}}
APART["$defs"] = {"c": INTEGER}
ROUND = {"$id": "x:r", "type": "object", "properties": {"a": {"$ref": "#"}}}
NAMED = {"$id": "http://a", "$defs": {"<": INTEGER | {"$anchor": "here"}}}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (BOTH | {"anyOf": EITHER}, {"b": 1}, {}),
        (BOTH | {"dependentRequired": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
        (BOTH | {"not": EITHER[0]}, {"b": 1}, {"a": 1}),
        (BOTH | {"minProperties": 2}, {"a": 1, "b": 1}, {"b": 1}),
        ({"additionalProperties": INTEGER}, {"a": 1}, {"a": []}),
        ({"required": ["a"]}, {"a": 1}, {}),
        ({"$ref": "#/$defs/x", "$defs": {"x": LEAF}}, {"a": 5}, {"a": []}),
        ({"$ref": "#/$defs/x", "$defs": {"x": LEAF}}, {"b": {"a": 5}}, {"c": 5}),
        ({"properties": {"a": INTEGER, "b": {"$ref": "#/properties/a"}}}, {"b": 5}, {"b": []}),
        ({"properties": {"a": INTEGER, "b": {"$ref": "#"}}}, {"b": {"a": 5}}, {"b": {"a": []}}),
        (NAMED | {"properties": {"/ %": {"$ref": "#/$defs/%3C"}}}, {"/ %": 1}, {"/ %": []}),
        (NAMED | {"properties": {"a": {"$ref": "http://a#/$defs/%3C"}}}, {"a": 5}, {"a": []}),
        (NAMED | {"properties": {"a": {"$ref": "#here"}}}, {"a": 5}, {"a": []}),
        ({"properties": {"b": {"$ref": "x:b"}}, "$defs": {"b": APART}}, {"b": {"a": 5}}, {"b": 5}),
        ({"properties": {"b": ROUND}}, {"b": {"a": {}}}, {"b": {"a": 5}}),
        (
            {"$id": "http://a", "$ref": "http://a#/$defs/x", "$defs": {"x": LEAF}},
            {"a": 5},
            {"c": 5},
        ),
    ],
)
def test_what_of_a_schema_a_call_is_not_held_to_is_told_or_refused(
    name: str, schema: dict[str, Any], right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    def called(arguments: dict[str, Any]) -> str:
        text = json.dumps(arguments)
        if family == "qwen3-coder":
            each = (f"{key}>\n{json.dumps(value)}\n" for key, value in arguments.items())
            text = "".join(f"<parameter={part}</parameter>\n" for part in each)
        return WRITTEN[name] % text

    family, _, answer = name.partition(",")
    format = replace(format_of(family, marked=False), reasoning=None)
    answered = Constraint({"json_schema": {"const": 1}}, "response_format") if answer else None
    refers = "$ref" in str(schema)  # every family holds these
    for strict in (False, True):
        tool = OfferedTool("f", None, {"type": "object"} | schema, "tools.0.function", strict)
        plan = ReplyPlan(format, Offer({"f": tool}, required=not answer, single=True), free=False)
        try:
            constraint = plan.around(answered)
            assert constraint is not None
            matcher = LLMatcher(tokenizers(False)[1], constraint.text(), log_level=0)
            told = Compiled(matcher.get_error() or None, tuple(matcher.get_grammar_warnings()))
            notes = checked_notes(told, constraint)
        except ApiError:
            assert strict
            assert not refers
            return
        assert notes == () or not (strict or refers)
        assert allows(constraint.text(), called(right), marked=False)
        assert notes or not allows(constraint.text(), called(wrong), marked=False)
        [(_, read)] = parsed(ReplyParser(format, {"f": tool}), [called(right)]).calls
        assert json.loads(read) == right or not refers
