"""A message in the words of its protocol: its blocks, and the events of its stream."""

from __future__ import annotations

import uuid
from typing import Any

import orjson

from lexshard.serve_app.messages_api.errors import messages_error
from lexshard.serve_app.openai.chat import ChatWriter
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.over_chat.parts import Event, PartsWriter, ReplyPart
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.tools.reply_reader import PartKind

# Nothing here is encrypted, so nothing has to be verified when it comes back; but clients forget
# thinking that has an empty signature.
SIGNATURE = "unsigned"
# What is told of a piece of a part, and by which field.
DELTAS: dict[PartKind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0}


class MessagesWriter(PartsWriter):
    """Writes one message, in answer to the request of that ``record``. What it begins with tells of
    the prompt's tokens."""

    continuous_usage = True

    def __init__(self, model: str, record: RequestRecord, chat: ChatWriter) -> None:
        super().__init__(chat)
        self._record = record
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(NO_USAGE),
            **self.notes,
        }

    def begun(self) -> list[Event]:
        usage = usage_of(self.usage or NO_USAGE) | {"output_tokens": 0}
        return [{"type": "message_start", "message": {**self._message, "usage": usage}}]

    def ended(self) -> list[Event]:
        told = {"stop_reason": self._stop_reason(), "stop_sequence": self.stop_reason}
        usage = usage_of(self.usage or NO_USAGE)
        self._message |= {
            "content": [_block(part, part.text) for part in self.parts],
            **told,
            "usage": usage,
        }
        last: Event = {"type": "message_delta", "delta": told, "usage": usage}
        if self.receipt is not None:
            self._message["receipt"] = last["receipt"] = self.receipt
        return [last, {"type": "message_stop"}]

    def reply(self) -> dict[str, Any]:
        return self._message

    def failure(self, error: ApiError) -> list[Event]:
        return [messages_error(error, self._record.request_id)]

    def part_begun(self, part: ReplyPart) -> list[Event]:
        empty = _block(part, "", "")
        return [{"type": "content_block_start", "index": part.index, "content_block": empty}]

    def part_added(self, part: ReplyPart, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        kind, field = DELTAS[part.kind]
        return [_delta(part, {"type": kind, field: text})]

    def part_ended(self, part: ReplyPart) -> list[Event]:
        stop = {"type": "content_block_stop", "index": part.index}
        if part.kind == "reasoning":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            return [_delta(part, signed), stop]
        return [stop]

    def _stop_reason(self) -> str:
        if self.finish_reason == "length":
            return "max_tokens"
        if self.called:
            return "tool_use"
        return "end_turn" if self.stop_reason is None else "stop_sequence"


def _delta(part: ReplyPart, delta: dict[str, Any]) -> Event:
    return {"type": "content_block_delta", "index": part.index, "delta": delta}


def _block(part: ReplyPart, text: str, signature: str = SIGNATURE) -> dict[str, Any]:
    """A part that says ``text``."""
    if part.kind == "text":
        return {"type": "text", "text": text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": signature}
    called = {"type": "tool_use", "id": part.call_id, "name": part.name}
    return {**called, "input": _arguments(text)}


def _arguments(text: str) -> dict[str, Any] | orjson.Fragment:
    """The arguments of a call; none where the budget ended in their JSON."""
    try:
        told = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    # As the model wrote them, which is what a stream tells: orjson reads four times as many levels
    # as it writes, and a whole reply that held them read would fail at its end.
    return orjson.Fragment(text) if isinstance(told, dict) else {}


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
