"""Formats of structural tags: which texts each lets through, and what none can hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from lexshard.serve_app.openai.errors import ApiError
from tests.support.constraint_texts import BYTES, LIMITS, matches, read


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
CALLS = [tag("<f=a>", NUMBER, "</f>"), tag("<f=b>", ANY, "</f>")]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": CALLS}
SEPARATED = {"type": "tags_with_separator", "tags": CALLS, "separator": ", "}

CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (sequence(text('a"\n'), NUMBER, text("é")), ['a"\n12é'], ['a"\n12', "12"]),
    (one_of(text("x"), NUMBER), ["x", "5"], ["x5", ""]),
    (
        tag("<t>", ANY, "</t>"),
        ["<t></t>", "<t>a<b</t>", "<t>é</</t>"],
        ["<t>", "<t>a</t>b", "<t></t></t>"],
    ),
    (tag("<t>", ANY, ["</t>", "</s>"]), ["<t>a</s>"], ["<t>a</s></t>"]),
    (tag("<t>", NUMBER, "</t>"), ["<t>5</t>"], ["<t>a</t>"]),
    (tag("<t>", {**ANY, "excludes": ["</t>"]}, "</t>"), ["<t>a</t>"], ["<t>a</t></t>"]),
    (tag("<t>", {**ANY, "excludes": ["bad"]}, "</t>"), ["<t>ba</t>"], ["<t>bad</t>"]),
    ({**ANY, "excludes": ["bad", "w.r"]}, ["ba d", "war", ""], ["a bad b", "w.r"]),
    ({**ANY, "max_chars": 3}, ["abc", "é\n1"], ["abcd"]),
    (sequence(tag("<think>", ANY, "</think>"), ANY), ["<think>a</think>b"], ["a"]),
    (sequence(ANY, text("END"), NUMBER), ["aaEND5", "END5"], ["aaEND", "END"]),
    (sequence(sequence(text("a"), ANY), text("END"), text("b")), ["axENDb"], ["axEND"]),
    (sequence(one_of(ANY, text("b")), text("END")), ["xEND", "bEND"], ["b", "x"]),
    (sequence(one_of(NUMBER, text("b")), text("END")), ["5END", "bEND"], ["b", "xEND"]),
    ({"type": "regex", "pattern": r"[a-z]+/\d"}, ["ab/5"], ["ab5"]),
    ({"type": "grammar", "grammar": 'start: "a" B\nB: /[0-9]+/'}, ["a55"], ["a"]),
    ({"type": "grammar", "grammar": 'root ::= "a" [0-9]+'}, ["a55"], ["a"]),
    ({"type": "optional", "content": text("a")}, ["", "a"], ["aa"]),
    ({"type": "plus", "content": text("a")}, ["aa", "a"], [""]),
    ({"type": "star", "content": sequence(NUMBER, text(";"))}, ["5;6;", ""], ["5"]),
    ({"type": "star", "content": tag("<", ANY, ">")}, ["<a><b>", ""], ["<a"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": text("a")}, ["aa", "a"], ["", "aaa"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": text("a")}, ["aa", "aaa"], ["", "a"]),
    (
        TRIGGERED,
        ["", "hello", "x<f=a>5</f>", "<f=b>any</f>more<f=a>1</f>"],
        ["<f=a>x</f>", "<f=c>", "<f=", "x<f=a>5"],
    ),
    ({**TRIGGERED, "at_least_one": True}, ["x<f=a>5</f>"], ["", "hello"]),
    ({**TRIGGERED, "stop_after_first": True}, ["x", "x<f=a>5</f>"], ["x<f=a>5</f>b"]),
    (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        ["x<f=a>5</f>"],
        ["x<f=a>5</f>b", "x"],
    ),
    (
        {**TRIGGERED, "excludes": ["secret"]},
        ["x<f=a>5</f>", "secre"],
        ["a secret", "secret<f=a>5</f>"],
    ),
    (tag("<o>", TRIGGERED, "</o>"), ["<o>x<f=a>5</f></o>", "<o>a</o>"], ["<o>a", "<o>a</o>b"]),
    (
        SEPARATED,
        ["", "<f=a>5</f>", "<f=a>5</f>, <f=b>x</f>"],
        ["<f=a>5</f>,", "<f=a>5</f><f=a>5</f>"],
    ),
    ({**SEPARATED, "at_least_one": True}, ["<f=a>5</f>"], [""]),
    ({**SEPARATED, "stop_after_first": True}, ["<f=a>5</f>", ""], ["<f=a>5</f>, <f=b>x</f>"]),
]


@pytest.mark.parametrize(("format", "right", "wrong"), CASES, ids=lambda each: str(each)[:50])
def test_a_format_lets_through_what_it_says(
    format: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    tag = {"type": "structural_tag", "format": format}
    for fields in (
        {"response_format": tag},
        {"structured_outputs": {"structural_tag": {"format": format}}},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
    ):
        matcher = LLMatcher(BYTES, read(fields).text(), log_level=0, limits=LIMITS)
        assert not matcher.get_error()
        assert [each for each in right if not matches(matcher, each)] == []
        assert [each for each in wrong if matches(matcher, each)] == []


def test_a_text_may_be_a_special_token() -> None:
    format = sequence(tag("<|think|>", ANY, ["<|done|>", "."]), text("a"))
    fields = {"structured_outputs": {"structural_tag": {"format": format}}}
    lark = read(fields, ("<|think|>", "<|done|>")).grammar["lark_grammar"]
    assert '"<|think|>"' not in lark
    assert " <|done|>" in lark
    assert '"."' in lark
    assert '"<|think|>"' in read(fields).grammar["lark_grammar"]


@pytest.mark.parametrize(
    ("format", "told"),
    [
        (sequence(ANY, NUMBER), "free text must come last"),
        ({"type": "star", "content": ANY}, "free text must come last"),
        (sequence(one_of(ANY, text("a")), NUMBER), "free text must come last"),
        ({**TRIGGERED, "triggers": ["<g="]}, "none of 'triggers' begins"),
        ({"type": "repeat", "min": 3, "max": 2, "content": text("a")}, "from 3 to 2"),
        ({"type": "json_schema", "json_schema": False}, "no JSON fits"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "style"),
        ({"type": "token", "token": 5}, "token"),
        ({"type": "sequence", "elements": []}, "at least 1"),
        ({"type": "regex", "pattern": "a", "more": 1}, "more"),
    ],
)
def test_what_no_grammar_holds_is_refused_by_name(format: dict[str, Any], told: str) -> None:
    fields = {"structured_outputs": {"structural_tag": {"format": format}}}
    with pytest.raises(ApiError) as refused:
        read(fields)
    assert refused.value.status == 400
    assert told in str(refused.value)
    assert "structural_tag" in str(refused.value)


def test_a_tag_is_a_format_or_structures() -> None:
    structures = [{"begin": "<a>", "schema": {}, "end": ""}]
    for tag in (
        {},
        {"format": ANY, "triggers": ["<"], "structures": structures},
        {"triggers": ["<"]},
        {"structures": structures},
    ):
        with pytest.raises(ApiError, match="give 'format', or both"):
            read({"structured_outputs": {"structural_tag": tag}})


def test_formats_are_not_nested_without_end() -> None:
    format: dict[str, Any] = ANY
    for _ in range(400):
        format = {"type": "or", "elements": [format]}
    with pytest.raises(ApiError):
        read({"structured_outputs": {"structural_tag": {"format": format}}})
