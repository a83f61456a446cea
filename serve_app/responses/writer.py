"""A response in the words of its protocol: its items, and the events of its stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from lexshard.serve_app.openai.chat import ChatWriter
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.over_chat.parts import Event, PartsWriter, ReplyPart
from lexshard.serve_app.responses.protocol import ResponsesRequest, tool_spaces

Keep = Callable[[dict[str, Any]], Awaitable[None]]
# What a response that fails in its stream is told by.
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
ITEM_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
ITEM_TYPES = {"text": "message", "reasoning": "reasoning", "call": "function_call"}


def new_id(prefix: str) -> str:
    """An identity that nothing else has."""
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponsesWriter(PartsWriter):
    """Writes one ``response``, which is as it begins, and has it kept by ``keep`` before the client
    hears of its end, so that it may refer to it then."""

    def __init__(self, response: dict[str, Any], keep: Keep, chat: ChatWriter) -> None:
        super().__init__(chat)
        self._ids: list[str] = []  # of the items, by their numbers
        self._events = 0
        self._keep = keep
        self._spaces = tool_spaces(response["tools"])
        self._response = response | self.notes
        if any(tool["type"] == "web_search" for tool in response["tools"]):
            told = "'web_search' was left out of 'tools': this server runs none"
            self._response["constraint_notes"] = [told, *chat.notes]

    def begun(self) -> list[Event]:
        return [
            self._event("response.created", response=dict(self._response)),
            self._event("response.in_progress", response=dict(self._response)),
        ]

    def ended(self) -> list[Event]:
        incomplete = self.finish_reason == "length"
        status = "incomplete" if incomplete else "completed"
        self._finish(status)
        if incomplete:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._response["completed_at"] = int(time.time())
        if self.receipt is not None:
            self._response["receipt"] = self.receipt
        return [self._event(f"response.{status}", response=self._response)]

    def reply(self) -> dict[str, Any]:
        return self._response

    async def settle(self) -> None:
        await self._keep(self._response)

    def failure(self, error: ApiError) -> list[Event]:
        self._finish("failed")
        code = ERROR_CODES.get(error.status, "server_error")
        self._response["error"] = {"code": code, "message": error.message}
        return [self._event("response.failed", response=self._response)]

    def part_begun(self, part: ReplyPart) -> list[Event]:
        self._ids.append(new_id(ITEM_PREFIXES[_type(part)]))
        item = self._item(part, "in_progress")
        added = self._event("response.output_item.added", output_index=part.index, item=item)
        if part.kind == "call":
            return [added]
        empty = _content(part, "", [])
        place = self._place(part)
        return [added, self._event("response.content_part.added", **place, part=empty)]

    def part_added(self, part: ReplyPart, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        scores = {"logprobs": logprobs} if part.kind == "text" else {}
        place = self._place(part)
        return [self._event(f"response.{_field(part)}.delta", **place, delta=text, **scores)]

    def part_ended(self, part: ReplyPart) -> list[Event]:
        place, text = self._place(part), part.text
        told: dict[str, Any] = {"text": text}
        if part.kind == "text":
            told["logprobs"] = part.logprobs
        elif part.kind == "call":
            name = self._called(part)["name"]
            told = {"input": text} if part.custom else {"name": name, "arguments": text}
        events = [self._event(f"response.{_field(part)}.done", **place, **told)]
        if part.kind != "call":
            whole = _content(part, text, part.logprobs)
            events.append(self._event("response.content_part.done", **place, part=whole))
        item = self._item(part, self._status(part))
        return [
            *events,
            self._event("response.output_item.done", output_index=part.index, item=item),
        ]

    def _finish(self, status: str) -> None:
        self._response["status"] = status
        self._response["output"] = [
            self._item(part, self._status(part) if part.ended else "incomplete")
            for part in self.parts
        ]
        if self.usage is not None:
            self._response["usage"] = usage_of(self.usage)

    def _status(self, part: ReplyPart) -> str:
        """Of a part that has ended; with the budget, where that ended in it."""
        is_cut = part is self.parts[-1] and self.finish_reason == "length"
        return "incomplete" if is_cut else "completed"

    def _event(self, kind: str, **fields: Any) -> Event:
        told = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return told

    def _place(self, part: ReplyPart) -> dict[str, Any]:
        place = {"item_id": self._ids[part.index], "output_index": part.index}
        return place if part.kind == "call" else {**place, "content_index": 0}

    def _item(self, part: ReplyPart, status: str) -> dict[str, Any]:
        """A part as it is now; nothing is in it yet where ``status`` is ``in_progress``."""
        begins = status == "in_progress"
        item: dict[str, Any] = {"id": self._ids[part.index]}
        if part.kind == "call":
            called = {"call_id": part.call_id, **self._called(part)}
            called["input" if part.custom else "arguments"] = "" if begins else part.text
            return {**item, "status": status, "type": _type(part), **called}
        content = [] if begins else [_content(part, part.text, part.logprobs)]
        if part.kind == "text":
            item |= {"status": status, "type": "message", "role": "assistant"}
            return {**item, "content": content}
        item |= {"type": "reasoning", "summary": [], "content": content}
        return {**item, "encrypted_content": None, "status": status}

    def _called(self, part: ReplyPart) -> dict[str, str]:
        """The name that the client has for a tool, and its namespace where it is in one."""
        if part.name not in self._spaces:
            return {"name": part.name}
        namespace, name = self._spaces[part.name]
        return {"namespace": namespace, "name": name}


def _type(part: ReplyPart) -> str:
    return "custom_tool_call" if part.custom else ITEM_TYPES[part.kind]


def _content(part: ReplyPart, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The one part of a message or of reasoning."""
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _field(part: ReplyPart) -> str:
    """What of a part is told in pieces."""
    if part.kind == "call":
        return "custom_tool_call_input" if part.custom else "function_call_arguments"
    return "reasoning_text" if part.kind == "reasoning" else "output_text"


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """What a chat completion used, in the words of responses."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }


def beginning(asked: ResponsesRequest, model: str) -> dict[str, Any]:
    """A response before anything is said: much of it repeats what was asked for."""
    text, reasoning = asked.text, asked.reasoning
    form = {"type": "text"} if text is None or text.format is None else text.format
    told_text: dict[str, Any] = {"format": form}
    if text is not None and text.verbosity is not None:
        told_text["verbosity"] = text.verbosity
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": None,
        },
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": asked.store is not False,
        "temperature": asked.temperature,
        "text": told_text,
        "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        "tools": asked.tools or [],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": asked.top_p,
        "truncation": asked.truncation or "disabled",
        "usage": None,
        "user": asked.user,
    }
