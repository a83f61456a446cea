"""From a request for a response to one for a chat completion."""

from __future__ import annotations

from typing import Any

from lexshard.serve_app.openai.errors import bad_request
from lexshard.serve_app.over_chat.chat_body import (
    NO_THINKING,
    ChatBody,
    Reads,
    thinking_fields,
)
from lexshard.serve_app.responses.items import Conversation
from lexshard.serve_app.responses.protocol import LOGPROBS, ResponsesRequest
from lexshard.serve_app.responses.tools import chat_tool_choice, chat_tools, response_format

# Fields of chat completions by those of responses, for what is refused later.
OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
# Told to the model as they are.
SAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "priority",
    "request_id",
    "parallel_tool_calls",
    "user",
)


def input_items(asked: ResponsesRequest) -> list[Any]:
    """Raises:
    ApiError: 400 where ``input`` is neither text nor a list.
    """
    if isinstance(asked.input, str):
        return [{"type": "message", "role": "user", "content": asked.input}]
    if not isinstance(asked.input, list):
        message = "'input' must be a string or a list of items"
        raise bad_request(message, "input", "invalid_type")
    return asked.input


def chat_body(asked: ResponsesRequest, earlier: list[dict[str, Any]], reads: Reads) -> ChatBody:
    """What a chat completion is asked to answer; ``earlier`` are the items of the responses that
    this one follows, and ``reads`` tells whether the chat template reads a variable.

    Raises:
        ApiError: 400 naming the place of what is wrong or is not implemented.
    """
    conversation = Conversation()
    if asked.instructions is not None:
        message = {"role": "system", "content": asked.instructions}
        conversation.add(message, "instructions")
    conversation.read(earlier, "previous_response_id")
    conversation.read(input_items(asked), "input")
    if not conversation.messages:
        raise bad_request("'input' must not be empty", "input")
    given = {name: getattr(asked, name) for name in SAME}
    body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    body["messages"] = conversation.messages
    if asked.max_output_tokens is not None:
        body["max_completion_tokens"] = asked.max_output_tokens
    if asked.truncation == "auto":
        body["truncate_prompt_tokens"] = -1
    if LOGPROBS in (asked.include or ()) or asked.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    effort = None if asked.reasoning is None else asked.reasoning.effort
    body |= thinking_fields(reads, effort, None if effort is None else effort != NO_THINKING)
    if asked.text is not None and asked.text.format is not None:
        body["response_format"] = response_format(asked.text.format)
    tools = chat_tools(asked.tools or [])
    if tools:
        body["tools"] = tools
    if asked.tool_choice is not None:
        choice = chat_tool_choice(asked.tool_choice, tools)
        if choice == "required" and not tools:
            raise bad_request("'tool_choice' is required, but there are no tools", "tool_choice")
        body["tool_choice"] = choice
    return ChatBody(body, conversation.places)
