"""Anthropic's own library, whose runner calls the tool."""

from __future__ import annotations

from typing import Any

import anthropic
from asked import CHAT, MOST, Booking, Day, Told, free_tables, report


def messages(url: str, key: str, model: str) -> Told:
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    chat: list[Any] = [{"role": "user", "content": CHAT}]
    usual: dict[str, Any] = {"model": model, "max_tokens": MOST, "messages": chat}
    usual["extra_body"] = {"temperature": 0}
    plain = client.messages.create(**usual).content[0].text
    with client.messages.stream(**usual) as stream:
        pieces = list(stream.text_stream)
    parsed = client.messages.parse(output_format=Booking, **usual)
    told = Told(plain, pieces, parsed.parsed_output)

    @anthropic.beta_tool(name="free_tables")
    def told_tables(day: Day) -> str:
        """How many tables are free on a day."""
        told.called.append(day)
        return free_tables(day)

    runner = client.beta.messages.tool_runner(
        tools=[told_tables], tool_choice={"type": "any"}, max_iterations=2, **usual
    )
    for message in runner:
        runner.set_messages_params(lambda asked: asked | {"tool_choice": {"type": "auto"}})
        told.answer = "".join(block.text for block in message.content if block.type == "text")
    return told


if __name__ == "__main__":
    report(messages)
