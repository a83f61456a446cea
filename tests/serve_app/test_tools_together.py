"""Tools that are too much together: what a request costs until it is held to less, or refused, and
what its reply says of that."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lexshard.serve_app.structured.compiling import Compiled, GrammarCompiler
from tests.support.mock_server import HELLO, Client, serve
from tests.support.tool_chats import saying, tool_tokenizer

PATH = "/v1/chat/completions"
TOKENIZER = tool_tokenizer()
SLOW = Compiled("it takes too long to compile")


def tools(count: int, strict: bool = False) -> list[dict[str, Any]]:
    """Each has a property that no other has."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"f{i}",
                "strict": strict,
                "parameters": {"type": "object", "properties": {f"p{i}.": {}}},
            },
        }
        for i in range(count)
    ]


class StandIn:
    """Compiles nothing, and notes what it was asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.wrong: str | None = None  # a grammar that holds it is wrong
        self.most = 1 << 20  # grammars with more schemas are too slow
        patch.setattr(GrammarCompiler, "compiled", self._compiled)

    async def _compiled(self, text: str, *_: Any) -> Compiled:
        self.asked.append(text)
        if self.wrong is not None and self.wrong in text:
            return Compiled("Invalid type: sting")
        return SLOW if text.count('"properties"') > self.most else Compiled(None)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def ask(**fields: Any) -> Any:
    async def request(client: Client) -> Any:
        return await client.post(PATH, json={"messages": HELLO, **fields})

    engine = saying("Hello", TOKENIZER)
    engine.max_model_len = 100_000  # hundreds of tools are a long prompt
    return serve(request, engine, TOKENIZER)


def test_many_slow_tools_cost_one_grammar_more(compiler: StandIn) -> None:
    compiler.most = 3
    reply = ask(tools=tools(512))
    assert reply.status_code == 200
    assert len(compiler.asked) == 2
    assert "p511." not in compiler.asked[-1]
    told = "what is in 'parameters' of tools without 'strict' was left to the model"
    assert reply.json()["constraint_notes"] == [told]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_slow_tools_that_are_strict_are_refused_together(compiler: StandIn, choice: str) -> None:
    compiler.most = 3
    reply = ask(tools=tools(512, strict=True), tool_choice=choice)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "tools")
    assert error["message"].startswith("'tools': it takes too long to compile; offer fewer")
    assert len(set(compiler.asked)) == 1


def test_one_slow_tool_is_named(compiler: StandIn) -> None:
    compiler.most = 0
    error = ask(tools=tools(1)).json()["error"]
    assert error["param"] == "tools.0.function.parameters"


@pytest.mark.parametrize("at", [0, 1, 255, 300, 511])
def test_a_tool_that_is_wrong_is_found_in_a_dozen_grammars(compiler: StandIn, at: int) -> None:
    compiler.wrong = f"p{at}."
    reply = ask(tools=tools(512))
    assert (reply.status_code, reply.json()["error"]["param"]) == (
        400,
        f"tools.{at}.function.parameters",
    )
    assert len(compiler.asked) <= 12


def test_a_search_ends_where_tools_are_slow(compiler: StandIn) -> None:
    compiler.wrong, compiler.most = "p500.", 3
    assert ask(tools=tools(512)).status_code == 200  # its schema is not held to
    assert len(compiler.asked) == 3


def test_a_reply_that_is_held_to_nothing_says_so(compiler: StandIn) -> None:
    compiler.wrong = "FIRST"  # of a text beside calls
    told = ["how 'tools' are called was left to the model"]
    assert ask(tools=tools(3)).json()["constraint_notes"] == told
    assert ask(tools=tools(3), ignore_eos=True).json()["constraint_notes"] == told


def test_a_reply_says_what_of_tools_and_answer_no_grammar_holds(compiler: StandIn) -> None:
    [tool] = tools(1)
    tool["function"]["parameters"] = {"properties": {"a": {"pattern": "^(?!x)"}}}
    schema = {"type": "object", "properties": {"b": {"type": "string", "pattern": "^(?=y)"}}}
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for_tool, for_answer = (
        f"'pattern' at '#/properties/{name}/pattern' (it looks around) was left to the model"
        for name in "ab"
    )
    assert ask(tools=[tool]).json()["constraint_notes"] == [for_tool]
    assert ask(response_format=answer).json()["constraint_notes"] == [for_answer]
    both = ask(tools=[tool], response_format=answer).json()["constraint_notes"]
    assert both == [for_tool, for_answer]
    assert compiler.asked


def test_what_is_wrong_before_there_is_a_grammar_costs_none(compiler: StandIn) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "x"}}
    assert ask(tools=tools(3), response_format=wrong).status_code == 400
    assert ask(tools=tools(3), tool_choice="required", ignore_eos=True).status_code == 400
    assert compiler.asked == []


def test_an_answer_that_is_wrong_is_named(compiler: StandIn) -> None:
    compiler.wrong = "sting"
    schema = {"properties": {"a": {"type": "sting"}}}
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert ask(tools=tools(3), response_format=wrong).json()["error"]["param"] == "response_format"
    assert len(compiler.asked) == 2
    assert json.loads(compiler.asked[1])["grammars"][0].keys() == {"json_schema"}
