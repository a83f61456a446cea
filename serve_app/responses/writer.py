"""A response in the words of its protocol: its items, and the events of its stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from lexshard.serve_app.openai.chat import ChatWriter
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.over_chat.parts import Event, PartsWriter, ReplyPart
from lexshard.serve_app.responses.protocol import ResponsesRequest

Keep = Callable[[dict[str, Any]], Awaitable[None]]
# What a response that fails in its stream is told by.
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
ITEM_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


def new_id(prefix: str) -> str:
    """An identity that nothing else has."""
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponseItemWriter:
    """Writes one output item."""

    def __init__(self, part: ReplyPart) -> None:
        self.part = part
        self.id = new_id("ctc" if part.custom else ITEM_PREFIXES[part.kind])

    def item(self, status: str) -> dict[str, Any]:
        """The item as it is now; nothing is in it yet where ``status`` is ``in_progress``."""
        part = self.part
        begins = status == "in_progress"
        if part.kind == "text":
            content = [] if begins else [self.content()]
            told = {"type": "message", "role": "assistant", "content": content}
            return {"id": self.id, "status": status, **told}
        if part.kind == "reasoning":
            content = [] if begins else [self.content()]
            return {
                "id": self.id,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": None,
                "status": status,
            }
        called = {"call_id": part.call_id, "name": part.name}
        text = "" if begins else part.text
        if part.custom:
            return {"id": self.id, "type": "custom_tool_call", **called, "input": text}
        told = {"type": "function_call", **called, "arguments": text}
        return {"id": self.id, "status": status, **told}

    def content(self, *, empty: bool = False) -> dict[str, Any]:
        """The one part of a message or of reasoning."""
        text = "" if empty else self.part.text
        if self.part.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if empty else self.part.logprobs
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ResponsesWriter(PartsWriter):
    """Writes one response, and has it kept by ``keep`` before the client hears of its end, so that
    it may refer to it then."""

    def __init__(self, asked: ResponsesRequest, model: str, keep: Keep, chat: ChatWriter) -> None:
        super().__init__(chat)
        self._items: list[ResponseItemWriter] = []
        self._events = 0
        self._keep = keep
        self._response = _beginning(asked, model)

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

    def _finish(self, status: str) -> None:
        self._response["status"] = status
        self._response["output"] = [
            item.item("completed" if item.part.ended and not self._is_cut(item) else "incomplete")
            for item in self._items
        ]
        if self.usage is not None:
            self._response["usage"] = usage_of(self.usage)

    def _is_cut(self, item: ResponseItemWriter) -> bool:
        """Whether the budget ended in it."""
        return item is self._items[-1] and self.finish_reason == "length"

    def _event(self, kind: str, **fields: Any) -> Event:
        told = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return told

    # -- the events of one item -------------------------------------------------------------------

    def part_begun(self, part: ReplyPart) -> list[Event]:
        item = ResponseItemWriter(part)
        self._items.append(item)
        added = self._event(
            "response.output_item.added", output_index=part.index, item=item.item("in_progress")
        )
        if part.kind == "call":
            return [added]
        place = self._place(item, with_content=True)
        empty = item.content(empty=True)
        return [added, self._event("response.content_part.added", **place, part=empty)]

    def part_added(self, part: ReplyPart, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        told: dict[str, Any] = {}
        if part.kind == "call":
            kind = f"response.{_call_field(part)}.delta"
        elif part.kind == "reasoning":
            kind = "response.reasoning_text.delta"
        else:
            kind, told = "response.output_text.delta", {"logprobs": logprobs}
        place = self._place(self._items[part.index], with_content=part.kind != "call")
        return [self._event(kind, **place, delta=text, **told)]

    def part_ended(self, part: ReplyPart) -> list[Event]:
        item = self._items[part.index]
        status = "incomplete" if self._is_cut(item) else "completed"
        if part.kind == "call":
            events = [self._call_ended(item)]
        else:
            place, text = self._place(item, with_content=True), part.text
            if part.kind == "reasoning":
                done = self._event("response.reasoning_text.done", **place, text=text)
            else:
                scores = part.logprobs
                done = self._event("response.output_text.done", **place, text=text, logprobs=scores)
            whole = item.content()
            events = [done, self._event("response.content_part.done", **place, part=whole)]
        told = {"output_index": part.index, "item": item.item(status)}
        return [*events, self._event("response.output_item.done", **told)]

    def _call_ended(self, item: ResponseItemWriter) -> Event:
        part = item.part
        told = {"input": part.text} if part.custom else {"name": part.name, "arguments": part.text}
        place = self._place(item, with_content=False)
        return self._event(f"response.{_call_field(part)}.done", **place, **told)

    def _place(self, item: ResponseItemWriter, *, with_content: bool) -> dict[str, Any]:
        place = {"item_id": item.id, "output_index": item.part.index}
        return {**place, "content_index": 0} if with_content else place


def _call_field(part: ReplyPart) -> str:
    return "custom_tool_call_input" if part.custom else "function_call_arguments"


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


def _beginning(asked: ResponsesRequest, model: str) -> dict[str, Any]:
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
