"""Replies are read alike however they are cut, and nothing is held back but what may be a mark."""

from __future__ import annotations

import json
import random

import pytest

from lexshard.actors.text.detokenizer import Detokenizer
from lexshard.serve_app.tools.families import FAMILIES_BY_NAME
from lexshard.serve_app.tools.offer import OfferedTool
from lexshard.serve_app.tools.reply_parser import ReplyParser
from lexshard.serve_app.tools.text_buffer import TextBuffer
from tests.support.mock_server import TOKENIZER
from tests.support.reply_scripts import TOOLS, format_of, parsed, reply

SCRIPTS = 2000
SLIPS = ("", "}", '"', "<", "]", "\\")
FAMILY_NAMES = sorted(FAMILIES_BY_NAME)


def parser(family: str, thinking: bool = False, thinks: bool = True) -> ReplyParser:
    return ReplyParser(format_of(family), TOOLS, thinking, thinks)


def decoded(content: bytes, cuts: list[int]) -> list[str]:
    """The pieces of text that a reply of such bytes comes in, cut there."""
    detokenizer = Detokenizer(TOKENIZER.token_bytes)
    pieces = []
    for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        for byte in content[begin:end]:
            detokenizer.push(byte)
        pieces.append(detokenizer.take())
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_any_cut_of_a_reply_gives_what_the_whole_says(family: str) -> None:
    chance = random.Random(family)
    for _ in range(SCRIPTS // len(FAMILY_NAMES) + 1):
        text, said = reply(chance, family)
        assert parsed(parser(family), [text]) == said, text
        content = text.encode()
        count = chance.choice([1, 3, len(content) // 2])
        some = sorted(chance.randint(0, len(content)) for _ in range(count))
        for cuts in (list(range(1, len(content))), some):
            assert parsed(parser(family), decoded(content, cuts)) == said, (text, cuts)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_cut_at_every_byte_gives_what_the_whole_says(family: str) -> None:
    chance = random.Random(f"{family} once")
    for _ in range(8):
        text, said = reply(chance, family)
        content = text.encode()
        for cut in range(len(content)):
            assert parsed(parser(family), decoded(content, [cut])) == said, (text, cut)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_any_text_is_read_alike_however_it_is_cut(family: str) -> None:
    """Replies that end anywhere, and replies with characters lost, added and swapped."""
    chance = random.Random(f"{family} broken")
    for _ in range(300):
        text, _ = reply(chance, family)
        characters = list(text[: chance.randint(0, len(text))])
        for _ in range(chance.choice([0, 1, 3])):
            at = chance.randint(0, len(characters))
            characters[at : at + chance.randint(0, 2)] = chance.choice([*SLIPS, text])
        broken = "".join(characters)
        whole = parsed(parser(family), [broken])
        assert parsed(parser(family), list(broken) or [""]) == whole, broken
        cuts = sorted(chance.randint(0, len(broken)) for _ in range(3))
        pieces = [broken[i:j] for i, j in zip([0, *cuts], [*cuts, len(broken)], strict=True)]
        assert parsed(parser(family), pieces) == whole, (broken, cuts)


NOPE = '{"name": "nope", "arguments": {"a": 1}}'
LATE_NAME = '{"arguments": {"a": [1]}, "name": "nope"}'
FOUND = '{"name": "get", "arguments": {}}'
MIXED = [
    ("mistral", f"[TOOL_CALLS][{FOUND}, %s]", "%s]", 1),
    (
        "mistral",
        f"Well [TOOL_CALLS][{FOUND}, {FOUND},%s, {FOUND}] more",
        f"Well%s, {FOUND}] more",
        2,
    ),
    ("mistral", f"[TOOL_CALLS][{FOUND}, %s][TOOL_CALLS][{FOUND}]", "%s]", 2),
    ("json", f"[{FOUND}, %s]", "%s]", 1),
    ("llama3", f"{FOUND}; %s; {FOUND}", f"%s; {FOUND}", 1),
    ("hermes", f"<tool_call>\n[{FOUND}, %s]\n</tool_call>", "%s]\n</tool_call>", 1),
]


@pytest.mark.parametrize("other", [NOPE, LATE_NAME, '{"a": 1}', "{}", "3", ""])
@pytest.mark.parametrize(("family", "text", "content", "calls"), MIXED)
def test_what_is_no_call_behind_one_is_text_from_its_beginning(
    family: str, text: str, content: str, calls: int, other: str
) -> None:
    """Its beginning was lost: a client was told ``,"arguments":{"a":1}}]``."""
    text, content = text.replace("%s", other), content.replace("%s", other)
    for pieces in ([text], list(text)):
        said = parsed(parser(family), pieces)
        assert said.content == content
        assert said.calls == [("get", "{}")] * calls


def test_names_of_parameters_may_hold_what_ends_one() -> None:
    names = ["a>b", "a", "a>", "b\nc"]
    schema = {"properties": {name: {"type": "string"} for name in names}}
    tools = {"f": OfferedTool("f", None, schema, "tools.0.function")}
    written = "".join(f"<parameter={name}>\nx>y\n</parameter>\n" for name in (*names, "c"))
    text = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    for pieces in ([text], list(text)):
        said = parsed(ReplyParser(format_of("qwen3-coder"), tools), pieces)
        assert said.content == ""
        [(_, arguments)] = said.calls
        assert json.loads(arguments) == dict.fromkeys((*names, "c"), "x>y")


def test_an_end_that_is_held_back_is_looked_through_once() -> None:
    """Not with every token anew: 32,000 line ends in a thought took 24 s."""
    looked = 0

    def trim(text: str) -> str:
        nonlocal looked
        looked += len(text)
        return text.rstrip("\n")

    buffer, told = TextBuffer(), list[str]()
    reading = buffer.until("</think>", told.append, trim)
    for _ in range(1000):
        buffer.append("\n")
        next(reading)
    assert told == []
    assert looked <= 2000
    buffer.append("a\n</think>")
    assert next(reading, None) is None
    assert "".join(told) == "\n" * 1000 + "a"
