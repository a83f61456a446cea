"""From the chunks of a chat completion to a message: its blocks, and the events of its stream."""

from __future__ import annotations

import uuid
from typing import Any

import orjson

from lexshard.serve_app.messages_api.errors import messages_error
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.over_chat.answering import ReplyWriter
from lexshard.serve_app.over_chat.chunks import Added, Began, ReplyPart, ReplyReader, Step

Event = dict[str, Any]
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Nothing here is encrypted, so nothing has to be verified when it comes back; but clients forget
# thinking that has an empty signature.
SIGNATURE = "unsigned"
NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0}


class MessagesWriter(ReplyWriter):
    """Writes one message, in answer to the request of that id."""

    def __init__(self, model: str, request_id: str) -> None:
        self._reader = ReplyReader()
        self._request_id = request_id
        self._begun = False
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(NO_USAGE),
        }

    def take(self, chunk: dict[str, Any]) -> list[Event]:
        steps = list(self._reader.take(chunk))
        return [*self._begin(), *(told for step in steps for told in self._step(step))]

    def end(self) -> list[Event]:
        events = self._begin()
        for step in self._reader.end():
            events += self._step(step)
        reader, message = self._reader, self._message
        message["content"] = [_block(part) for part in reader.parts]
        message["stop_reason"] = self._stop_reason()
        message["stop_sequence"] = reader.stop_reason
        message["usage"] = usage_of(reader.usage or NO_USAGE)
        told = {"stop_reason": message["stop_reason"], "stop_sequence": reader.stop_reason}
        return [
            *events,
            {"type": "message_delta", "delta": told, "usage": message["usage"]},
            {"type": "message_stop"},
        ]

    def whole(self) -> dict[str, Any]:
        return self._message

    def failed(self, error: ApiError) -> list[Event]:
        return [messages_error(error, self._request_id)]

    def _stop_reason(self) -> str:
        if self._reader.finish_reason == "length":
            return STOP_REASONS["length"]
        if any(part.kind == "call" for part in self._reader.parts):
            return STOP_REASONS["tool_calls"]
        if self._reader.stop_reason is not None:
            return "stop_sequence"
        return STOP_REASONS["stop"]

    def _begin(self) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        usage = usage_of(self._reader.usage or NO_USAGE)
        return [{"type": "message_start", "message": {**self._message, "usage": usage}}]

    def _step(self, step: Step) -> list[Event]:
        part = step.part
        if isinstance(step, Began):
            empty = {"type": "content_block_start", "index": part.index}
            return [{**empty, "content_block": _empty_block(part)}]
        if isinstance(step, Added):
            return [_delta(part, _added(part, step.text))]
        stop = {"type": "content_block_stop", "index": part.index}
        if part.kind == "reasoning":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            return [_delta(part, signed), stop]
        return [stop]


def _delta(part: ReplyPart, delta: dict[str, Any]) -> Event:
    return {"type": "content_block_delta", "index": part.index, "delta": delta}


def _added(part: ReplyPart, text: str) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text_delta", "text": text}
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _empty_block(part: ReplyPart) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": ""}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}


def _block(part: ReplyPart) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
    called = {"type": "tool_use", "id": part.call_id, "name": part.name}
    return {**called, "input": _arguments(part.text)}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; none where the budget ended in their JSON."""
    try:
        told = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return told if isinstance(told, dict) else {}


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """What a chat completion used, in this protocol's words: tokens of the prompt that were in the
    prefix cache are not among its ``input_tokens``."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
