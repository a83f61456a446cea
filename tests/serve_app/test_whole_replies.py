"""What is kept of a reply that is no stream until it is whole."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from lexshard.serve_app.openai.choice import Delta
from lexshard.serve_app.openai.response_writer import ResponseWriter
from tests.support.mock_server import chat, complete, says


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_whole_reply_is_added_up_as_it_comes(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 choices of 32,000 tokens were four million deltas: gigabytes."""
    kept: list[int] = []
    write = ResponseWriter.whole

    def whole(self: ResponseWriter, usage: dict[str, Any]) -> bytes:
        kept.append(sum(type(each) is Delta for each in gc.get_objects()))
        return write(self, usage)

    monkeypatch.setattr(ResponseWriter, "whole", whole)
    gc.collect()
    reply = ask({"n": 4, "max_tokens": 300}, says("a" * 500))
    texts = [each.get("text") or each["message"]["content"] for each in reply["choices"]]
    assert texts == ["a" * 300] * 4
    assert kept[0] < 100
