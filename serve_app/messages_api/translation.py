"""From a request of the Messages protocol to one for a chat completion."""

from __future__ import annotations

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
    thinking_fields,
)
from lexshard.serve_app.over_chat.reading import inside, kind_of, read_at, refused_kind

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
SAME = ("temperature", "top_p", "top_k", "seed", "priority", "request_id")
# Whether the model thinks, by the type of `ThinkingOptions`; it decides where that is None.
THINKS = {"enabled": True, "adaptive": None, "disabled": False}


class MessagesTurn(StrictModel):
    """A message; ``content`` is text, or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: Any


class Turns(ChatMessages):
    """Those that turns of a conversation make up."""

    def read(self, message: Any, place: str) -> None:
        """Adds what a message says: results of tools are messages of their own.

        Raises:
            ApiError: 400 naming the place of what is wrong or is not implemented.
        """
        turn = read_at(MessagesTurn, message, place)
        where = inside(place, "content")
        if isinstance(turn.content, str):
            self.add({"role": turn.role, "content": turn.content}, place)
        elif not isinstance(turn.content, list):
            message = f"'{where}' must be a string or a list of blocks"
            raise bad_request(message, where, "invalid_type")
        elif turn.role == "assistant":
            self._read_reply(turn.content, place, where)
        else:
            self._read_blocks(turn.role, turn.content, place, where)

    def _read_reply(self, blocks: list[Any], place: str, where: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            inner = inside(where, index)
            match kind_of(block, inner):
                case "text":
                    texts.append(read_text(block, inner))
                case "thinking":
                    thoughts.append(read_at(ThinkingBlock, block, inner).thinking)
                case "redacted_thinking":  # says nothing that this model could read
                    continue
                case "tool_use":
                    call = read_at(ToolUseBlock, block, inner)
                    self.calls.add(call.id)
                    calls.append(call.as_call())
                case kind:
                    raise refused_kind(inner, kind, "not implemented by this server")
        said = "".join(texts)
        message: dict[str, Any] = {"role": "assistant", "content": said if texts else None}
        if not calls and not texts:
            message["content"] = ""
        if calls:
            message["tool_calls"] = calls
        if thought := "\n".join(filter(None, thoughts)):
            message["reasoning"] = thought
        self.add(message, place)

    def _read_blocks(self, role: str, blocks: list[Any], place: str, where: str) -> None:
        if not blocks:
            raise bad_request(f"'{where}' must not be empty", where)
        texts: list[dict[str, str]] = []
        for index, block in enumerate(blocks):
            inner = inside(where, index)
            kind = kind_of(block, inner)
            if kind == "text":
                texts.append({"type": "text", "text": read_text(block, inner)})
            elif kind == "tool_result" and role == "user":
                if texts:
                    raise bad_request(
                        f"'{inner}': results of tools come before text in a message", inner
                    )
                self._read_result(read_at(ToolResultBlock, block, inner), inner)
            else:
                raise refused_kind(inner, kind, NO_IMAGES)
        if texts:
            self.add({"role": role, "content": texts}, place)

    def _read_result(self, result: ToolResultBlock, place: str) -> None:
        if result.tool_use_id not in self.calls:
            where = inside(place, "tool_use_id")
            name = shortened(result.tool_use_id)
            raise bad_request(f"'{where}': there is no tool_use '{name}' before it", where)
        content = [] if result.content is None else result.content
        text = "\n".join(read_texts(content, inside(place, "content")))
        self.add({"role": "tool", "tool_call_id": result.tool_use_id, "content": text}, place)


def prompt_body(asked: PromptFields, reads: Reads) -> ChatBody:
    """What decides the prompt of a chat completion; ``reads`` tells whether the chat template reads
    a variable.

    Raises:
        ApiError: 400 naming the place of what is wrong or is not implemented.
    """
    turns = Turns()
    if asked.system is not None and asked.system != []:
        text = "\n".join(read_texts(asked.system, "system"))
        turns.add({"role": "system", "content": text}, "system")
    for index, message in enumerate(asked.messages):
        turns.read(message, f"messages[{index}]")
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
