"""Instructor over OpenAI's library: structured replies are calls of a tool, or held to a schema.

It has no loop over tools of its own: the call comes as an object of the tool's arguments. Of a turn
that has calls alone it makes one with an empty list of content.
"""

from __future__ import annotations

from typing import Any

import instructor
import openai
from asked import CHAT, MOST, Booking, FreeTables, Told, free_tables, report


def told_by(url: str, key: str, model: str, mode: instructor.Mode) -> Told:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    completions = instructor.from_openai(client, mode=mode).chat.completions
    messages: list[Any] = [{"role": "user", "content": CHAT}]
    usual: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": MOST, "max_retries": 0}

    plain = completions.create(messages=messages, response_model=None, **usual)
    stream = completions.create(messages=messages, response_model=None, stream=True, **usual)
    pieces = [piece.choices[0].delta.content for piece in stream if piece.choices]
    whole = completions.create(messages=messages, response_model=Booking, **usual)
    partial = list(completions.create_partial(messages=messages, response_model=Booking, **usual))
    assert partial[-1].model_dump() == whole.model_dump()
    text = plain.choices[0].message.content
    told = Told(text, [piece for piece in pieces if piece], whole)

    call, reply = completions.create_with_completion(
        messages=messages, response_model=FreeTables, **usual
    )
    told.called.append(call.day)
    messages.append(reply.choices[0].message.model_dump())
    if mode == instructor.Mode.TOOLS:
        asked = reply.choices[0].message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": asked.id, "content": free_tables(call.day)}
        messages.append(result)
    else:
        messages.append({"role": "user", "content": free_tables(call.day)})
    answered = completions.create(messages=messages, response_model=None, **usual)
    told.answer = answered.choices[0].message.content
    return told


def tools(url: str, key: str, model: str) -> Told:
    return told_by(url, key, model, instructor.Mode.TOOLS)


def json_schema(url: str, key: str, model: str) -> Told:
    return told_by(url, key, model, instructor.Mode.JSON_SCHEMA)


if __name__ == "__main__":
    report(tools, json_schema)
