"""What ``input`` holds, the chat messages that are made of it, and how it is kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lexshard.serve_app.openai.errors import bad_request, shortened
from lexshard.serve_app.openai.protocol import (
    MAX_MESSAGES,
    NotImplementedField,
    StrictModel,
    read_object,
)
from lexshard.serve_app.over_chat.chat_body import ChatMessages
from lexshard.serve_app.over_chat.reading import inside, kind_of, read_at, refused_kind
from lexshard.serve_app.responses.writer import new_id
from lexshard.serve_app.tools.offer import ToolName

Status = Literal["in_progress", "completed", "incomplete"]


class ItemFields(StrictModel):
    """What any item may have of those that a reply had; it changes nothing."""

    id: str | None = None
    status: Status | None = None
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
    namespace: Annotated[Any, NotImplementedField()] = None


class CustomCallItem(ItemFields):
    type: Literal["custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: ToolName
    input: str
    namespace: Annotated[Any, NotImplementedField()] = None


class CallOutputItem(ItemFields):
    """Of both kinds of calls; ``output`` is text, or a list of parts."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Any
    name: str | None = None
    namespace: Annotated[Any, NotImplementedField()] = None


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


class InputRefusal(StrictModel):
    type: Literal["refusal"]
    refusal: str


class Conversation(ChatMessages):
    """Those that items make up."""

    def read(self, items: list[Any], place: str) -> None:
        """Adds what ``items`` say; what one reply consisted of becomes one message.

        Raises:
            ApiError: 400 naming the place of what is wrong or is not implemented.
        """
        if len(items) > MAX_MESSAGES:
            raise bad_request(f"'{place}' holds more than {MAX_MESSAGES} items", place)
        for index, item in enumerate(items):
            self._read_item(item, inside(place, index))

    def _read_item(self, item: Any, place: str) -> None:
        kind = kind_of(item, place, usual="message")
        match kind:
            case "message":
                self._read_message(read_at(MessageItem, item, place), place)
            case "reasoning":
                thought = read_at(ReasoningInput, item, place).text
                if thought:
                    self._open_reply(place, "content", "reasoning")["reasoning"] = thought
            case "function_call":
                call = read_at(FunctionCallItem, item, place)
                if call.status == "incomplete":  # its JSON ends with the budget of a reply
                    return
                if call.arguments.strip():  # none at all are an empty object
                    read_object(call.arguments, inside(place, "arguments"))
                function = {"name": call.name, "arguments": call.arguments}
                self._call(call.call_id, {"type": "function", "function": function}, place)
            case "custom_tool_call":
                custom = read_at(CustomCallItem, item, place)
                told = {"name": custom.name, "input": custom.input}
                self._call(custom.call_id, {"type": "custom", "custom": told}, place)
            case "function_call_output" | "custom_tool_call_output":
                output = read_at(CallOutputItem, item, place)
                if output.call_id not in self.calls:
                    where = inside(place, "call_id")
                    raise bad_request(
                        f"'{where}': there is no call '{shortened(output.call_id)}' before it",
                        where,
                    )
                text = "".join(read_parts(output.output, inside(place, "output")))
                message = {"role": "tool", "tool_call_id": output.call_id, "content": text}
                self.add(message, place)
            case "item_reference":
                raise refused_kind(place, kind, "send the item itself, or 'previous_response_id'")
            case _:
                raise refused_kind(place, kind, "not implemented by this server")

    def _read_message(self, item: MessageItem, place: str) -> None:
        parts = read_parts(item.content, inside(place, "content"))
        if item.role == "assistant":
            self._open_reply(place, "content")["content"] = "".join(parts)
        elif isinstance(item.content, str):
            self.add({"role": item.role, "content": item.content}, place)
        else:
            texts = [{"type": "text", "text": part} for part in parts]
            self.add({"role": item.role, "content": texts}, place)

    def _call(self, call_id: str, call: dict[str, Any], place: str) -> None:
        message = self._open_reply(place)
        message.setdefault("tool_calls", []).append({"id": call_id, **call})
        self.calls.add(call_id)

    def _open_reply(self, place: str, *new: str) -> dict[str, Any]:
        """The assistant's message that goes on, or a new one where that has one of the fields
        ``new``, or a call of a tool before them."""
        last = self.messages[-1] if self.messages else {"role": ""}
        taken = [name for name in new if last.get(name) is not None]
        if last["role"] != "assistant" or taken or (new and "tool_calls" in last):
            last = {"role": "assistant", "content": None}
            self.add(last, place)
        return last


def read_parts(content: Any, place: str) -> list[str]:
    """The texts of a string or of a list of parts.

    Raises:
        ApiError: 400 for parts that are no text.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise bad_request(f"'{place}' must be a string or a list of parts", place, "invalid_type")
    if not content:
        raise bad_request(f"'{place}' must not be empty", place)
    return [_read_part(part, inside(place, index)) for index, part in enumerate(content)]


def _read_part(part: Any, place: str) -> str:
    kind = kind_of(part, place)
    if kind == "refusal":
        return read_at(InputRefusal, part, place).refusal
    if kind in ("input_text", "output_text", "text"):
        return read_at(InputText, part, place).text
    raise refused_kind(place, kind, "this model reads text only")


ITEM_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def kept_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an ``input`` that was read without error, each with its ``id`` and ``type``;
    those of messages with parts."""
    return [_kept(item) for item in items]


def _kept(item: dict[str, Any]) -> dict[str, Any]:
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
