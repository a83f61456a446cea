"""What the protocols that are translated to chat completions answer, as JSON Schema sees it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from lexshard.serve_app.description.replies import Reply


class OpenReply(Reply):
    """Of what is in it, what it has depends on its ``type``."""

    model_config = ConfigDict(extra="allow")


class ResponseItem(OpenReply):
    """A message, reasoning, or a call of a tool."""

    id: str
    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    ]


class ResponseUsageReply(Reply):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesReply(Reply):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    completed_at: int | None
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsageReply | None
    user: str | None
    receipt: dict[str, Any] | None = None
    constraint_notes: list[str] | None = None


class ResponsesEvent(OpenReply):
    """An event of a stream, in the order of ``sequence_number``."""

    type: str
    sequence_number: int


class ItemsReply(Reply):
    object: Literal["list"]
    data: list[ResponseItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedReply(Reply):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class BlockReply(OpenReply):
    type: Literal["text", "thinking", "tool_use"]


class MessagesUsage(Reply):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessagesReply(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockReply]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage
    receipt: dict[str, Any] | None = None
    constraint_notes: list[str] | None = None


class MessagesEvent(OpenReply):
    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]


class TokenCountReply(Reply):
    input_tokens: int


class MessagesErrorObject(Reply):
    type: str
    message: str
    details: dict[str, Any] | None = None


class MessagesErrorReply(Reply):
    type: Literal["error"]
    error: MessagesErrorObject
    request_id: str
