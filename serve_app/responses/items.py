"""What ``input`` holds, the chat messages that are made of it, and how it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from lexshard.serve_app.openai.chat_fields import RefusalPart
from lexshard.serve_app.openai.errors import bad_request, shortened
from lexshard.serve_app.openai.protocol import (
    MAX_MESSAGES,
    Ignored,
    NotImplementedField,
    StrictModel,
    read_object,
)
from lexshard.serve_app.over_chat.chat_body import ChatMessages, add_content
from lexshard.serve_app.over_chat.reading import Piece, inside
from lexshard.serve_app.responses.protocol import flat_name
from lexshard.serve_app.responses.writer import ITEM_PREFIXES, new_id
from lexshard.serve_app.tools.offer import ToolName

Status = Literal["in_progress", "completed", "incomplete"]


class ItemFields(StrictModel):
    """What any item may have that a reply had, or that Codex says of it; it changes nothing."""

    id: str | None = None
    status: Status | None = None
    internal_chat_message_metadata_passthrough: Ignored = None
    caller: Annotated[Any, NotImplementedField({"type": "direct"})] = None


class MessageItem(ItemFields):
    """``content`` is text, or a list of parts."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Any
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(ItemFields):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: ToolName
    arguments: str
    namespace: ToolName | None = None


class CustomCallItem(ItemFields):
    type: Literal["custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: ToolName
    input: str
    namespace: ToolName | None = None


class CallOutputItem(ItemFields):
    """Of both kinds of calls; ``output`` is text, or a list of parts."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Any
    name: str | None = None
    namespace: str | None = None


class ReasoningText(StrictModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningInput(ItemFields):
    """``content`` goes before ``summary``, which tells of it."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or ())


class InputText(StrictModel):
    """``annotations`` and ``logprobs`` are of output that is sent back."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Ignored = None


KINDS = (
    *("message", "reasoning", "function_call", "function_call_output"),
    *("custom_tool_call", "custom_tool_call_output", "item_reference"),
)


@dataclass(slots=True)
class Conversation(ChatMessages):
    """Those that items make up. ``cut`` are the ids of calls in which the budget of a reply ended:
    what there is of them is not told, nor what clients send as their results."""

    cut: set[str] = field(default_factory=set)

    def read(self, items: list[Any], place: str) -> None:
        """Adds what ``items`` say; what one reply consisted of becomes one message.

        Raises:
            ApiError: 400 naming the place of what is wrong or is not implemented.
        """
        if len(items) > MAX_MESSAGES:
            raise bad_request(f"'{place}' holds more than {MAX_MESSAGES} items", place)
        for item in Piece(items, place).entries():
            self._read_item(item)

    def _read_item(self, item: Piece) -> None:
        match item.kind(KINDS, "not implemented by this server", usual="message"):
            case "message":
                self._read_message(item)
            case "reasoning":
                thought = item.read(ReasoningInput).text
                if thought:
                    self._open_reply(item.place).setdefault("reasoning", []).append(thought)
            case "function_call":
                call = item.read(FunctionCallItem)
                if self._is_cut(call):
                    return
                if call.arguments.strip():  # none at all are an empty object
                    read_object(call.arguments, inside(item.place, "arguments"))
                told = {"name": flat_name(call.namespace, call.name), "arguments": call.arguments}
                self._call(item, call.call_id, {"type": "function", "function": told})
            case "custom_tool_call":
                custom = item.read(CustomCallItem)
                if self._is_cut(custom):
                    return
                told = {"name": flat_name(custom.namespace, custom.name), "input": custom.input}
                self._call(item, custom.call_id, {"type": "custom", "custom": told})
            case "item_reference":
                item.kind((), "send the item itself, or 'previous_response_id'")
            case _:
                output = item.read(CallOutputItem)
                told_before = output.call_id in self.calls
                if not told_before and output.call_id not in self.cut:
                    name = shortened(output.call_id)
                    raise item.part("call_id").wrong(f": there is no call '{name}' before it")
                text = "".join(read_parts(item.part("output")))
                if told_before:
                    message = {"role": "tool", "tool_call_id": output.call_id, "content": text}
                    self.add(message, item.place)

    def _read_message(self, item: Piece) -> None:
        message, parts = item.read(MessageItem), read_parts(item.part("content"))
        if message.role == "assistant":
            add_content(self._open_reply(item.place), "".join(parts))
        elif isinstance(message.content, str):
            self.add({"role": message.role, "content": message.content}, item.place)
        else:
            texts = [{"type": "text", "text": part} for part in parts]
            self.add({"role": message.role, "content": texts}, item.place)

    def _is_cut(self, call: FunctionCallItem | CustomCallItem) -> bool:
        """Whether the budget of a reply ended in it; ``cut`` has its id then."""
        if call.status == "incomplete":
            self.cut.add(call.call_id)
        return call.status == "incomplete"

    def _call(self, item: Piece, call_id: str, call: dict[str, Any]) -> None:
        message = self._open_reply(item.place)
        message.setdefault("tool_calls", []).append({"id": call_id, **call})
        self.calls.add(call_id)

    def _open_reply(self, place: str) -> dict[str, Any]:
        """The assistant's message that goes on, or a new one. Its reasoning is a list."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] != "assistant":
            last = {"role": "assistant", "content": None}
            self.add(last, place)
        return last


def read_parts(content: Piece) -> list[str]:
    """The texts of a string or of a list of parts.

    Raises:
        ApiError: 400 for parts that are no text.
    """
    if isinstance(content.value, str):
        return [content.value]
    parts = list(content.entries("parts"))
    if not parts:
        raise content.wrong(" must not be empty")
    return list(map(_read_part, parts))


def _read_part(part: Piece) -> str:
    known = ("refusal", "input_text", "output_text", "text")
    if part.kind(known, "this model reads text only") == "refusal":
        return part.read(RefusalPart).refusal
    return part.read(InputText).text


def kept_item(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an ``input`` that was read without error, with its ``id`` and ``type``; that of a
    message with parts."""
    kind = item.get("type") or "message"
    own_id = item.get("id") or new_id(ITEM_PREFIXES[kind])
    kept = {"id": own_id, "status": "completed", **item, "type": kind}
    kept["id"] = own_id
    if kind == "reasoning":
        kept["summary"] = item.get("summary") or []
    if kind != "message" or not isinstance(item["content"], str):
        return kept
    if item["role"] == "assistant":
        part = {"type": "output_text", "text": item["content"], "annotations": []}
    else:
        part = {"type": "input_text", "text": item["content"]}
    return kept | {"content": [part]}
