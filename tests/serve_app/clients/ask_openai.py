"""OpenAI's own library: chats and Responses, with the loop over a tool written out."""

from __future__ import annotations

import json
from typing import Any

import openai
from asked import CHAT, MOST, PARAMETERS, Booking, Told, free_tables, report


def client(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def chat(url: str, key: str, model: str) -> Told:
    completions = client(url, key).chat.completions
    messages: list[Any] = [{"role": "user", "content": CHAT}]
    usual: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": MOST}
    plain = completions.create(messages=messages, **usual).choices[0].message.content
    with completions.stream(messages=messages, **usual) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
    parsed = completions.parse(messages=messages, response_format=Booking, **usual)
    told = Told(plain or "", pieces, parsed.choices[0].message.parsed)

    function = {"name": "free_tables", "strict": True, "parameters": PARAMETERS}
    tools: list[Any] = [{"type": "function", "function": function}]
    asked = completions.create(messages=messages, tools=tools, tool_choice="required", **usual)
    messages.append(asked.choices[0].message)
    messages += told.results(asked.choices[0].message.tool_calls)
    answered = completions.create(messages=messages, tools=tools, **usual)
    told.answer = answered.choices[0].message.content
    return told


def responses(url: str, key: str, model: str) -> Told:
    replies = client(url, key).responses
    usual: dict[str, Any] = {"model": model, "temperature": 0, "max_output_tokens": MOST}
    plain = replies.create(input=CHAT, **usual).output_text
    with replies.stream(input=CHAT, **usual) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    parsed = replies.parse(input=CHAT, text_format=Booking, **usual)
    told = Told(plain, pieces, parsed.output_parsed)

    tool = {"type": "function", "name": "free_tables", "strict": True, "parameters": PARAMETERS}
    asked = replies.create(input=CHAT, tools=[tool], tool_choice="required", **usual)
    results = []
    for call in asked.output:
        day = json.loads(call.arguments)["day"]
        told.called.append(day)
        result = {"type": "function_call_output", "call_id": call.call_id}
        results.append(result | {"output": free_tables(day)})
    answered = replies.create(input=results, previous_response_id=asked.id, tools=[tool], **usual)
    told.answer = answered.output_text
    return told


if __name__ == "__main__":
    report(chat, responses)
