"""LiteLLM, which speaks OpenAI's protocol and Anthropic's behind one function."""

from __future__ import annotations

from typing import Any

import litellm
from asked import CHAT, MOST, PARAMETERS, Booking, Told, report

litellm.suppress_debug_info = True


def told_by(**usual: Any) -> Told:
    messages: list[Any] = [{"role": "user", "content": CHAT}]
    usual |= {"temperature": 0, "max_tokens": MOST, "num_retries": 0, "max_retries": 0}
    plain = litellm.completion(messages=messages, **usual).choices[0].message.content
    stream = litellm.completion(messages=messages, stream=True, **usual)
    pieces = [piece.choices[0].delta.content or "" for piece in stream]
    held = litellm.completion(messages=messages, response_format=Booking, **usual)
    booking = Booking.model_validate_json(held.choices[0].message.content)
    told = Told(plain, [piece for piece in pieces if piece], booking)

    function = {"name": "free_tables", "parameters": PARAMETERS}
    tools = [{"type": "function", "function": function}]
    asked = litellm.completion(messages=messages, tools=tools, tool_choice="required", **usual)
    messages.append(asked.choices[0].message.model_dump(exclude_none=True))
    messages += told.results(asked.choices[0].message.tool_calls)
    answered = litellm.completion(messages=messages, tools=tools, **usual)
    told.answer = answered.choices[0].message.content
    return told


def chat(url: str, key: str, model: str) -> Told:
    return told_by(model=f"openai/{model}", api_base=f"{url}/v1", api_key=key)


def messages(url: str, key: str, model: str) -> Told:
    return told_by(model=f"anthropic/{model}", api_base=url, api_key=key)


if __name__ == "__main__":
    report(chat, messages)
