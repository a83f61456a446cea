"""From a request of the Messages protocol to one for a chat completion."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Literal

from lexshard.serve_app.messages_api.protocol import (
    NO_IMAGES,
    MessagesRequest,
    OutputConfig,
    PromptFields,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    chat_tools,
    chosen,
    read_text,
    read_texts,
    response_format,
)
from lexshard.serve_app.openai.errors import bad_request, shortened
from lexshard.serve_app.openai.protocol import StrictModel
from lexshard.serve_app.over_chat.chat_body import (
    ChatBody,
    ChatMessages,
    Reads,
    given,
    text_parts,
    thinking_fields,
)
from lexshard.serve_app.over_chat.reading import Piece

# Fields of the protocol by those of chat completions, for what is refused later.
OWN_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    ".parameters": ".input_schema",
}
# Told to the model as they are.
SAME = ("temperature", "top_p", "top_k", "seed", "priority", "request_id", "receipt")
# What may be in a reply; what was redacted says nothing that a model could read.
OF_REPLIES = ("text", "thinking", "redacted_thinking", "tool_use")
# Whether the model thinks, by the type of `ThinkingOptions`; it decides where that is None.
THINKS = {"enabled": True, "adaptive": None, "between_tools": None, "disabled": False}


class MessagesTurn(StrictModel):
    """A message; ``content`` is text, or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: Any


class Turns(ChatMessages):
    """Those that turns of a conversation make up. The assistant's that follow each other are one,
    too, as with Anthropic."""

    def read(self, messages: Piece) -> None:
        """Adds what messages say: results of tools are messages of their own.

        Raises:
            ApiError: 400 naming the place of what is wrong or is not implemented.
        """
        turns = ((each.read(MessagesTurn).role, each) for each in messages.entries())
        for role, own in groupby(turns, itemgetter(0)):
            pieces = (each for _, each in own)
            if role == "assistant":
                self._read_replies(pieces)
            else:
                for each in pieces:
                    self._read_turn(role, each)

    def _read_turn(self, role: str, message: Piece) -> None:
        content = message.part("content")
        if isinstance(content.value, str):
            self.add({"role": role, "content": content.value}, message.place)
        elif texts := self._texts(role, content):
            self.add({"role": role, "content": texts}, message.place)

    def _read_replies(self, turns: Iterator[Piece]) -> None:
        """Adds turns of the assistant as one, which is where the first of them is."""
        first = next(turns)
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block in chain.from_iterable(map(_blocks, chain([first], turns))):
            match block.kind(OF_REPLIES, "not implemented by this server"):
                case "text":
                    texts.append(read_text(block))
                case "thinking":
                    thoughts.append(block.read(ThinkingBlock).thinking)
                case "tool_use":
                    call = block.read(ToolUseBlock)
                    self.calls.add(call.id)
                    calls.append(call.as_call())
        said = "".join(texts) if texts or not calls else None
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if calls:
            message["tool_calls"] = calls
        if thought := "\n".join(filter(None, thoughts)):
            message["reasoning"] = thought
        self.add(message, first.place)

    def _texts(self, role: str, content: Piece) -> list[dict[str, str]]:
        """Those of blocks, before which there may be results of tools."""
        texts: list[dict[str, str]] = []
        blocks = list(content.entries("blocks"))
        if not blocks:
            raise content.wrong(" must not be empty")
        for block in blocks:
            known = ("text", "tool_result") if role == "user" else ("text",)
            if block.kind(known, NO_IMAGES) == "text":
                texts.append({"type": "text", "text": read_text(block)})
            elif texts:
                raise block.wrong(": results of tools come before text in a message")
            else:
                self._read_result(block)
        return texts

    def _read_result(self, block: Piece) -> None:
        result = block.read(ToolResultBlock)
        if result.tool_use_id not in self.calls:
            name = shortened(result.tool_use_id)
            raise block.part("tool_use_id").wrong(f": there is no tool_use '{name}' before it")
        content = block.part("content")
        text = "" if content.value is None else "\n".join(read_texts(content))
        message = {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}
        self.add(message, block.place)


def _blocks(message: Piece) -> Iterator[Piece]:
    """Those that it says; a text is one."""
    content = message.part("content")
    return Piece(text_parts(content.value), content.place).entries("blocks")


def _unbilled(text: str) -> str:
    """Without Claude Code's first line, in which each request has another number: no prefix would
    be found in the cache."""
    billed = text.startswith("x-anthropic-billing-header:")
    return text.partition("\n")[2].lstrip("\n") if billed else text


def prompt_body(asked: PromptFields, reads: Reads) -> ChatBody:
    """What decides the prompt of a chat completion; ``reads`` tells whether the chat template reads
    a variable.

    Raises:
        ApiError: 400 naming the place of what is wrong or is not implemented.
    """
    turns = Turns()
    texts = [] if asked.system is None else read_texts(Piece(asked.system, "system"))
    if text := "\n".join(filter(None, map(_unbilled, texts))):
        turns.add({"role": "system", "content": text}, "system")
    turns.read(Piece(asked.messages, "messages"))
    if not turns.messages:
        raise bad_request("'messages' must not be empty", "messages")
    body: dict[str, Any] = {"messages": turns.messages}
    if asked.model is not None:
        body["model"] = asked.model
    last = turns.messages[-1]
    if last["role"] == "assistant":
        if "tool_calls" in last:
            place = turns.places[len(turns.messages) - 1]
            raise bad_request(f"'{place}': no tool_result follows its tool_use", place)
        body["continue_final_message"] = True
    tools = chat_tools(asked.tools or [])
    if tools:
        body["tools"] = tools
    if asked.tool_choice is not None:
        body |= chosen(asked.tool_choice, tools)
    config = asked.output_config or OutputConfig()
    on = None if asked.thinking is None else THINKS[asked.thinking.type]
    body |= thinking_fields(reads, config.effort, on)
    if config.format is not None:
        body["response_format"] = response_format(config.format)
    return ChatBody(body, turns.places)


def message_body(asked: MessagesRequest, reads: Reads) -> ChatBody:
    """What a chat completion is asked to answer; ``reads`` as in `prompt_body`.

    Raises:
        ApiError: 400 naming the place of what is wrong or is not implemented.
    """
    thinking = asked.thinking
    if thinking is not None and thinking.type == "enabled":
        budget, place = thinking.budget_tokens, "thinking.budget_tokens"
        if budget is None:
            raise bad_request(f"'{place}' is required", place, "missing_required_parameter")
        if budget >= asked.max_tokens:
            raise bad_request(f"'{place}' must be less than 'max_tokens'", place)
    translated = prompt_body(asked, reads)
    body = translated.fields | given(asked, SAME) | {"max_completion_tokens": asked.max_tokens}
    if asked.stop_sequences:
        body["stop"] = asked.stop_sequences
    return ChatBody(body, translated.places)
